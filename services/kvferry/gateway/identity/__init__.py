"""Who calls: keys, tokens and certificates become tenants, and what these may have in flight."""
