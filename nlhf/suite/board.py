"""The progress of a suite on the terminal, read from the logs of its runs.

Beside the path of a pair, as `nlhf.suite` is.
"""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from nlhf.files import read_jsonl

if TYPE_CHECKING:
    from nlhf.suite import Job


class Board:
    """Always-visible progress: how many runs are done, and where each running one stands."""

    def __init__(self, jobs: Sequence["Job"]):
        self.jobs, self.began, self.last = jobs, time.perf_counter(), 0.0

    def __enter__(self) -> "Board":
        from rich.console import Console
        from rich.live import Live

        self.console = Console(stderr=True)
        self.live = Live(console=self.console, refresh_per_second=2) if self.console.is_terminal else None
        if self.live:
            self.live.start()
        self.show()
        return self

    def __exit__(self, *_: Any) -> None:
        if self.live:
            self.live.stop()

    def say(self, line: str) -> None:
        """Print a line above the board."""
        self.console.print(line, soft_wrap=True, markup=False, highlight=False)

    def show(self) -> None:
        """Draw the board; without a terminal, one line every ten seconds."""
        from rich.table import Table

        elapsed = time.perf_counter() - self.began
        done = sum(job.done for job in self.jobs)
        head = f"{done}/{len(self.jobs)} runs done, {elapsed:.0f} s"
        running = [
            f"{job.name} {job.seed}: {state}" for job in self.jobs if not job.done and (state := progress_of(job))
        ]
        if self.live:
            table = Table(title=head, show_header=False)
            for line in running:
                table.add_row(line)
            self.live.update(table)
        elif elapsed - self.last >= 10 or done == len(self.jobs):
            self.last = elapsed
            self.say("; ".join([head, *running]))


def progress_of(job: "Job") -> str:
    """Where a running job stands, read from its own logs; empty before it starts."""
    tests = [p.name.removeprefix("test-") for p in job.folder.glob("test-*")]
    if tests:
        return f"judging {tests[-1]}"
    path = job.folder / "train" / "metrics.jsonl"
    if not path.is_file():
        return "starting" if job.folder.exists() else ""
    last = {}
    for _, row in read_jsonl(path, skip_torn=True):
        last |= row
    shown = {"reward": "reward", "validation/accuracy": "accuracy", "validation/critique_f1": "critique F1"}
    return ", ".join(
        [f"step {last.get('step', 0)}", *(f"{v} {last[k]:.2f}" for k, v in shown.items() if last.get(k) is not None)]
    )
