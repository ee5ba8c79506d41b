"""The endpoints that clients call: OpenAI HTTP and gRPC; authentication, admission and streaming."""
