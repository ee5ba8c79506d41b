"""What a placement costs, and what that is learned from."""
