"""Names of KV pages. Pure."""
