"""Chunks that keepers of other nodes lend and read over NIXL."""
