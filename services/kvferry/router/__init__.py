"""Placement of requests on workers, and their way through prefill and decode."""
