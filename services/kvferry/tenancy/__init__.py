"""Tenants: who a request belongs to. Pure."""
