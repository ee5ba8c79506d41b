"""Messages of kvferry.inference.v1, generated from proto/ by `make proto`; never edited."""
