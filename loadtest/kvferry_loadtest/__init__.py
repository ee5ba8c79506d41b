"""Load tests of OpenAI-compatible endpoints; knows nothing of what serves behind them."""

import os

__version__ = "0.1.0"

# Without it a forked child may abort before it executes its program (grpc issue 43055).
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
