"""The keeper process of a node, its protocol and its client."""
