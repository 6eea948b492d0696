"""``python -m tilepolicy``."""

from tilepolicy.cli import main

main()
