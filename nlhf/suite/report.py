"""The report of a suite: a table of arms x tests with paired differences and intervals over seeds, plots, a page."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nlhf.evaluation.figures import definitions
from nlhf.evaluation.intervals import SeedInterval, seed_interval
from nlhf.evaluation.results import load_run
from nlhf.files import write_json, write_text
from nlhf.report.curves import Curve, draw, read_curves
from nlhf.suite import Arm, Test, runs, slug

METRICS = ("accuracy", "critique_f1", "wrong_critique_rate", "position_consistency")
_COLORS = ("#64748b", "#d97706", "#2563eb", "#059669", "#9333ea", "#dc2626", "#0891b2", "#65a30d")


@dataclass(frozen=True)
class Cell:
    """One figure of one arm on one test.

    Attributes:
        test: Name of the data set.
        arm: Name of the arm.
        metric: Name of the figure.
        values: One value a seed.
        mean: Over seeds, with its t-based 95 % interval.
        difference: Paired with the baseline seed by seed; None for the baseline itself.
    """

    test: str
    arm: str
    metric: str
    values: list[float]
    mean: SeedInterval
    difference: SeedInterval | None


def summarize(
    folder: Path,
    seeds: Sequence[int],
    arms: Sequence[Arm],
    tests: Sequence[Test],
    baseline: str,
    metrics: Sequence[str],
) -> list[Cell]:
    """Every figure of every arm on every test, over seeds; a seed that lacks a value is left out of that figure."""
    found: dict[tuple[str, str, int], dict[str, Any]] = {}
    for arm, test, seed, path in runs(folder, arms, tests, seeds):
        found[arm, test, seed] = {name: m.value for name, m in load_run(path, resamples=0).metrics.items()}
    cells = []
    for test in tests:
        for arm in arms:
            for metric in metrics:
                own = {s: found[arm.name, test.name, s][metric] for s in seeds}
                base = {s: found[baseline, test.name, s][metric] for s in seeds}
                values = [v for v in own.values() if v is not None]
                paired = [own[s] - base[s] for s in seeds if own[s] is not None and base[s] is not None]
                difference = None if arm.name == baseline else seed_interval(paired)
                cells.append(Cell(test.name, arm.name, metric, values, seed_interval(values), difference))
    return cells


def write_suite_report(
    folder: Path,
    name: str,
    seeds: Sequence[int],
    arms: Sequence[Arm],
    tests: Sequence[Test],
    baseline: str,
    metrics: Sequence[str] | None,
    seconds: float,
) -> Path:
    """Write summary.json, summary.md, summary.png and index.html, print the table, and return the page's path.

    summary.json holds all that the tables and the curves show, so that they can be drawn again without the runs.
    """
    metrics = list(metrics or METRICS)
    cells = summarize(folder, seeds, arms, tests, baseline, metrics)
    curves = read_curves(
        {a.name: [folder / f"seed-{s}" / slug(a.name) / "train" / "metrics.jsonl" for s in seeds] for a in arms}
    )
    summary = {"name": name, "seeds": list(seeds), "baseline": baseline}
    write_json(
        folder / "summary.json",
        {**summary, "cells": [asdict(c) for c in cells], "curves": [asdict(c) for c in curves]},
    )
    table = markdown(cells, metrics, baseline, len(seeds))
    write_text(folder / "summary.md", f"# {name}\n\n{table}")
    plot(cells, metrics, [a.name for a in arms], [t.name for t in tests], folder / "summary.png")
    page = folder / "index.html"
    write_text(page, _page(folder, name, cells, curves, metrics, arms, tests, seeds, baseline, seconds))
    print_table(cells, metrics, baseline, len(seeds))
    return page


def in_percent(interval: SeedInterval | None, signed: bool = False) -> str:
    """``76.2 [70.1, 82.3]`` in percent, or signed points for a difference."""
    if interval is None or interval.mean is None:
        return "-"
    number = (lambda v: f"{100 * v:+.1f}") if signed else (lambda v: f"{100 * v:.1f}")
    if interval.low is None:
        return number(interval.mean)
    return f"{number(interval.mean)} [{number(interval.low)}, {number(interval.high)}]"


def markdown(cells: Sequence[Cell], metrics: Sequence[str], baseline: str, n: int) -> str:
    """The table in markdown: figures in %, differences in points."""
    titles = [definitions()[m].title for m in metrics]
    lines = [
        f"Mean over {n} seeds in %, with 95 % intervals of Student's t over seeds; below each mean, the paired "
        f"difference from {baseline} in points.",
        "",
        "| test | arm | " + " | ".join(titles) + " |",
        "|---|---|" + "---|" * len(metrics),
    ]
    for test, arm in dict.fromkeys((c.test, c.arm) for c in cells):
        row = [c for c in cells if (c.test, c.arm) == (test, arm)]
        entries = [
            in_percent(c.mean) + (f"<br>{in_percent(c.difference, signed=True)}" if c.difference else "") for c in row
        ]
        lines.append(f"| {test} | {arm} | " + " | ".join(entries) + " |")
    return "\n".join(lines) + "\n"


def print_table(cells: Sequence[Cell], metrics: Sequence[str], baseline: str, n: int) -> None:
    """The table on the terminal."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(
        title=f"mean over {n} seeds in %, [95 % interval]; second line: points against {baseline}, paired by seed",
        title_justify="left",
    )
    table.add_column("test")
    table.add_column("arm")
    for metric in metrics:
        table.add_column(definitions()[metric].title, justify="right", no_wrap=True)
    previous = ""
    for test, arm in dict.fromkeys((c.test, c.arm) for c in cells):
        row = [c for c in cells if (c.test, c.arm) == (test, arm)]
        entries = [
            in_percent(c.mean) + ("\n" + in_percent(c.difference, signed=True) if c.difference else "") for c in row
        ]
        if previous and test != previous:
            table.add_section()
        table.add_row(test if test != previous else "", arm, *entries)
        previous = test
    # Piped into a file, the table must not be folded to 80 columns.
    if not console.is_terminal:
        console = Console(width=200)
    console.print(table)


def plot(cells: Sequence[Cell], metrics: Sequence[str], arms: Sequence[str], tests: Sequence[str], path: Path) -> None:
    """One panel a figure: arms side by side on every test, with intervals and the seeds as dots."""
    figure, axes = _figure(len(metrics))
    width = 0.8 / len(arms)
    for axis, metric in zip(axes, metrics, strict=True):
        for j, arm in enumerate(arms):
            color = _COLORS[j % len(_COLORS)]
            for i, test in enumerate(tests):
                cell = next(c for c in cells if (c.test, c.arm, c.metric) == (test, arm, metric))
                if cell.mean.mean is None:
                    continue
                x = i + (j - (len(arms) - 1) / 2) * width
                axis.bar(x, 100 * cell.mean.mean, width * 0.92, color=color, label=arm if i == 0 else None)
                axis.plot(
                    [x] * len(cell.values), [100 * v for v in cell.values], ".", color="black", alpha=0.35, markersize=4
                )
                if cell.mean.low is not None:
                    axis.plot([x, x], [100 * cell.mean.low, 100 * cell.mean.high], color="black", linewidth=1)
        axis.set_xticks(range(len(tests)), tests)
        axis.set_title(f"{definitions()[metric].title}, %", fontsize=10)
        axis.set_ylim(0, 100)
    _save(figure, axes, path)


def _figure(panels: int) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.6 * panels, 3.2))
    return figure, figure.subplots(1, panels, squeeze=False)[0]


def _save(figure: Any, axes: Any, path: Path) -> None:
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=8)
    handles, labels = axes[0].get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="lower center", ncols=min(len(labels), 5), frameon=False, fontsize=9)
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    figure.savefig(path, dpi=130)


def _page(
    folder: Path,
    name: str,
    cells: Sequence[Cell],
    curves: Sequence[Curve],
    metrics: Sequence[str],
    arms: Sequence[Arm],
    tests: Sequence[Test],
    seeds: Sequence[int],
    baseline: str,
    seconds: float,
) -> str:
    import base64

    import jinja2

    def image(file: str) -> str:
        return "data:image/png;base64," + base64.b64encode((folder / file).read_bytes()).decode()

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parents[1] / "assets" / "report"), autoescape=True
    )
    environment.filters["percent"] = in_percent
    rows = [
        (test, arm, [c for c in cells if (c.test, c.arm) == (test, arm)])
        for test, arm in dict.fromkeys((c.test, c.arm) for c in cells)
    ]
    pages = [(a, t, s, path.relative_to(folder) / "report.html") for a, t, s, path in runs(folder, arms, tests, seeds)]
    links = [
        (arm, test, [(s, page) for a, t, s, page in pages if (a, t) == (arm, test)])
        for arm, test in dict.fromkeys((a, t) for a, t, _, _ in pages)
    ]
    return environment.get_template("suite.html.jinja").render(
        name=name,
        rows=rows,
        titles=[definitions()[m].title for m in metrics],
        meanings=[definitions()[m].meaning for m in metrics],
        baseline=baseline,
        n=len(seeds),
        seeds=seeds,
        links=links,
        plot=image("summary.png"),
        curves=draw(curves),
        seconds=seconds,
        config=json.dumps([asdict(a) for a in arms], indent=1),
    )
