"""What a role-play policy has learned from its judge, on held-out scenarios: by the judge, and by rules without it.

Reads the run of ``nlhf train-policy`` on the conversations of the built-in world, where the faults of a reply can be
found by rules (`nlhf.roleplay.world.faults`), and the evaluation of its judge on pairs of held-out scenarios:

    python benchmarks/roleplay_policy.py --policy runs/roleplay/suite/seed-0/policy/train \
        --judged runs/roleplay/suite/seed-0/judge/test-held-out-scenarios --out experiments/policy/roleplay.json

Intervals are 95 % of the bootstrap over scenarios. A win by rules is a reply with fewer faults than the reference's.
"""

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from nlhf.evaluation.intervals import RESAMPLES, percentile_interval, resample
from nlhf.evaluation.records import Record
from nlhf.evaluation.results import load_run
from nlhf.files import read_json, read_jsonl, write_json
from nlhf.roleplay.world import FAULTS, faults
from nlhf.runs import read_config


def main() -> None:
    """Measure, print, and keep the figures."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--policy", required=True, help="folder of the policy's run")
    parser.add_argument("--judged", required=True, help="folder of its judge's evaluation")
    parser.add_argument("--out", help="JSON file for the figures")
    arguments = parser.parse_args()
    result = measure(Path(arguments.policy), arguments.judged)
    print(table(result))
    if arguments.out:
        write_json(arguments.out, result)


def measure(folder: Path, judged: str) -> dict[str, Any]:
    """The judge's figures on held-out pairs, and the policy's at every validation."""
    rows = [row for _, row in read_jsonl(folder / "held_out.jsonl")]
    config, manifest = read_config(folder), read_json(folder / "manifest.json")
    judge = load_run(judged)
    by_step = {step: [row for row in rows if row["step"] == step] for step in sorted({row["step"] for row in rows})}
    trained = [row for _, row in read_jsonl(folder / "metrics.jsonl") if "reward" in row]
    return {
        "policy": {
            "reference": manifest["reference"]["weights"],
            "judge": manifest["judge"]["weights"],
            "judge_prompt": manifest["judge"]["prompt_hash"],
            "seed": config["seed"],
            "prompts": manifest["prompts"]["prompts"],
            "held_out": manifest["held_out"]["prompts"],
            "scenarios": sorted({row["group"] for row in rows}),
            "calls": round(sum(row["judge/calls"] for row in trained)),
            "seconds": round(max(row["seconds"] for row in trained)),
            "rollouts": len(trained) * config["grpo"]["per_device_train_batch_size"],
        },
        "judge": {name: vars(judge.metrics[name]) for name in ("accuracy", "position_consistency")},
        "judge_by_fault": {name: _right([r for r in judge.records if r.subset == name]) for name in FAULTS},
        "validations": {str(step): figures(found) for step, found in by_step.items()},
    }


def _right(records: Sequence[Record]) -> dict[str, int]:
    return {"right": sum(record.correct for record in records), "n": len(records)}


def figures(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What is known of the replies of one validation, each as mean, low, high and n."""
    groups = [row["group"] for row in rows]
    wrong = [faults(row["response"], row["prompt"], row["character"]) for row in rows]
    of_reference = [faults(row["reference"], row["prompt"], row["character"]) for row in rows]
    margins = [row["margin"] for row in rows]
    known = [i for i, margin in enumerate(margins) if margin is not None]
    signs = [float(np.sign(len(before) - len(now))) for now, before in zip(wrong, of_reference, strict=True)]
    return {
        "score": interval([margins[i] for i in known], [groups[i] for i in known]),
        "win_rate": interval([float(margins[i] > 0) for i in known], [groups[i] for i in known]),
        "tie_rate": interval([float(margins[i] == 0) for i in known], [groups[i] for i in known]),
        "no_verdict": len(rows) - len(known),
        "score_by_rules": interval(signs, groups),
        "faultless": interval([float(not found) for found in wrong], groups),
        **{name: interval([float(name in found) for found in wrong], groups) for name in FAULTS},
        "well_formed": interval([float(row["shown"] is not None) for row in rows], groups),
        "characters": fmean(len(row["shown"] or "") for row in rows),
        "different": len({row["shown"] for row in rows}) / len(rows),
        "agreement": agreement(margins, signs),
    }


def agreement(margins: Sequence[float | None], signs: Sequence[float]) -> dict[str, int]:
    """In how many comparisons that both decide the judge says what the rules say."""
    decided = [(margin, sign) for margin, sign in zip(margins, signs, strict=True) if margin and sign]
    return {"agree": sum(margin * sign > 0 for margin, sign in decided), "n": len(decided)}


def interval(values: Sequence[float], groups: Sequence[str]) -> dict[str, Any]:
    """The mean, and the ends of its 95 % interval by the bootstrap over groups."""
    names = sorted(set(groups))
    sums, counts = np.zeros((len(names), 1)), np.zeros((len(names), 1))
    for value, group in zip(values, groups, strict=True):
        sums[names.index(group)] += value
        counts[names.index(group)] += 1
    chunks = resample(lambda s, c: s / c, sums, counts, RESAMPLES, seed=0)
    low, high = (float(end[0]) for end in percentile_interval(chunks, len(names), 1))
    return {"value": fmean(values) if values else None, "low": low, "high": high, "n": len(values)}


_ROWS = (
    ("judge's score (win 1, tie 0, loss -1)", "score", 1),
    ("judge's win rate", "win_rate", 100),
    ("judge's tie rate", "tie_rate", 100),
    ("score by rules", "score_by_rules", 1),
    ("replies without a fault", "faultless", 100),
    *((f"reply {FAULTS[name]}", name, 100) for name in FAULTS),
    ("well-formed", "well_formed", 100),
)


def table(result: dict[str, Any]) -> str:
    """The figures as Markdown."""
    about, judge, steps = result["policy"], result["judge"], result["validations"]
    found = list(steps.values())
    by_fault = ", ".join("{} {right} of {n}".format(name, **k) for name, k in result["judge_by_fault"].items())
    lines = [
        f"{about['held_out']} prompts of {len(about['scenarios'])} held-out scenarios, seed {about['seed']}. "
        f"{about['rollouts']} rollouts, {about['calls']:,} judge prompts, {about['seconds'] / 60:.0f} minutes by the "
        f"clock. On pairs of these scenarios the judge is right in {_shown(judge['accuracy'], 100)} of "
        f"{judge['accuracy']['n']} judgements; its two orders agree on {_shown(judge['position_consistency'], 100)} of "
        f"{judge['position_consistency']['n']} pairs. Right by the fault that makes the difference: {by_fault}.",
        "",
        _row("Held-out replies after step", steps),
        _row("---", ["---"] * len(steps)),
        *(_row(title, [_shown(figures[key], scale) for figures in found]) for title, key, scale in _ROWS),
        _row("mean length in characters", [f"{figures['characters']:.0f}" for figures in found]),
        _row("different replies", [f"{100 * figures['different']:.0f} %" for figures in found]),
        _row("judge agrees with the rules", ["{agree} of {n}".format(**figures["agreement"]) for figures in found]),
    ]
    return "\n".join(lines) + "\n"


def _row(title: str, cells: Iterable[str]) -> str:
    return f"| {title} | {' | '.join(cells)} |"


def _shown(figure: dict[str, Any], scale: int) -> str:
    value, low, high = (figure[name] for name in ("value", "low", "high"))
    if value is None:
        return "-"
    if scale == 1:
        return f"{value:.2f} [{low:.2f}, {high:.2f}]"
    return f"{scale * value:.1f} % [{scale * low:.1f}, {scale * high:.1f}]"


if __name__ == "__main__":
    main()
