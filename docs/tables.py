"""Write the tables in the documents from saved results, or check that they are what the results say.

A document marks a table with ``<!-- table: FILE -->`` and ``<!-- end -->``, where FILE is the summary.json of a suite,
the validation.json of critique scorers, or what benchmarks/grpo_step.py wrote. ``make tables`` rewrites them, and
draws the curves of the suites that have some into docs/images; ``python docs/tables.py --check`` fails when a document
and its results differ.
"""

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType

from nlhf.critique.validation import Validation
from nlhf.curves import Curve, draw
from nlhf.drawing import standing_alone
from nlhf.intervals import SeedInterval
from nlhf.suite_report import Cell, markdown

ROOT = Path(__file__).parent.parent
MARKED = re.compile(r"(<!-- table: (?P<file>\S+) -->\n)(?P<body>.*?)(<!-- end -->)", re.DOTALL)


def render(file: str) -> str:
    """The table of one summary of a suite, of one validation of critique scorers, or of the cost of rewards."""
    summary = json.loads((ROOT / file).read_text(encoding="utf-8"))
    if "figures" in summary:
        return Validation.from_dict(summary).markdown()
    if "steps" in summary:
        return _benchmark("grpo_step").document(summary)
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
    sys.exit(main("--check" in sys.argv[1:]))
