"""What is measured, in one place: names, units and meaning of every metric."""
