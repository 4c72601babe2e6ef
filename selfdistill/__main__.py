"""Entry point of ``selfdistill`` and ``python -m selfdistill``."""

import sys
from collections.abc import Sequence

from nlhf.cli import Verbs
from nlhf.cli import main as run

VERBS: Verbs = {
    "profile": ("selfdistill.profiling:profile", "show where a judge and its teacher differ, before training"),
    "train": ("selfdistill.train:train", "train a judge from language feedback by self-distillation (SDRM)"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return the exit code, as `nlhf.cli.main` does."""
    return run(argv, prog="selfdistill", verbs=VERBS)


if __name__ == "__main__":
    sys.exit(main())
