"""Metrics and traces: the catalogue, Prometheus text, its listener, spans."""
