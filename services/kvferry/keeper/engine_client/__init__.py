"""The end of a keeper's connection in an engine."""
