"""Whose request is next, and whose streams have slots."""
