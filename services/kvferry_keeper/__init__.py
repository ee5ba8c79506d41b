"""The keeper of a node and its volumes."""

__version__ = "0.1.0"
