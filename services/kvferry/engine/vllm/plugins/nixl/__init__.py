"""Seams of vLLM's NIXL connector."""
