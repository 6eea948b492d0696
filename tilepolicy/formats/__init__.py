"""Foreign tuning formats, read into policies and written from them."""
