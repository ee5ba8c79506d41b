"""Benchmarks, chaos and fuzzing of kvferry; run each as `python -m bench.NAME` from the root of the checkout."""
