"""Start of an engine: its arguments, its weights, and checks that refuse it."""
