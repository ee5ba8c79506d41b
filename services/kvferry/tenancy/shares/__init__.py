"""Order of tenants' requests, and slots of their streams."""
