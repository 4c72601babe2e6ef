"""What a report says in words and tables: where the figures come from, how to read them, and the figures themselves.

Station of the path: metrics -> **report**. The same tables stand in the page and in the markdown.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from nlhf.errors import UserError
from nlhf.evaluation.figures import definitions
from nlhf.evaluation.metrics import TRUNCATION_LIMIT, Difference
from nlhf.evaluation.results import Run, compare_run_decisions, compare_runs, further_figures
from nlhf.ledger import format_metric
from nlhf.pairs import Pair
from nlhf.report.plots import headline_columns

PARSE_LIMIT = 0.9  # below it, accuracy says more about the form of the replies than about their verdicts

# Lines of models by the names that their makers give them; a name within a longer word does not count ("dolphin").
_FAMILY = re.compile(
    r"(?<![a-z])(claude|command|deepseek|falcon|gemini|gemma|glm|gpt|granite|internlm|llama|mistral|mixtral|olmo|phi|qwen"
    r"|smollm|vicuna|yi|zephyr)(?![a-z])",
    re.IGNORECASE,
)


def run_names(runs: Sequence[Run]) -> list[str]:
    """The runs' names, or their folders where two runs share a name."""
    if not runs:
        raise UserError("report: there is no run to report")
    folders = [run.folder.resolve() for run in runs]
    if len(set(folders)) < len(folders):
        raise UserError("report: a run is named more than once; a comparison needs different ones")
    names = [run.name for run in runs]
    return names if len(set(names)) == len(names) else [str(run.folder) for run in runs]


def tables(names: Sequence[str], runs: Sequence[Run]) -> dict[str, Any]:
    """What both templates need.

    Args:
        names: From `run_names`.
        runs: At least one, the baseline first.

    Raises:
        UserError: the runs were not measured on the same pairs, or differ in what counts as a wrong critique.
    """
    threshold = runs[0].config["wrong_critique_threshold"]
    others = dict(zip(names[1:], runs[1:], strict=True))
    differences = {name: compare_runs(runs[0], run) for name, run in others.items()}
    figures, scores = _further_rows(runs)
    return {
        "title": names[0] if len(runs) == 1 else f"{len(runs)} judges compared",
        "runs": [_origin(name, run) for name, run in zip(names, runs, strict=True)],
        "conventions": _conventions(runs),
        "warnings": [w for name, run in zip(names, runs, strict=True) for w in _warnings(name, run)],
        "figures": _figure_rows(runs, threshold) + figures,
        "scores": scores,
        "differences": [*_difference_rows(differences, threshold), *_decision_rows(runs[0], others)],
        "baseline": names[0],
        "subsets": _subset_tables(names, runs),
    }


# ------------------------------------------------------------------------------------------------------------- header


def _origin(name: str, run: Run) -> dict[str, Any]:
    data, scorer, environment = run.config["data"], run.config["scorer"], run.environment
    dirty = " with local changes" if environment.get("dirty") else ""
    sampling = ", ".join(f"{k} {v}" for k, v in run.config["sampling"].items() if v is not None)
    return {
        "name": name,
        "rows": {
            "Model": _with_hash(model_name(run), run.manifest.get("model_hash")),
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


def model_name(run: Run) -> str:
    """The judge's model, as the configuration names it."""
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
    subsets = len({r.subset for r in run.records})
    judged = f"{run.config['data']['source']}, split {run.config['data']['split']}"
    return [
        ("Judged", judged + (f", {subsets} subsets" if subsets > 1 else "")),
        ("n", f"{len(run.pairs)} pairs, {len(run.records)} judgements a run"),
        ("Orders", f"{orders}; {samples} repl{'y' if samples == 1 else 'ies'} to each prompt"),
        ("Averaging", "every judgement counts once, over all pairs, orders and samples, but for the macro average"),
        ("Mode", f"{run.config.get('mode', 'generate')}; votes on a pair by {run.config.get('vote', 'majority')}"),
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
    truncated, parsed, failures = (run.metrics[m] for m in ("truncation_rate", "parse_rate", "scorer_failures"))
    if truncated.n and truncated.value > TRUNCATION_LIMIT:
        found.append(
            f"{name}: {format_metric(truncated)} of the replies were cut off by the token limit and have no verdict; "
            "raise sampling.max_new_tokens."
        )
    if parsed.n and parsed.value < PARSE_LIMIT:
        found.append(
            f"{name}: only {format_metric(parsed)} of the replies have a verdict, and one without is not right in "
            "Accuracy; read some of them below, and check that the format is the judge's."
        )
    if failures.k:
        found.append(f"{name}: {failures.k} of {failures.n} critiques could not be scored and are left out.")
    return found + _kinship(name, run)


def _kinship(name: str, run: Run) -> list[str]:
    """A judge may favour answers of its own kind; said where the data names the models that answered."""
    family = _FAMILY.search(model_name(run))
    if family is None:
        return []
    # JudgeBench's splits are named after the model that answered.
    split = run.config["data"]["split"] if run.config["data"]["source"] == "judgebench" else ""
    kin = sum(family[0].lower() in _families(f"{split} {_authors(pair)}") for pair in run.pairs.values())
    if not kin:
        return []
    return [
        f"{name}: the judge and the author of a response are both named {family[0]} in {kin} of {len(run.pairs)} "
        "pairs; judges tend to favour their own kind."
    ]


def _authors(pair: Pair) -> str:
    """What the data calls the models that wrote the responses, as one text; empty where it does not say."""
    return " ".join(str(value) for key, value in pair.meta.items() if re.fullmatch(r"(.*_)?models?", key))


def _families(text: str) -> set[str]:
    return {name.lower() for name in _FAMILY.findall(text)}


# ------------------------------------------------------------------------------------------------------------- tables


def _figure_rows(runs: Sequence[Run], threshold: float) -> list[dict[str, Any]]:
    rows = []
    for name, definition in definitions(threshold).items():
        metrics = [run.metrics[name] for run in runs]
        if any(m.n for m in metrics):
            cells = [format_metric(m, definition.rate) for m in metrics]
            rows.append({"title": definition.title, "meaning": definition.meaning, "cells": cells})
    return rows


def _further_rows(runs: Sequence[Run]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows of the figures beside those of `definitions`, and of the benchmark's own scores."""
    found = [{row.title: row for row in further_figures(run)} for run in runs]
    own = {score.name for run in runs for score in run.evaluation.scores}
    figures, scores = [], []
    for title in dict.fromkeys(title for rows in found for title in rows):
        cells = [rows[title].text if title in rows else "–" for rows in found]
        row = {"title": title, "meaning": next(rows[title].meaning for rows in found if title in rows), "cells": cells}
        (scores if title in own else figures).append(row)
    return figures, scores


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


def _decision_rows(baseline: Run, others: Mapping[str, Run]) -> list[dict[str, Any]]:
    rows = []
    for name, run in others.items():
        test = compare_run_decisions(baseline, run)
        favours = "equal" if test.first == test.second else "better" if test.second > test.first else "worse"
        rows.append(
            {
                "title": "Pairs decided rightly (McNemar's exact test)",
                "run": name,
                "text": f"{test.second} only here, {test.first} only there; p = {test.p:.2g}",
                "verdict": favours if test.p < 0.05 or favours == "equal" else "unclear",
            }
        )
    return rows


def _difference_text(difference: Difference, rate: bool) -> str:
    scale, unit = (100, " points") if rate else (1, "")
    digits = 1 if rate or abs(difference.value) >= 10 else 3
    text = f"{scale * difference.value:+.{digits}f}{unit}"
    if difference.low is not None:
        text += f" [{scale * difference.low:+.{digits}f}, {scale * difference.high:+.{digits}f}]"
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
    found = []
    for name, run in zip(names, runs, strict=True):
        if run.evaluation.subsets:
            columns = headline_columns(run)
            rows = [
                {"subset": subset or "(none)", "cells": [format_metric(metrics[m]) for m in columns]}
                for subset, metrics in run.evaluation.subsets.items()
            ]
            found.append({"run": name, "columns": [d.title for d in columns.values()], "rows": rows})
    return found
