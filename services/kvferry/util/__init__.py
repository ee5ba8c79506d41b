"""Helpers that do not depend on serving: addresses, files, tasks, YAML."""
