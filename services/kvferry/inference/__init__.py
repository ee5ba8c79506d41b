"""The public gRPC endpoint, generated from proto/kvferry/inference."""
