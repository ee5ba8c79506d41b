"""Engines that compute tokens: the contract (base.py), the simulator and vLLM."""
