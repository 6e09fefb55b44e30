"""``python -m heedful.cli``."""

from heedful.cli import main

main()
