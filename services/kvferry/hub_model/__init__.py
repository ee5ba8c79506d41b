"""A model of the hub in a folder of a shared volume: one job fills it, pods wait until it is whole."""
