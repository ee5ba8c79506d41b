"""A whole cluster on this machine."""

__version__ = "0.1.0"
