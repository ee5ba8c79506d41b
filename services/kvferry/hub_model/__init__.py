"""Models of the hub in folders of a shared volume."""
