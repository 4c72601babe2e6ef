"""The plots of a report, as inline SVG: figures and subsets with their intervals, reliability, critique F1.

Station of the path: metrics -> **report**.
"""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from nlhf.evaluation.calibration import Bin
from nlhf.evaluation.figures import Definition, definitions
from nlhf.evaluation.metrics import Metric
from nlhf.evaluation.results import Run
from nlhf.report.drawing import INK, SERIES, new_figure, svg

HEADLINE = (
    "accuracy",
    "length_baseline",
    "accuracy_parsed",
    "parse_rate",
    "position_consistency",
    "critique_f1",
    "wrong_critique_rate",
)
_SLOTS = {"accuracy_slot_a": "slot A (shown first)", "accuracy_slot_b": "slot B (shown second)"}
_NOTHING = Metric(None, 0, 0)


def plots(names: Sequence[str], runs: Sequence[Run]) -> list[dict[str, Any]]:
    """The plots that have something to show, as title and SVG; a run has one colour in all of them.

    Args:
        names: What the runs are called.
        runs: At least one.
    """
    threshold = runs[0].config["wrong_critique_threshold"]
    headline = {name: d.title for name, d in definitions(threshold).items() if name in HEADLINE}
    subsets = dict.fromkeys(subset for run in runs for subset in run.evaluation.subsets)
    names = [_drawable(name) for name in names]
    with warnings.catch_warnings():
        # The SVG keeps text as text, in the reader's fonts; only its width is measured in a font that lacks the glyph.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        found = _drawings(names, runs, headline, list(subsets), threshold)
    return [{"title": title, "svg": drawing} for title, drawing in found.items() if drawing]


def _drawings(
    names: Sequence[str], runs: Sequence[Run], headline: Mapping[str, str], subsets: Sequence[str], threshold: float
) -> dict[str, Markup | None]:
    return {
        "Figures with 95 % intervals": _metrics_plot(names, runs, headline),
        "Accuracy by subset": _subset_plot(names, runs, subsets),
        "Accuracy by the slot of the better response": _metrics_plot(names, runs, _SLOTS),
        "Reliability: accuracy by confidence (dot: share of the pairs; dashes: calibrated)": _reliability_plot(
            names, [run.evaluation.reliability for run in runs]
        ),
        "Distribution of critique F1": _f1_plot(names, runs, threshold),
    }


def headline_columns(run: Run) -> dict[str, Definition]:
    """The headline figures of a run that count something."""
    return {name: d for name, d in definitions().items() if name in HEADLINE and run.metrics[name].n}


def _metrics_plot(names: Sequence[str], runs: Sequence[Run], titles: Mapping[str, str]) -> Markup | None:
    shown = {name: title for name, title in titles.items() if any(run.metrics[name].n for run in runs)}
    return _interval_plot(names, [[run.metrics[m] for m in shown] for run in runs], list(shown.values()))


def _subset_plot(names: Sequence[str], runs: Sequence[Run], subsets: Sequence[str]) -> Markup | None:
    def accuracy(run: Run, subset: str) -> Metric:
        return run.evaluation.subsets.get(subset, {}).get("accuracy", _NOTHING)

    metrics = [[accuracy(run, subset) for subset in subsets] for run in runs]
    return _interval_plot(names, metrics, [subset or "(none)" for subset in subsets])


def _interval_plot(names: Sequence[str], metrics: Sequence[Sequence[Metric]], titles: Sequence[str]) -> Markup | None:
    """A dot and its interval for each title, runs side by side."""
    if not titles:
        return None
    figure, axes = new_figure(height=0.6 + 0.42 * len(titles) + 0.14 * len(titles) * (len(names) - 1))
    for k, (name, row) in enumerate(zip(names, metrics, strict=True)):
        color = SERIES[k % len(SERIES)]
        axes.plot([], [], "o", color=color, label=name)
        offset = (k - (len(names) - 1) / 2) * 0.7 / max(len(names), 2)
        for i, metric in enumerate(row):
            if metric.value is None:
                continue
            if metric.low is not None:
                axes.plot([metric.low, metric.high], [i + offset] * 2, color=color, linewidth=2, solid_capstyle="round")
            axes.plot([metric.value], [i + offset], "o", color=color, markersize=6)
    axes.set_yticks(range(len(titles)), [_drawable(title) for title in titles])
    axes.set_ylim(len(titles) - 0.5, -0.5)
    axes.set_xlim(-0.02, 1.02)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0 %", "25 %", "50 %", "75 %", "100 %"])
    axes.axvline(0.5, color=INK, alpha=0.35, linewidth=1, linestyle=(0, (2, 3)))
    axes.grid(axis="x", color=INK, alpha=0.12, linewidth=0.8)
    return svg(figure, axes, len(names))


def _drawable(name: str, limit: int = 32) -> str:
    """A name as a drawing can bear it: printable, and short enough to leave room; the tables have the whole of it."""
    name = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in name)
    return name if len(name) <= limit else f"{name[: limit - 1]}…"


def _reliability_plot(names: Sequence[str], curves: Sequence[Sequence[Bin]]) -> Markup | None:
    """Accuracy over confidence, the area of a dot as its share of the pairs; on the diagonal, a judge is calibrated."""
    if not any(curves):
        return None
    figure, axes = new_figure(height=3.4)
    axes.plot([0.5, 1], [0.5, 1], color=INK, alpha=0.5, linewidth=1, linestyle=(0, (2, 3)))
    for k, (name, curve) in enumerate(zip(names, curves, strict=True)):
        color, n = SERIES[k % len(SERIES)], sum(point.n for point in curve)
        x, y = [point.confidence for point in curve], [point.accuracy for point in curve]
        axes.plot(x, y, color=color, linewidth=1.5, marker="o", markersize=3, label=name)
        axes.scatter(x, y, s=[12 + 300 * point.n / n for point in curve], color=color, alpha=0.35, linewidths=0)
    axes.set_xlim(0.49, 1.01)
    axes.set_ylim(-0.03, 1.03)
    axes.xaxis.set_major_formatter(_percent)
    axes.yaxis.set_major_formatter(_percent)
    axes.set_xlabel("confidence in the preferred response")
    axes.grid(color=INK, alpha=0.12, linewidth=0.8)
    return svg(figure, axes, len(names))


def _f1_plot(names: Sequence[str], runs: Sequence[Run], threshold: float) -> Markup | None:
    scores = [[r.scored.f1 for r in run.records if r.scored] for run in runs]
    if not any(scores):
        return None
    figure, axes = new_figure(height=2.4)
    for k, values in enumerate(scores):
        if values:
            shares = [1 / len(values)] * len(values)
            axes.hist(
                values,
                bins=[i / 20 for i in range(21)],
                weights=shares,
                histtype="stepfilled" if len(names) == 1 else "step",
                color=SERIES[k % len(SERIES)],
                linewidth=1.8,
                label=names[k],
            )
    axes.axvline(threshold, color=INK, alpha=0.5, linewidth=1, linestyle=(0, (2, 3)))
    axes.set_xlim(-0.02, 1.02)
    axes.set_xlabel(f"F1 with the human critique (below {threshold:g}: wrong critique)")
    axes.yaxis.set_major_formatter(_percent)
    axes.grid(axis="y", color=INK, alpha=0.12, linewidth=0.8)
    return svg(figure, axes, len(names))


def _percent(share: float, _: Any) -> str:
    return f"{100 * share:.0f} %"
