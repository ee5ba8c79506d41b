"""A whole cluster on this machine: etcd, Ray and the application, started and ended together."""
