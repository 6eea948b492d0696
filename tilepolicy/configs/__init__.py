"""A MaxText config read as files: every value with where it comes from."""

from tilepolicy.configs.reading import (
    Config,
    read,
)

__all__ = [
    "Config",
    "read",
]
