"""One page about one judge or several: figures with counts and intervals, plots, and the judgements themselves.

Station of the path: metrics -> **report**. The page is a single HTML file that needs nothing else, not even a
network. Everything that a model or a data set wrote passes through Jinja's autoescape and shows as text.
"""

import functools
import io
import random
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
from markupsafe import Markup

from nlhf.critique.arguments import Argument, reference_sets
from nlhf.errors import UserError
from nlhf.files import write_text
from nlhf.judge import as_shown
from nlhf.ledger import format_metric
from nlhf.metrics import TRUNCATION_LIMIT, Difference, Metric, Record, definitions, flipped, lucky, with_twins
from nlhf.results import Run, compare_runs, load_run

if TYPE_CHECKING:
    from matplotlib.figure import Figure


MAX_JUDGEMENTS = 400
MAX_CHARACTERS = 12_000
_ASSETS = Path(__file__).parent / "assets" / "report"
_HEADLINE = (
    "accuracy",
    "accuracy_parsed",
    "parse_rate",
    "position_consistency",
    "critique_f1",
    "wrong_critique_rate",
)


_FILTERS = {
    "": "all",
    "right": "right",
    "wrong": "wrong",
    "flipped": "flipped",
    "unparsed": "no verdict",
    "lucky": "right label, wrong critique",
    "truncated": "truncated",
}


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
    names = _names(runs)
    threshold = runs[0].config["wrong_critique_threshold"]
    differences = {name: compare_runs(runs[0], run) for name, run in zip(names[1:], runs[1:], strict=True)}
    chosen = _choose(runs, max_judgements, seed)
    context = {
        "title": names[0] if len(runs) == 1 else f"{len(runs)} judges compared",
        "runs": [_facts(name, run) for name, run in zip(names, runs, strict=True)],
        "conventions": _conventions(runs),
        "warnings": [w for name, run in zip(names, runs, strict=True) for w in _warnings(name, run)],
        "figures": _figure_rows(runs, threshold),
        "differences": _difference_rows(differences, threshold),
        "baseline": names[0],
        "subsets": _subset_tables(names, runs),
    }
    html = _template("report.html.jinja").render(
        **context,
        css=Markup((_ASSETS / "report.css").read_text(encoding="utf-8")),
        js=Markup((_ASSETS / "report.js").read_text(encoding="utf-8")),
        plots=_plots(names, runs, threshold),
        cards=_cards(names, runs, chosen),
        filters=_FILTERS,
        shown_pairs=len(chosen),
        all_pairs=len(runs[0].pairs),
        all_judgements=sum(len(run.records) for run in runs),
    )
    return Page(html=html, markdown=_template("report.md.jinja").render(**context))


@functools.cache
def _template(name: str) -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_ASSETS),
        autoescape=name.endswith(".html.jinja"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["clip"] = _clip
    environment.filters["cell"] = _cell
    return environment.get_template(name)


def _cell(text: Any) -> str:
    """Text within a markdown table: a bar or a line break would end the cell, and viewers obey HTML."""
    return " ".join(str(text).replace("|", "\\|").replace("<", "&lt;").split())


def _clip(text: str) -> str:
    if len(text) <= MAX_CHARACTERS:
        return text
    return f"{text[:MAX_CHARACTERS]}\n… ({len(text) - MAX_CHARACTERS} more characters)"


# ------------------------------------------------------------------------------------------------------------- header


def _names(runs: Sequence[Run]) -> list[str]:
    """The runs' names, or their folders where two runs share a name."""
    if not runs:
        raise UserError("report: there is no run to report")
    folders = [run.folder.resolve() for run in runs]
    if len(set(folders)) < len(folders):
        raise UserError("report: a run is named more than once; a comparison needs different ones")
    names = [run.name for run in runs]
    return names if len(set(names)) == len(names) else [str(run.folder) for run in runs]


def _facts(name: str, run: Run) -> dict[str, Any]:
    data, scorer, environment = run.config["data"], run.config["scorer"], run.environment
    dirty = " with local changes" if environment.get("dirty") else ""
    sampling = ", ".join(f"{k} {v}" for k, v in run.config["sampling"].items() if v is not None)
    return {
        "name": name,
        "rows": {
            "Model": _with_hash(_model_name(run), run.manifest.get("model_hash")),
            "Data": _with_hash(
                f"{data['source']}, split {data['split']}", run.manifest["data"].get("data_hash", "")[:12]
            ),
            "Format": _with_hash(run.config["format"], run.manifest["judge"]["prompt_hash"]),
            "Sampling": sampling,
            "Scorer": "none" if scorer is None else _scorer_name(scorer),
            "Version": f"nlhf {environment.get('nlhf')}, commit {environment.get('commit') or 'unknown'}{dirty}",
            "Time": environment.get("time", "unknown"),
        },
    }


def _model_name(run: Run) -> str:
    return str(run.config["model"]["name"])


def _with_hash(text: str, digest: str | None) -> str:
    return f"{text} ({digest})" if digest else text


def _scorer_name(scorer: Mapping[str, Any]) -> str:
    arguments = ", ".join(f"{k} {v}" for k, v in scorer["init_args"].items())
    return f"{scorer['class_path']} ({arguments})" if arguments else scorer["class_path"]


def _conventions(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """What a reader must know to compare these figures with others: ties, averaging, n, orders, intervals."""
    run = runs[0]
    orders = {"both": "both", "AB": "AB only (as in the data)", "BA": "BA only (exchanged)"}[run.config["orders"]]
    samples = run.config["samples"]
    clusters = len({r.cluster for r in run.records})
    ties = run.metrics["tie_labels"]
    tie_policy = "a pair labelled a tie is right only if the verdict is a tie"
    if not run.manifest["judge"]["ties"]:
        tie_policy += f"; this format cannot say so, which concerns {ties.k} of {ties.n} judgements"
    return [
        ("n", f"{len(run.pairs)} pairs, {len(run.records)} judgements a run"),
        ("Orders", f"{orders}; {samples} repl{'y' if samples == 1 else 'ies'} to each prompt"),
        ("Averaging", "every judgement counts once, over all pairs, orders and samples"),
        ("Ties", tie_policy),
        ("No verdict", "not right in Accuracy, left out of Accuracy, parsed; never a tie"),
        (
            "Intervals",
            f"95 % percentile bootstrap, {run.config['resamples']} resamples of {clusters} clusters (a cluster holds "
            "all judgements of a pair, or of the pairs of one group); at exactly 0 or 100 % it has no width",
        ),
    ]


def _warnings(name: str, run: Run) -> list[str]:
    found = []
    truncated, failures = run.metrics["truncation_rate"], run.metrics["scorer_failures"]
    if truncated.n and truncated.value > TRUNCATION_LIMIT:
        found.append(
            f"{name}: {format_metric(truncated)} of the replies were cut off by the token limit and have no verdict; "
            "raise sampling.max_new_tokens."
        )
    if failures.k:
        found.append(f"{name}: {failures.k} of {failures.n} critiques could not be scored and are left out.")
    return found


# ------------------------------------------------------------------------------------------------------------- tables


def _figure_rows(runs: Sequence[Run], threshold: float) -> list[dict[str, Any]]:
    rows = []
    for name, definition in definitions(threshold).items():
        metrics = [run.metrics[name] for run in runs]
        if any(m.n for m in metrics):
            cells = [format_metric(m, definition.rate) for m in metrics]
            rows.append({"title": definition.title, "meaning": definition.meaning, "cells": cells})
    return rows


def _difference_rows(differences: Mapping[str, Mapping[str, Difference]], threshold: float) -> list[dict[str, Any]]:
    """One row for each figure and run; ``verdict`` says whether the interval excludes 0, and whom it favours."""
    rows = []
    for name, definition in definitions(threshold).items():
        for run, found in differences.items():
            difference = found[name]
            if difference.value is not None:
                rows.append(
                    {
                        "title": definition.title,
                        "run": run,
                        "text": _difference_text(difference, definition.rate),
                        "verdict": _direction(difference, definition.better),
                    }
                )
    return rows


def _difference_text(difference: Difference, rate: bool) -> str:
    scale, unit = (100, " points") if rate else (1, "")
    text = f"{scale * difference.value:+.1f}{unit}"
    if difference.low is not None:
        text += f" [{scale * difference.low:+.1f}, {scale * difference.high:+.1f}]"
    return text


def _direction(difference: Difference, better: int) -> str:
    if difference.low is not None and difference.low == difference.high == 0:
        return "equal"
    if difference.low is None or difference.low <= 0 <= difference.high:
        return "unclear"
    if not better:
        return "differs"
    return "better" if difference.value * better > 0 else "worse"


def _subset_tables(names: Sequence[str], runs: Sequence[Run]) -> list[dict[str, Any]]:
    titles = definitions()
    tables = []
    for name, run in zip(names, runs, strict=True):
        if run.evaluation.subsets:
            columns = [m for m in _HEADLINE if run.metrics[m].n]
            rows = [
                {"subset": subset or "(none)", "cells": [format_metric(found[m]) for m in columns]}
                for subset, found in run.evaluation.subsets.items()
            ]
            tables.append({"run": name, "columns": [titles[m].title for m in columns], "rows": rows})
    return tables


# -------------------------------------------------------------------------------------------------------------- plots

# matplotlib gets a colour of its own for each role, which the SVG then trades for the page's: so one drawing serves
# dark and light. The palette is Okabe and Ito's, told apart also by the colour-blind.
_INK = "#010203"
_SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")


def _plots(names: Sequence[str], runs: Sequence[Run], threshold: float) -> list[dict[str, Any]]:
    figures = definitions(threshold)
    headline = [m for m in _HEADLINE if any(run.metrics[m].n for run in runs)]
    slots = [m for m in ("accuracy_slot_a", "accuracy_slot_b") if any(run.metrics[m].n for run in runs)]
    plots = [
        {
            "title": "Figures with 95 % intervals",
            "svg": _interval_plot(
                names, [[run.metrics[m] for m in headline] for run in runs], _titles(figures, headline)
            ),
        }
    ]
    if slots:
        accuracies = [[run.metrics[m] for m in slots] for run in runs]
        titles = [f"slot {m[-1].upper()}" for m in slots]
        plots.append(
            {
                "title": "Accuracy by the slot of the better response",
                "svg": _interval_plot(names, accuracies, titles),
            }
        )
    scored = [[r.scored.f1 for r in run.records if r.scored] for run in runs]
    if any(scored):
        plots.append({"title": "Distribution of critique F1", "svg": _f1_plot(names, scored, threshold)})
    return plots


def _titles(figures: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    return [figures[name].title for name in names]


def _interval_plot(names: Sequence[str], metrics: Sequence[Sequence[Metric]], titles: Sequence[str]) -> Markup:
    """A dot and its interval for each figure, runs side by side."""
    figure, axes = _new_figure(height=0.6 + 0.42 * len(titles) + 0.14 * len(titles) * (len(names) - 1))
    for k, (name, row) in enumerate(zip(names, metrics, strict=True)):
        color = _SERIES[k % len(_SERIES)]
        axes.plot([], [], "o", color=color, label=name)
        offset = (k - (len(names) - 1) / 2) * 0.7 / max(len(names), 2)
        for i, metric in enumerate(row):
            if metric.value is None:
                continue
            if metric.low is not None:
                axes.plot([metric.low, metric.high], [i + offset] * 2, color=color, linewidth=2, solid_capstyle="round")
            axes.plot([metric.value], [i + offset], "o", color=color, markersize=6)
    axes.set_yticks(range(len(titles)), titles)
    axes.set_ylim(len(titles) - 0.5, -0.5)
    axes.set_xlim(-0.02, 1.02)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0 %", "25 %", "50 %", "75 %", "100 %"])
    axes.axvline(0.5, color=_INK, alpha=0.35, linewidth=1, linestyle=(0, (2, 3)))
    axes.grid(axis="x", color=_INK, alpha=0.12, linewidth=0.8)
    return _svg(figure, axes, len(names))


def _f1_plot(names: Sequence[str], scores: Sequence[Sequence[float]], threshold: float) -> Markup:
    figure, axes = _new_figure(height=2.4)
    for k, values in enumerate(scores):
        if values:
            shares = [1 / len(values)] * len(values)
            axes.hist(
                values,
                bins=[i / 20 for i in range(21)],
                weights=shares,
                histtype="stepfilled" if len(names) == 1 else "step",
                color=_SERIES[k % len(_SERIES)],
                linewidth=1.8,
                label=names[k],
            )
    axes.axvline(threshold, color=_INK, alpha=0.5, linewidth=1, linestyle=(0, (2, 3)))
    axes.set_xlim(-0.02, 1.02)
    axes.set_xlabel(f"F1 with the human critique (below {threshold:g}: wrong critique)")
    axes.yaxis.set_major_formatter(lambda share, _: f"{100 * share:.0f} %")
    axes.grid(axis="y", color=_INK, alpha=0.12, linewidth=0.8)
    return _svg(figure, axes, len(names))


def _new_figure(height: float) -> tuple["Figure", Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.4, height), layout="constrained", facecolor="none")
    axes = figure.add_subplot(facecolor="none")
    axes.set_axisbelow(True)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.tick_params(length=0, colors=_INK)
    return figure, axes


def _svg(figure: "Figure", axes: Any, n_series: int) -> Markup:
    """The figure as inline SVG in the page's own colours and fonts."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    if n_series > 1:
        figure.legend(frameon=False, loc="outside lower left", ncols=3, labelcolor=_INK)
    axes.xaxis.label.set_color(_INK)
    buffer = io.StringIO()
    # Text stays text: the reader's font, selectable, and escaped by the back end (names of runs are user input).
    options = {"svg.fonttype": "none", "svg.hashsalt": "nlhf", "font.family": ["sans-serif"], "text.parse_math": False}
    with matplotlib.rc_context(options):
        FigureCanvasSVG(figure).print_svg(buffer, metadata={"Date": None})
    drawing = buffer.getvalue()
    drawing = drawing[drawing.index("<svg") :]
    drawing = re.sub(r"<metadata>.*?</metadata>", "", drawing, flags=re.DOTALL)
    drawing = re.sub(r'<g id="[^"]*"', "<g", drawing)  # ids of groups would repeat from plot to plot
    drawing = drawing.replace(_INK, "currentColor")
    for k, color in enumerate(_SERIES):
        drawing = drawing.replace(color, f"var(--series-{k})")
    return Markup(drawing)


# --------------------------------------------------------------------------------------------------------- judgements


def _choose(runs: Sequence[Run], limit: int, seed: int) -> list[str]:
    """Pairs to show, in the data's order: all of them if their judgements fit, else a seeded choice."""
    counts: dict[str, int] = defaultdict(int)
    for run in runs:
        for record in run.records:
            counts[record.pair_id] += 1
    order = list(counts)
    random.Random(seed).shuffle(order)
    chosen, total = set(), 0
    for pair_id in order:
        total += counts[pair_id]
        if total > limit and chosen:
            break
        chosen.add(pair_id)
    return [pair_id for pair_id in counts if pair_id in chosen]


def _cards(names: Sequence[str], runs: Sequence[Run], chosen: Sequence[str]) -> list[dict[str, Any]]:
    """The judgements on the chosen pairs, pair by pair."""
    by_pair: dict[str, list[dict[str, Any]]] = {pair_id: [] for pair_id in chosen}
    for name, run in zip(names, runs, strict=True):
        for record, twin in with_twins(run.records):
            if record.pair_id in by_pair:
                by_pair[record.pair_id].append(_card(name, run, record, twin))
    return [card for cards in by_pair.values() for card in cards]


def _card(name: str, run: Run, record: Record, twin: Record | None) -> dict[str, Any]:
    """A judgement as it is shown: the pair in the order that the judge saw, and tags for the filters."""
    pair, match = as_shown(run.pairs[record.pair_id], record.order), record.match
    tags = {
        "right": record.label is not None and record.correct,
        "wrong": record.label is not None and record.verdict is not None and not record.correct,
        "unparsed": record.verdict is None,
        "flipped": flipped(record, twin),
        "lucky": lucky(record, run.config["wrong_critique_threshold"]),
        "truncated": record.truncated,
    }
    return {
        "run": name,
        "record": record,
        "pair": pair,
        "tags": [tag for tag, holds in tags.items() if holds],
        "generated": numbered(match.generated, [i for i, _ in match.matched]) if match else [],
        "reference": numbered(match.reference, [j for _, j in match.matched]) if match else [],
        "humans": [] if match else reference_sets(pair),
    }


def numbered(arguments: Sequence[Argument], matched: Sequence[int]) -> list[dict[str, Any]]:
    """Arguments with the number of their match, from 1, the same on both sides of it; None where nothing matches."""
    numbers = {i: n for n, i in enumerate(matched, start=1)}
    return [{"text": str(argument), "match": numbers.get(i)} for i, argument in enumerate(arguments)]
