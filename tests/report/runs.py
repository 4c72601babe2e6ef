"""Evaluated runs for the tests of the report, made without a model."""

from pathlib import Path

from nlhf.critique.arguments import Argument
from nlhf.critique.matching import CritiqueMatch
from nlhf.evaluation.records import Record
from nlhf.evaluation.results import Evaluation, Run
from nlhf.pairs import HumanCritique, Pair, Turn

ATTACK = "<script>alert('x')</script></script><img src=x onerror=alert(1)>\"'><b>&amp;</b> {{ 7 * 7 }} ${x} | `a`"


def make_run(name="run", n=4, text="plain", verdict="A", scorer=True, orders="both", **config) -> Run:
    """A run whose every text that a model, a data set or a user may write is ``text``."""
    pairs = [
        Pair(
            f"{i} {text}",
            [Turn(text, f"question {text}")],
            f"a {text}",
            f"b {text}",
            label="A",
            critiques=[HumanCritique(strengths_a=f"human {text}")],
            subset=f"s{i % 2} {text}",
        )
        for i in range(n)
    ]
    argument = Argument("A", 1, f"argument {text}")
    match = CritiqueMatch(1, 1, 1, ((0, 0),), (argument, Argument("A", 1, "other")), (argument,), False, None)
    records = [
        Record(
            p.id,
            p.cluster,
            p.subset,
            order,
            0,
            "A",
            verdict,
            critique=f"critique {text}",
            match=match if scorer else None,
            reply=f"reply {text}",
            tokens=5,
            prompt_hash=f"hash {text}",
            length_a=3,
            length_b=2,
        )
        for p in pairs
        for order in (("AB", "BA") if orders == "both" else (orders,))
    ]
    return Run(
        folder=Path("runs") / name,
        name=name,
        config={
            "model": {"name": f"model {text}"},
            "data": {"source": "jsonl", "split": f"split {text}"},
            "format": "rm_nlhf",
            "sampling": {"temperature": 0.0, "max_new_tokens": 64},
            "scorer": {"class_path": "exact", "init_args": {"model": text}} if scorer else None,
            "orders": orders,
            "samples": 1,
            "resamples": 20,
            "seed": 0,
            "wrong_critique_threshold": 0.5,
        }
        | config,
        environment={"nlhf": "0", "commit": "abc", "dirty": True, "time": "now"},
        manifest={
            "data": {"data_hash": "d" * 64},
            "model_hash": "m",
            "judge": {"prompt_hash": "p", "ties": False},
        },
        pairs={p.id: p for p in pairs},
        evaluation=Evaluation.of(records, resamples=20),
    )
