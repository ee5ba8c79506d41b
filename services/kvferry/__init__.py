"""kvferry serves large language models on a cluster, prefill and decode apart."""

import os

__version__ = "0.1.0"

# gRPC would start its poller anew in each forked child, which closes the poller's descriptors before it executes its
# program, and aborts: 3 of 100 engines, etcds and commands did not start (grpc issue 43055). gRPC is used in no child
# of a fork here. Read when gRPC's first channel is made.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
