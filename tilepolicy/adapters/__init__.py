"""One file per foreign library, imported on demand."""
