"""Plans deployments: how many GPUs of which kind, split how, and what binds. Pure: no I/O but the package's own data."""
