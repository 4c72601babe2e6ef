"""How good is a MetaRM? The verb `metarm evaluate`.

Station of the path: Verdict -> rewards -> **metrics -> report**. A judge answers pairs whose human critiques MetaRM
never saw; the critiques are then uncovered, and MetaRM's scores are compared with the rewards that they give. Three
baselines stand beside it: a constant, the critique's length, and the judge's own confidence in its verdict. Each
baseline is given the best straight line through the very rewards that it is measured on, which favours it.
"""

import dataclasses
import logging
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from metarm.metrics import BINS, FIGURES, RESAMPLES, Bin, Data, Figure, best_line, calibration, figures
from metarm.model import Layout, MetaRM, by_length
from metarm.rollouts import Example, Rollouts, require_labelled
from metarm.train import JudgeSettings, draw_in_folder
from nlhf.config import ClassSpec, Presentation
from nlhf.errors import UserError
from nlhf.evaluation.intervals import check_resamples
from nlhf.files import write_json, write_jsonl, write_text
from nlhf.judge import Judge
from nlhf.logs import setup_logging
from nlhf.manifest import build_manifest
from nlhf.models import ModelConfig, model_hash, render_chat
from nlhf.pairs import Pair
from nlhf.rewards import CritiqueReward, RewardConfig
from nlhf.runs import check_run, open_run
from nlhf.sources import DataConfig, load_pairs

logger = logging.getLogger(__name__)

_REWARD = RewardConfig()
_PREDICTORS = {
    "metarm": "MetaRM",
    "constant": "constant",
    "length": "length of the critique",
    "confidence": "the judge's probability of its verdict",
}


@dataclasses.dataclass(frozen=True)
class Result:
    """What was found out about a MetaRM.

    Attributes:
        figures: By predictor (metarm, constant, length, confidence) and name (see `metarm.metrics.FIGURES`).
        calibration: MetaRM's calibration curve, lowest scores first.
        counts: Pairs, rollouts, targets, and what was dropped.
    """

    figures: dict[str, dict[str, Figure]]
    calibration: list[Bin]
    counts: dict[str, Any]


def evaluate(
    model: ModelConfig,
    data: DataConfig,
    judge: JudgeSettings,
    out: str,
    scorer: ClassSpec | None = None,
    pairs: Literal["hidden", "all"] = "hidden",
    limit: int | None = None,
    layout: Layout | None = None,
    max_length: int | None = None,
    state: str | None = None,
    reward: RewardConfig = _REWARD,
    order: Presentation = "random",
    batch_size: int = 16,
    resamples: int = RESAMPLES,
    seed: int = 0,
    resume: bool = False,
) -> Result:
    """Measure a MetaRM on pairs whose critiques it never saw, beside three baselines.

    Writes to ``out``: pairs.jsonl, rollouts.jsonl, scores.jsonl, metrics.json, report.md and calibration.png.

    Args:
        model: The MetaRM, ours or any other that AutoModelForSequenceClassification loads with one output.
        data: The data set as MetaRM was trained on it, with the same labelled_fraction and seed.
        judge: Whose critiques are scored.
        out: Folder of the run.
        scorer: Compares them with the humans' (exact, lexical, embedding, learned, llm, or your own); null is learned.
        pairs: hidden takes the pairs whose critiques labelled_fraction hides; all takes every pair, for a data set of
            which MetaRM saw nothing.
        limit: Take the first N of them.
        layout: How pair and critique become one text; null takes what was saved with the model, else the default.
        max_length: Most tokens of a text; null takes what was saved with the model, else 10,240.
        state: process_reward.pt of a checkpoint of an online run: its weights take the place of the model's.
        reward: The format rule.
        order: random exchanges A and B by a seeded coin; both shows each pair in both orders.
        batch_size: Texts that go through a model at once.
        resamples: Bootstrap resamples of the intervals.
        seed: Seed of the order and the bootstrap and, unless data.seed is set, of loading the data.
        resume: Continue an interrupted run in out; its configuration must be equal.

    Raises:
        UserError: bad configuration or data, or a folder in use.
    """
    config = dict(locals())
    setup_logging()
    check_resamples(resamples)
    for name, value in (("limit", limit), ("max_length", max_length), ("batch_size", batch_size)):
        if value is not None and value < 1:
            raise UserError(f"{name} must be at least 1, got {value}")
    check_run(out, config, resume)
    if judge.backend.kind != "transformers":
        raise UserError(
            f"judge.backend.kind is {judge.backend.kind}, but the baseline 'confidence' reads the judge's own "
            "probabilities, which needs transformers"
        )
    chosen = choose_pairs(data, pairs, limit, seed)
    critique_reward = CritiqueReward(scorer.build() if scorer else None)
    metarm = MetaRM.load(model, layout, max_length)
    if state is not None:
        _take_weights(metarm, state)
    answering = judge.load()

    folder = open_run(out, config, resume)
    rollouts = draw_in_folder(folder, answering, chosen, critique_reward, judge.samples, reward, order, seed)
    examples = rollouts.usable
    if not examples:
        raise UserError(f"none of the {len(rollouts.examples)} rollouts has a reward: {rollouts.counts()['dropped']}")
    scores = {
        "metarm": metarm.score([rollouts.shown(e) for e in examples], [e.critique for e in examples], batch_size),
        "constant": [1.0] * len(examples),
        "length": [float(len(e.critique)) for e in examples],
    }
    if all(e.critique in e.reply for e in examples):
        scores["confidence"] = verdict_probabilities(answering, rollouts, examples, batch_size)
    else:
        logger.warning("no baseline 'confidence': format %s words critiques otherwise than its replies", judge.format)
    write_jsonl(folder / "scores.jsonl", _score_rows(examples, scores))
    result = measure(rollouts, examples, scores, resamples, seed)
    write_json(folder / "manifest.json", _manifest(data, chosen, model, judge, metarm))
    _write(folder, result, model.name)
    return result


def choose_pairs(data: DataConfig, which: Literal["hidden", "all"], limit: int | None, seed: int) -> list[Pair]:
    """Pairs with their critiques, either all or those whose critiques ``labelled_fraction`` hides in training.

    Raises:
        UserError: nothing is hidden, or no pair has a label and a critique.
    """
    everything = load_pairs(dataclasses.replace(data, labelled_fraction=1.0), seed=seed)
    if which == "hidden":
        if data.labelled_fraction == 1.0:
            raise UserError(
                "data.labelled_fraction is 1, so no critique was hidden from training. Give the fraction that MetaRM "
                "was trained with, or set pairs: all for a data set of which it saw nothing"
            )
        seen = {pair.id for pair in load_pairs(data, seed=seed) if pair.has_critique}
        everything = [pair for pair in everything if pair.id not in seen]
    return require_labelled(everything, "data")[:limit]


def _take_weights(metarm: MetaRM, path: str) -> None:
    import torch

    try:
        saved = torch.load(path, map_location=metarm.device, weights_only=True)["model"]
        metarm.model.load_state_dict(saved)
    except (OSError, EOFError, KeyError, RuntimeError, TypeError, ValueError, pickle.UnpicklingError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(
            f"state: {path} does not hold the weights of an online MetaRM like this one ({reason})"
        ) from None


def measure(
    rollouts: Rollouts, examples: Sequence[Example], scores: dict[str, list[float]], resamples: int, seed: int
) -> Result:
    """Every figure from scores by predictor; the baselines' become predictions by their best straight line."""
    targets = np.array([e.target for e in examples])
    right, sound = (np.array([getattr(e, name) for e in examples]) for name in ("correct", "sound"))
    predictors = {
        name: Data(np.array(s) if name == "metarm" else best_line(np.array(s), targets), targets, right, sound)
        for name, s in scores.items()
    }
    clusters = [rollouts.pairs[e.pair_id].cluster for e in examples]
    return Result(
        figures(predictors, clusters, resamples, seed),
        calibration(predictors["metarm"], BINS),
        rollouts.counts(),
    )


def verdict_probabilities(
    judge: Judge, rollouts: Rollouts, examples: Sequence[Example], batch_size: int = 16
) -> list[float]:
    """The judge's probability, at temperature 1, of its verdict given its reasons: of all that follows the critique."""
    tokenizer, options = judge.generator.tokenizer, judge.generator.config.chat_template_kwargs
    starts, ends = [], []
    for example in examples:
        prompt = render_chat(tokenizer, judge.format.render(rollouts.shown(example)), **options)
        reply = tokenizer(example.reply, add_special_tokens=False, return_offsets_mapping=True)
        end_of_critique = example.reply.rfind(example.critique) + len(example.critique)
        before = sum(end <= end_of_critique for _, end in reply["offset_mapping"])
        starts.append(prompt + reply["input_ids"][:before])
        ends.append(reply["input_ids"][before:])
    return continuation_probabilities(judge.generator.model, starts, ends, judge.generator.pad_id, batch_size)


def continuation_probabilities(
    model: Any, starts: Sequence[list[int]], ends: Sequence[list[int]], pad: int, batch_size: int
) -> list[float]:
    """Probability of each ``ends[i]`` after ``starts[i]``, both ids, under a causal language model."""
    import torch

    probabilities = [0.0] * len(starts)
    rows = [start + end for start, end in zip(starts, ends, strict=True)]
    device = model.get_input_embeddings().weight.device
    for batch in by_length(rows, batch_size):
        # Padding on the left: the ends, whose logits alone are kept, stand one below the other.
        width, kept = max(len(rows[i]) for i in batch), max(len(ends[i]) for i in batch)
        ids = torch.tensor([[pad] * (width - len(rows[i])) + rows[i] for i in batch], device=device)
        mask = torch.tensor([[0] * (width - len(rows[i])) + [1] * len(rows[i]) for i in batch], device=device)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        with torch.no_grad():
            logits = model(input_ids=ids, attention_mask=mask, position_ids=positions, logits_to_keep=kept + 1).logits
        chances = logits[:, :-1].float().log_softmax(-1).gather(-1, ids[:, -kept:, None])[..., 0]
        for row, i in zip(chances, batch, strict=True):
            probabilities[i] = float(row[kept - len(ends[i]) :].sum().exp())
    return probabilities


def _score_rows(examples: Sequence[Example], scores: dict[str, list[float]]):
    for i, e in enumerate(examples):
        key = {"pair_id": e.pair_id, "order": e.order, "sample": e.sample, "correct": e.correct, "target": e.target}
        yield {**key, **{name: values[i] for name, values in scores.items()}}


def _manifest(
    data: DataConfig, pairs: Sequence[Pair], model: ModelConfig, judge: JudgeSettings, metarm: MetaRM
) -> dict[str, Any]:
    return {
        "data": build_manifest(data, pairs, {}).to_dict(),
        "model_hash": model_hash(model.name),
        "judge_hash": model_hash(judge.model.name),
        "shortened": dict(metarm.shortened),
    }


def _write(folder: Path, result: Result, name: str) -> None:
    write_json(folder / "metrics.json", dataclasses.asdict(result))
    report = to_markdown(result, name)
    write_text(folder / "report.md", report)
    plot(result, folder / "calibration.png")
    print(report)
    print(f"report: {folder / 'report.md'}")


def to_markdown(result: Result, name: str) -> str:
    """The figures as a table, and the calibration curve."""
    counts = result.counts
    dropped = ", ".join(f"{n} {reason}" for reason, n in counts["dropped"].items()) or "none"
    targets = ", ".join(f"{n} of {target}" for target, n in counts["targets"].items())
    names = list(FIGURES)
    lines = [
        f"# MetaRM {name}",
        "",
        f"{counts['pairs']} pairs, {counts['rollouts']} rollouts; rewards: {targets}; dropped: {dropped}.",
        "95 % bootstrap intervals over pairs. Baselines are given their best straight line through these rewards.",
        "",
        "| | " + " | ".join(title for title, _ in FIGURES.values()) + " |",
        "|---" * (len(names) + 1) + "|",
    ]
    for predictor, found in result.figures.items():
        lines.append(f"| {_PREDICTORS[predictor]} | " + " | ".join(_cell(found[key]) for key in names) + " |")
    first = next(iter(result.figures.values()))
    lines.append("| rollouts | " + " | ".join(str(first[key].n) for key in names) + " |")
    lines += ["", "| mean score | mean reward | rollouts |", "|---|---|---|"]
    lines += [f"| {b.score:.3f} | {b.target:.3f} | {b.n} |" for b in result.calibration]
    return "\n".join(lines) + "\n"


def _cell(figure: Figure) -> str:
    if figure.value is None:
        return "-"
    interval = "" if figure.low is None else f" [{figure.low:.3f}, {figure.high:.3f}]"
    return f"{figure.value:.3f}{interval}"


def plot(result: Result, path: Path) -> None:
    """Draw MetaRM's calibration curve."""
    from matplotlib.figure import Figure as Canvas

    canvas = Canvas(figsize=(4.5, 4.2), layout="constrained")
    axes = canvas.subplots()
    scores, targets = ([getattr(b, key) for b in result.calibration] for key in ("score", "target"))
    ends = [min(scores + targets), max(scores + targets)]
    axes.plot(ends, ends, color="0.7", linewidth=1, label="perfect")
    axes.plot(scores, targets, marker="o", markersize=4, label="MetaRM")
    axes.set(xlabel="mean score", ylabel="mean reward", title="Calibration (equal numbers of rollouts a point)")
    axes.title.set_fontsize(9)
    axes.legend(frameon=False)
    canvas.savefig(path)
