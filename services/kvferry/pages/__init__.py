"""What a KV page is called and what it weighs. Pure."""
