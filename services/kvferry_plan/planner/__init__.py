"""Pure, but for its data files."""
