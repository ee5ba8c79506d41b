"""A node's keeper."""

__version__ = "0.1.0"
