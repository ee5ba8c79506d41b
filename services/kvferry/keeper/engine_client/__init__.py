"""The engine's end of its connection to the keeper."""
