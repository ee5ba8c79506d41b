"""What is to be shown on GPUs, as a plan that runs itself: `make gpu-check`, docs/operator/gpu.md."""
