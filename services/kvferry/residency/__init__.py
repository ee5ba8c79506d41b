"""Which owner holds which KV pages. Pure."""
