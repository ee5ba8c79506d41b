"""Plans deployments: how many GPUs of which kind, split how, and what binds. Pure, beside its own data files."""
