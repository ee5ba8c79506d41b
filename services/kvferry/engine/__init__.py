"""Engines: the contract (base.py) and vLLM."""
