"""What an engine starts with: arguments, weights, and what is refused."""
