"""The OpenAI endpoint: connections, requests, answers and streams."""
