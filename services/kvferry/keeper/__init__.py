"""The protocol of keepers (kvferry_keeper), its client in an engine, the layout of chunks."""
