"""Who is there: `base` is the contract, `etcd` the real registry, `memory` the shipped twin."""
