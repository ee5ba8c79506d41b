"""What clients talk to: translate, authenticate, stream."""
