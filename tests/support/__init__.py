"""Helpers that several test files share: real servers, peers of a link, nodes with tiers."""
