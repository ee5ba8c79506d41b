"""A report of one or more deployments: one HTML file that needs nothing else, its plots as PNG, and all results."""

from kvferry_loadtest.report.page import write_report

__all__ = ["write_report"]
