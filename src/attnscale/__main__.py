"""`python -m attnscale`."""

from attnscale.cli import main

main()
