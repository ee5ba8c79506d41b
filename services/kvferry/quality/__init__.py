"""What quantized KV pages cost in quality: samples, statistics, verdict and result file. Pure but for reading files."""
