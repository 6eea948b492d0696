"""Foreign tile files: read into one record type, written from a policy's concrete tiles.

One module per format, all plain Python: nothing here imports jax or Tokamax, and nothing that is
read is ever executed. ``records`` has the types they share, ``policies`` turns records into a
policy's text.
"""
