"""Seams of the CPU tier and of the keeper's volumes."""
