"""Pages that tenants hold: what is kept, what goes next, and for whom."""
