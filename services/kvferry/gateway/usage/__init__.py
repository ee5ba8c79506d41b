"""Usage by tenant and model: records for bills, sums for metrics."""
