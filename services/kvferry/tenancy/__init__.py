"""Tenants' identities. Pure."""
