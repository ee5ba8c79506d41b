"""Both ends of the link between a gateway and a worker: messages, codec, flow control, transports."""
