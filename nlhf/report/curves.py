"""Curves of training: what ``metrics.jsonl`` of one run or of several seeds says, step by step.

Station of the path: metrics -> **report**. A curve is the mean over seeds with a band, the 95 % interval of Student's t
over seeds at that step; one seed has no band.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from nlhf.evaluation.intervals import seed_interval
from nlhf.files import read_jsonl
from nlhf.report.drawing import INK, SERIES, new_figure, svg

_DASHES = ("solid", (0, (6, 2)), (0, (7, 2, 1, 2)), (0, (3, 1)))  # names beyond the number of colours


@dataclass(frozen=True)
class Panel:
    """One drawing.

    Attributes:
        title: Its heading.
        keys: Keys of ``metrics.jsonl``; the first is drawn as a line, a second dotted.
        share: In percent, from 0 to 100.
    """

    title: str
    keys: tuple[str, ...]
    share: bool = False


PANELS = (
    Panel("Reward", ("reward",)),
    Panel("MetaRM: error before its update (dotted: after)", ("metarm/mse_before", "metarm/mse_after")),
    Panel("MetaRM: AUC before its update", ("metarm/auc",)),
    Panel("Validation: right label, wrong critique", ("validation/wrong_critique_rate",), share=True),
    Panel("Validation: critique F1", ("validation/critique_f1",), share=True),
    Panel("Validation: accuracy", ("validation/accuracy",), share=True),
)


@dataclass(frozen=True)
class Curve:
    """One key of one arm (or run) over steps.

    Attributes:
        name: Of the arm or run.
        key: Key of ``metrics.jsonl``.
        steps: Steps at which all seeds have a value.
        mean: Over seeds, one a step.
        low: Lower end of the 95 % interval over seeds; empty for one seed.
        high: Upper end.
    """

    name: str
    key: str
    steps: list[int]
    mean: list[float]
    low: list[float]
    high: list[float]


def read_curves(logs: Mapping[str, Sequence[Path]]) -> list[Curve]:
    """Curves of all keys of `PANELS`, by name of the arm and the ``metrics.jsonl`` of its seeds.

    A key that some seed never logged has no curve, nor has an arm with a seed that has no log.
    """
    found = []
    for name, paths in logs.items():
        if not paths or not all(path.is_file() for path in paths):
            continue
        seeds = [_series(path) for path in paths]
        curves = (_curve(name, key, [seed.get(key, {}) for seed in seeds]) for panel in PANELS for key in panel.keys)
        found += [curve for curve in curves if curve.steps]
    return found


def _series(path: Path) -> dict[str, dict[int, float]]:
    """Values by key and step."""
    wanted = {key for panel in PANELS for key in panel.keys}
    found: dict[str, dict[int, float]] = {}
    for _, row in read_jsonl(path, skip_torn=True):
        for key in wanted & row.keys():
            if row[key] is not None:
                found.setdefault(key, {})[row["step"]] = row[key]
    return found


def _curve(name: str, key: str, seeds: Sequence[Mapping[int, float]]) -> Curve:
    steps = sorted(set.intersection(*(set(values) for values in seeds)))
    intervals = [seed_interval([values[step] for values in seeds]) for step in steps]
    banded = len(seeds) > 1
    return Curve(
        name,
        key,
        steps,
        mean=[round(i.mean, 5) for i in intervals],
        low=[round(i.low, 5) for i in intervals] if banded else [],
        high=[round(i.high, 5) for i in intervals] if banded else [],
    )


def draw(curves: Iterable[Curve]) -> list[dict[str, Any]]:
    """The panels that have something to show, as key, title and inline SVG; a name has one colour in all of them."""
    curves = list(curves)
    names = list(dict.fromkeys(curve.name for curve in curves))
    panels = []
    for panel in PANELS:
        shown = [curve for curve in curves if curve.key in panel.keys]
        if shown:
            panels.append({"key": panel.keys[0], "title": panel.title, "svg": _drawing(panel, shown, names)})
    return panels


def _drawing(panel: Panel, curves: Sequence[Curve], names: Sequence[str]) -> Markup:
    shown = {curve.name for curve in curves}
    figure, axes = new_figure(height=2.4 + 0.2 * math.ceil(len(shown) / 3))
    scale = 100 if panel.share else 1
    tops = []
    for curve in curves:
        number, first = names.index(curve.name), curve.key == panel.keys[0]
        color = SERIES[number % len(SERIES)]
        dash = _DASHES[number // len(SERIES) % len(_DASHES)] if first else (0, (1, 1.5))
        mean, low, high = ([scale * v for v in values] for values in (curve.mean, curve.low, curve.high))
        marker = "o" if len(mean) == 1 else None
        label = curve.name if first else None
        axes.plot(curve.steps, mean, color=color, linewidth=1.8, linestyle=dash, marker=marker, label=label)
        if low and first:
            axes.fill_between(curve.steps, low, high, color=color, alpha=0.15, linewidth=0)
        tops += mean
    # Few seeds have wide bands, which must not flatten the lines.
    margin = 0.6 * (max(tops) - min(tops)) or 0.1 * scale
    bottom, top = min(tops) - margin, max(tops) + margin
    axes.set_ylim(*((max(0, bottom), min(100, top)) if panel.share else (bottom, top)))
    if panel.share:
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0f} %")
    axes.set_xlabel("step")
    axes.grid(axis="y", color=INK, alpha=0.12, linewidth=0.8)
    return svg(figure, axes, len(shown))
