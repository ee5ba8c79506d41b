"""Bytes of KV pages, computed from a model's configuration. Pure."""
