"""The vLLM engine; one file per seam."""
