"""`python -m esper`."""

import sys

from esper.cli import main

if __name__ == "__main__":
    sys.exit(main())
