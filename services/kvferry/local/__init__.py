"""A whole cluster on this machine: etcd, Ray and the application, started together and ended without a trace."""
