"""The worker process: one engine, served to gateways."""
