"""How route keys travel in vLLM's events of pages stored, between an engine's core and its worker's mirror."""

# In `extra_keys`, first of the first entry, where vLLM has what a block's hash is salted with: packed keys follow it.
ROUTE_KEYS_TAG = "kvferry.route_keys"
