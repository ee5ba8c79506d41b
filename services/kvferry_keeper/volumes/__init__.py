"""I/O of volumes: threads, budgets, breakers and what is said of them."""
