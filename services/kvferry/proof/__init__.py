"""Whether KV pages survive the way between two engines: proven on the engines that serve."""
