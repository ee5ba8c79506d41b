"""Who holds which run of pages. Pure."""
