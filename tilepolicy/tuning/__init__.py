"""Tiles found and proven with the real TPU compiler, on a machine without a TPU."""
