"""Checks on GPUs of what is tested on CPUs, as a plan that runs itself: `make gpu-check`, docs/operator/gpu.md."""
