"""Verified chunks in a volume's folder."""
