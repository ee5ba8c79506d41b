"""The vLLM engine: AsyncLLM, its renderer and what they need; one file per seam."""
