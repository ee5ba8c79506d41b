"""Engines: the contract (base.py), the simulator and vLLM."""
