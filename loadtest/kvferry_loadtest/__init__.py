"""Load tests of OpenAI-compatible endpoints; knows nothing of what serves behind them."""

__version__ = "0.1.0"
