"""Bodies of requests, over HTTP and gRPC: limits and validation before anything is rendered."""
