"""Arguments of vLLM's engine that a configuration may give, and their values."""
