"""Small things that know nothing of serving: addresses, files, tasks, YAML."""
