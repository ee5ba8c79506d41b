"""Registry of processes: protocol, etcd, and an in-memory double."""
