"""The endpoint kvferry.inference.v1: connections, calls, health and reflection."""
