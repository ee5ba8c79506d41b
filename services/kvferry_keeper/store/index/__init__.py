"""Which chunks a volume has, how much room they take, and which go next."""
