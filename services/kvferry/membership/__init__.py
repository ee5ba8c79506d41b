"""Registry of processes: protocol and etcd."""
