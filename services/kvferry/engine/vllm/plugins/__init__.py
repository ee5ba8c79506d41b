"""Modules that vLLM loads by path, one per seam."""
