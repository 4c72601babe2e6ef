"""Entry point of ``metarm`` and ``python -m metarm``."""

import sys
from collections.abc import Sequence

from nlhf.cli import Verbs
from nlhf.cli import main as run

VERBS: Verbs = {
    "train": ("metarm.train:train", "teach a MetaRM the rewards of a judge's rollouts on labelled pairs (cold start)"),
    "evaluate": ("metarm.evaluate:evaluate", "measure a MetaRM on pairs whose critiques it never saw"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return the exit code, as `nlhf.cli.main` does."""
    return run(argv, prog="metarm", verbs=VERBS)


if __name__ == "__main__":
    sys.exit(main())
