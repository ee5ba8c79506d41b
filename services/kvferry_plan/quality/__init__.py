"""Cost of quantized KV pages in quality: samples, statistics, verdict and result file. Pure but for reading files."""
