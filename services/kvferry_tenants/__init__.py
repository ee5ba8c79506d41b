# Tenants and their keys, which operators create and change in a cluster's etcd.
__version__ = "0.1.0"
