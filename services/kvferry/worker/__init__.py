"""A worker: one engine behind a gRPC server of its own, registered under a lease."""
