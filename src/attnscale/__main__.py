"""The command line: `attnscale`, or `python -m attnscale`."""

import sys

from attnscale.errors import AttnscaleError
from attnscale.extras import needing


def main() -> None:
    """Run the command line; without the packages it needs, one sentence says which extra brings them."""
    try:
        with needing("The command line"):
            from attnscale.cli import main as run
    except AttnscaleError as error:
        print(f"attnscale: {error}", file=sys.stderr)
        sys.exit(2)
    run()


if __name__ == "__main__":
    main()
