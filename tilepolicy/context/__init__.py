"""What is in force where a call is traced: scopes, layer tags, and who sees them."""
