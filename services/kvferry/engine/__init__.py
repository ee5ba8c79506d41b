"""Engines: what computes. `base` is the contract, `vllm_engine` the real one, `sim` the shipped twin."""
