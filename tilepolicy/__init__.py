"""Declarative tile and vocabulary-tiling policies for MaxText and Tokamax."""

__version__ = "0.1.0"
