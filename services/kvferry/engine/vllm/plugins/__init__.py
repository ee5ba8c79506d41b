"""What vLLM itself loads by module path, one file per seam."""
