"""Benchmarks of the losses: accuracy, compiled memory and time, against the rivals."""
