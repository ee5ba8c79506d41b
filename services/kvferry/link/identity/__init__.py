"""Identities that both ends of a link exchange, and reasons to refuse each other."""
