"""What tenants and models used: records for bills, sums for metrics."""
