"""kvferry serves large language models on a cluster, prefill and decode apart."""

__version__ = "0.1.0"
