"""Both ends of the link between a gateway and a worker."""
