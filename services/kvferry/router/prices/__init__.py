"""Predicted costs of placements, and the measurements that they are learned from."""
