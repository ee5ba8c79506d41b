"""KV chunks on NVMe: files that verify themselves, volumes of them, and what keeps and asks for them."""
