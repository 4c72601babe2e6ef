"""Entry point of ``nlhf`` and ``python -m nlhf``."""

import sys

from nlhf.cli import main

if __name__ == "__main__":
    sys.exit(main())
