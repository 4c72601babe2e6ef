"""Write the tables in the documents from saved results, or check that they are what the results say.

A document marks a table with ``<!-- table: FILE -->`` and ``<!-- end -->``, where FILE is the summary.json of a suite,
the validation.json of critique scorers, or what a benchmark of benchmarks/ wrote.
``make tables`` rewrites them, and draws the curves of the suites that have some into docs/images;
``python docs/tables.py --check`` fails when a document and its results differ, and ``--keep RUN FILE [CPU_SECONDS]``
keeps the figures of an evaluation for a table.
"""

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from nlhf.critique.validation import Validation
from nlhf.evaluation.figures import definitions
from nlhf.evaluation.intervals import SeedInterval
from nlhf.evaluation.results import load_run
from nlhf.files import write_json
from nlhf.report.curves import Curve, draw
from nlhf.report.drawing import standing_alone
from nlhf.suite.report import Cell, markdown

ROOT = Path(__file__).parent.parent
MARKED = re.compile(r"(<!-- table: (?P<file>\S+) -->\n)(?P<body>.*?)(<!-- end -->)", re.DOTALL)


def render(file: str) -> str:
    """The table of one summary of a suite, of one validation of critique scorers, or of a benchmark."""
    summary = json.loads((ROOT / file).read_text(encoding="utf-8"))
    if "figures" in summary:
        return Validation.from_dict(summary).markdown()
    if "steps" in summary:
        return _benchmark("grpo_step").document(summary)
    if "contenders" in summary:
        return _benchmark("self_distillation_training").document(summary)
    if "judging" in summary:
        return _benchmark("judging").document(summary)
    if "evaluation" in summary:
        return _evaluation(summary)
    if "policy" in summary:
        return _benchmark("roleplay_policy").table(summary)
    if "ways" in summary:
        return _benchmark("tournament").table(summary)
    cells = [
        Cell(
            **{k: v for k, v in cell.items() if k not in ("mean", "difference")},
            mean=SeedInterval(**cell["mean"]),
            difference=SeedInterval(**cell["difference"]) if cell["difference"] else None,
        )
        for cell in summary["cells"]
    ]
    metrics = list(dict.fromkeys(cell.metric for cell in cells))
    return markdown(cells, metrics, summary["baseline"], len(summary["seeds"]))


def _evaluation(summary: dict[str, Any]) -> str:
    """The figures of one evaluation, those of its benchmark first."""
    made = summary["evaluation"]
    processor = f"{made['cpu_seconds'] / 60:.0f} processor minutes, " if made["cpu_seconds"] else ""
    lines = [
        f"{made['model']}, format `{made['format']}`, mode {made['mode']}, {made['pairs']} pairs in both orders: "
        f"{processor}{made['seconds'] / 60:.0f} minutes by the clock.",
        "",
        "| Figure | 95 % interval | n |",
        "| --- | --- | --- |",
    ]
    # By the benchmark's own rule all of its figures, by the other ones the first.
    first = summary["scores"][0]["name"]
    scores = [
        score for score in summary["scores"] if "(" not in score["name"] or score["name"].startswith(f"{first} (")
    ]
    figures = [(score["name"], score, 100, " %") for score in scores]
    figures += [
        (f"`{name}`", metric, *((100, " %") if definitions()[name].rate else (1, "")))
        for name, metric in summary["metrics"].items()
    ]
    for name, figure, scale, unit in figures:
        value, low, high = (scale * figure[key] for key in ("value", "low", "high"))
        digits = 1 if unit else 3
        lines.append(f"| {name} | {value:.{digits}f}{unit} [{low:.{digits}f}, {high:.{digits}f}] | {figure['n']} |")
    return "\n".join(lines) + "\n"


_KEPT = ("accuracy", "length_baseline", "position_consistency", "accuracy_slot_a", "accuracy_slot_b", "slot_a_rate")
_KEPT_OF_PROBABILITIES = ("accuracy_pair", "brier", "calibration_error")


def keep(run: str, file: str, cpu_seconds: str | None = None) -> None:
    """Keep the figures of an evaluation beside its configuration, for a table."""
    found = load_run(run)
    data, judge = found.manifest["data"], found.manifest["judge"]
    summary = {
        "evaluation": {
            "model": found.config["model"]["name"],
            "model_hash": found.manifest["model_hash"],
            "data_hash": data["data_hash"],
            "format": judge["format"],
            "prompt_hash": judge["prompt_hash"],
            "mode": found.config["mode"],
            "pairs": len(found.pairs),
            "seconds": round(found.seconds, 1),
            "cpu_seconds": cpu_seconds and float(cpu_seconds),
        },
        "scores": [vars(score) for score in found.evaluation.scores],
        "metrics": {n: vars(found.metrics[n]) for n in (*_KEPT, *_KEPT_OF_PROBABILITIES) if found.metrics[n].n},
    }
    write_json(ROOT / file, summary)


def _benchmark(name: str) -> ModuleType:
    """A benchmark, which is no part of the package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def refresh(text: str) -> str:
    """A document with its tables written anew."""
    return MARKED.sub(lambda m: f"{m[1]}{render(m['file'])}{m[4]}", text)


def draw_curves() -> None:
    """The curves of every saved suite, one picture a figure: ``images/SUITE-FIGURE.svg``."""
    for path in sorted((ROOT / "experiments").glob("*/results/*.json")):
        curves = [Curve(**curve) for curve in json.loads(path.read_text(encoding="utf-8")).get("curves", [])]
        for panel in draw(curves):
            picture = ROOT / "docs" / "images" / f"{path.stem}-{panel['key'].replace('/', '-')}.svg"
            picture.write_text(standing_alone(panel["svg"]), encoding="utf-8")


def main(check: bool) -> int:
    """Refresh (or check) every document; the exit code says whether one was out of date."""
    stale = []
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        text = path.read_text(encoding="utf-8")
        fresh = refresh(text)
        if fresh != text:
            stale.append(path.name)
            if not check:
                path.write_text(fresh, encoding="utf-8")
    if not check:
        draw_curves()
    print(f"{'out of date' if check else 'rewritten'}: {', '.join(stale) or 'none'}")
    return int(check and bool(stale))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--keep"]:
        sys.exit(keep(*sys.argv[2:]))
    sys.exit(main("--check" in sys.argv[1:]))
