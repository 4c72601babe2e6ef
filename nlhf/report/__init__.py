"""One page about one judge or several: figures with counts and intervals, plots, and the judgements themselves.

Station of the path: metrics -> **report**. The page is a single HTML file that needs nothing else, not even a
network; a table in markdown stands beside it. `nlhf.report.view` makes the tables, `nlhf.report.plots` the plots and
`nlhf.report.browser` the data of the browser of judgements. Everything that a model or a data set wrote shows as text.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from nlhf.errors import UserError
from nlhf.evaluation.results import Run, load_run
from nlhf.files import write_text
from nlhf.report.browser import (
    FLAGS,
    MAX_JUDGEMENTS,
    OUTCOMES,
    browser_data,
    choose_pairs,
    script_hash,
    script_json,
)
from nlhf.report.curves import draw, read_curves
from nlhf.report.plots import plots
from nlhf.report.view import model_name, run_names, tables

_ASSETS = Path(__file__).parents[1] / "assets" / "report"


@dataclass(frozen=True)
class Page:
    """A report as a self-contained HTML page and as markdown."""

    html: str
    markdown: str


def report(runs: list[str], out: str, baseline: str | None = None) -> None:
    """Compare evaluated runs in one table and page: figures, and paired differences from a baseline.

    Args:
        runs: Folders of evaluated runs on the same pairs.
        out: Folder that receives report.md and report.html.
        baseline: Folder of the run to compare with; the first of runs by default.

    Raises:
        UserError: a folder holds no finished evaluation, or the runs were not measured on the same pairs.
    """
    if not runs:
        raise UserError("report: name at least one run folder in runs")
    folders = dict.fromkeys(str(Path(run)) for run in ([baseline] if baseline else []) + list(runs))
    write_report([load_run(folder) for folder in folders], out)
    print(f"report: {Path(out) / 'report.html'}")


def write_report(runs: Sequence[Run], out: str | Path) -> None:
    """Write report.md and report.html; see `build_report`."""
    page = build_report(runs)
    write_text(Path(out) / "report.md", page.markdown)
    write_text(Path(out) / "report.html", page.html)


def build_report(runs: Sequence[Run], max_judgements: int = MAX_JUDGEMENTS, seed: int = 0) -> Page:
    """Report one run, or compare several with the first of them.

    Args:
        runs: Evaluated runs, the baseline first.
        max_judgements: At most this many judgements are shown (whole pairs, chosen by seed; the page says so).
        seed: Of that choice.

    Raises:
        UserError: the runs were not measured on the same pairs, or differ in what counts as a wrong critique.
    """
    names = run_names(runs)
    shown = tables(names, runs)
    chosen = choose_pairs(runs, max_judgements, seed)
    data = browser_data(names, runs, chosen)
    script = _asset("report.js")
    html = _template("report.html.jinja").render(
        **shown,
        css=_asset("report.css"),
        script=script,
        script_hash=script_hash(script),
        plots=plots(names, runs),
        curves=draw(read_curves({name: _training_log(run) for name, run in zip(names, runs, strict=True)})),
        data=script_json(data),
        subset_names=data["subsets"],
        outcomes=OUTCOMES,
        flags=FLAGS,
        shown_judgements=len(data["judgements"]),
        all_judgements=sum(len(run.records) for run in runs),
        shown_pairs=len(chosen),
        all_pairs=len(runs[0].pairs),
    )
    return Page(html=html, markdown=_template("report.md.jinja").render(**shown))


def _training_log(run: Run) -> list[Path]:
    """The log of the training that made the judge, if its model lies in the folder of that run."""
    log = Path(model_name(run)).parent / "metrics.jsonl"
    return [log] if log.is_file() else []


def _asset(name: str) -> Markup:
    return Markup((_ASSETS / name).read_text(encoding="utf-8"))


@functools.cache
def _template(name: str) -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_ASSETS),
        autoescape=name.endswith(".html.jinja"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["cell"] = _cell
    return environment.get_template(name)


def _cell(text: Any) -> str:
    """Text within a markdown table: a bar or a line break would end the cell, and viewers obey HTML."""
    return " ".join(str(text).replace("|", "\\|").replace("<", "&lt;").split())
