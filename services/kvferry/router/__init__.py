"""Where a request goes and what happens when that place breaks."""
