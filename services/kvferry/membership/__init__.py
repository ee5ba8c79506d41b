"""Registry of processes: the contract (`base`), etcd, and a test double in memory."""
