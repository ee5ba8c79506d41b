"""A cluster on this machine: etcd, Ray and the application."""
