"""One module per command that needs more than the core."""
