"""Plans deployments: `kvferry plan` and what it knows of GPUs, models and published figures."""

__version__ = "0.1.0"
