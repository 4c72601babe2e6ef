"""The verb ``nlhf score-critiques fit``: learn the matcher of `nlhf.critique.learned` from people's labels.

Training data are ComVE train (three right reasons against two confusing ones, subtasks B and C) and ArgKP-2021 train
(argument and key point of one topic and stance: match or not); the development splits calibrate. Nothing of a test
split, and nothing of MetaCritique or DeFacto, is read.

The loss is pairwise: a couple of texts that belong together lies closer than one that does not. A penalty keeps right
and confusing reasons equally close, on average, to the reasons of *other* items (what differs there is style), and
another keeps the maps near the identity.
"""

import logging
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from nlhf.critique.benchmarks import KeyPointPair, Reasons, load_argkp, load_reasons
from nlhf.critique.learned import ENCODER, Matcher, layer_means
from nlhf.errors import UserError

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


@dataclass
class FitConfig:
    """How the matcher is learnt; the defaults made the one on board."""

    layers: tuple[int, ...] = (0, 3, 6)
    """Hidden states of the encoder that are read, 0 being its input."""

    epochs: int = 8
    """Passes over ComVE train."""

    batch_size: int = 256
    """ComVE items, and as many ArgKP triples, in one step."""

    learning_rate: float = 1e-3
    """Peak rate of Adam; it falls to 0 along a cosine."""

    scale: float = 10.0
    """Steepness of the pairwise logistic loss."""

    argkp_weight: float = 0.5
    """Weight of ArgKP's loss beside ComVE's."""

    style_weight: float = 100.0
    """Weight of the penalty on style."""

    identity_weight: float = 5e-4
    """Weight of the squared distance of the maps from the identity."""

    rank: int = 128
    """Directions of each map that are kept, the strongest; it sets the size of the file."""

    seed: int = 0
    """Seed of the order of the data."""

    def __post_init__(self):
        if not self.layers or self.epochs < 1 or self.batch_size < 2:
            raise UserError("fit: layers must name a layer, epochs must be at least 1 and batch_size at least 2")


# What jsonargparse shows as the default of a verb.
DEFAULTS = FitConfig()


def fit(data: str, out: str, encoder: str = ENCODER, settings: FitConfig = DEFAULTS) -> Matcher:
    """Learn a matcher from ComVE and ArgKP-2021 and write it.

    Args:
        data: Folder that holds comve and argkp2021.
        out: The file to write, ending in .safetensors.
        encoder: Name of the sentence encoder.
        settings: How to learn.

    Raises:
        UserError: a data set is missing or malformed.
    """
    from nlhf.models import load_sentence_encoder

    if Path(out).suffix != ".safetensors":
        raise UserError(f"{out}: the matcher is a safetensors file; name it .safetensors")
    folder = Path(data)
    reasons = {split: _complete(load_reasons(folder / "comve", split)) for split in ("train", "validation")}
    points = {split: load_argkp(folder / "argkp2021", split) for split in ("train", "dev")}
    texts = {text for items in reasons.values() for r in items for text in (*r.right, *r.confusing)}
    texts |= {text for pairs in points.values() for p in pairs for text in (p.argument, p.key_point)}
    ordered = sorted(texts)
    print(f"encoding {len(ordered)} texts")
    states = dict(zip(ordered, layer_means(load_sentence_encoder(encoder), ordered, settings.layers), strict=True))
    matcher = fit_matcher(reasons, points, states, encoder, settings)
    matcher.save(out)
    print(f"matcher written to {out}")
    return matcher


def fit_matcher(
    reasons: dict[str, list[Reasons]],
    points: dict[str, list[KeyPointPair]],
    states: dict[str, np.ndarray],
    encoder: str,
    config: FitConfig,
) -> Matcher:
    """Learn the maps on ``train``, then the logistic curve on ``validation`` and ``dev``.

    Args:
        reasons: ComVE items with three right and two confusing reasons, by split.
        points: ArgKP pairs, by split.
        states: Each text's layer means, float [n_layers, width].
        encoder: Name of the encoder, which the matcher remembers.
        config: How to learn.
    """
    centre = np.mean([states[t] for r in reasons["train"] for t in (*r.right, *r.confusing)], axis=0)
    maps = _learn_maps(reasons["train"], points["train"], states, centre, config)
    matcher = Matcher(config.layers, centre, maps, 1.0, 0.0, 1.0, encoder)
    vectors = _vectors(matcher, states)
    slope, bias = _calibrate(reasons["validation"], points["dev"], vectors)
    matcher = Matcher(config.layers, centre, maps, slope, bias, 1.0, encoder)
    repeat = _repeat_threshold(points["train"], vectors, matcher)
    return Matcher(config.layers, centre, maps, slope, bias, repeat, encoder)


def _complete(items: Sequence[Reasons]) -> list[Reasons]:
    return [r for r in items if len(r.right) == 3 and len(r.confusing) == 2]


def _learn_maps(
    items: Sequence[Reasons],
    pairs: Sequence[KeyPointPair],
    states: dict[str, np.ndarray],
    centre: np.ndarray,
    config: FitConfig,
) -> np.ndarray:
    import torch
    from torch.nn.functional import softplus

    def tensor(groups: Sequence[Sequence[str]]) -> "torch.Tensor":
        return torch.tensor(np.array([[states[text] for text in group] for group in groups])) - torch.tensor(centre)

    right, confusing = tensor([r.right for r in items]), tensor([r.confusing for r in items])
    triples = _triples(pairs)
    shared, same, other = (tensor([[triple[k]] for triple in triples])[:, 0] for k in range(3))
    generator = torch.Generator().manual_seed(config.seed)
    identity = torch.eye(centre.shape[1]).repeat(len(config.layers), 1, 1)
    maps = identity.clone().requires_grad_()
    optimiser = torch.optim.Adam([maps], lr=config.learning_rate)
    steps = math.ceil(len(items) / config.batch_size)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, config.epochs * steps)
    others = ~torch.eye(3, dtype=torch.bool)
    for epoch in range(config.epochs):
        total = 0.0
        for batch in torch.randperm(len(items), generator=generator).split(config.batch_size):
            r, c = _map(right[batch], maps), _map(confusing[batch], maps)
            together = (r @ r.transpose(1, 2))[:, others]  # [n, 6]
            apart = (c @ r.transpose(1, 2)).flatten(1)  # [n, 6]
            comve = softplus(-config.scale * (together[:, :, None] - apart[:, None, :])).mean()
            elsewhere = torch.roll(r, 1, 0).transpose(1, 2)
            style = ((r @ elsewhere).mean() - (c @ elsewhere).mean()) ** 2
            loss = comve + config.style_weight * style + config.identity_weight * ((maps - identity) ** 2).sum()
            if config.argkp_weight and triples:
                drawn = torch.randint(len(triples), (config.batch_size,), generator=generator)
                a, b, d = (_map(x[drawn], maps) for x in (shared, same, other))
                gap = (a * b).sum(-1) - (a * d).sum(-1)
                loss = loss + config.argkp_weight * softplus(-config.scale * gap).mean()
            loss.backward()
            optimiser.step()
            schedule.step()
            optimiser.zero_grad()
            total += float(loss.detach())
        logger.info("epoch %d: loss %.4f", epoch + 1, total / steps)
    return _strongest(maps.detach().numpy(), config.rank)


def _strongest(maps: np.ndarray, rank: int) -> np.ndarray:
    """The maps' strongest directions alone, [n, width, rank]; turning the output space changes no cosine."""
    left, values, _ = np.linalg.svd(maps)
    return left[:, :, :rank] * values[:, None, :rank]


def _map(states: "torch.Tensor", maps: "torch.Tensor") -> "torch.Tensor":
    """As `Matcher.vectors`, with gradients: [..., n_layers, width] to [..., n_layers * rank]."""
    import torch

    mapped = torch.einsum("...lw,lwr->...lr", states, maps)
    return torch.nn.functional.normalize(mapped, dim=-1).flatten(-2) / math.sqrt(len(maps))


def _triples(pairs: Sequence[KeyPointPair]) -> list[tuple[str, str, str]]:
    """(text, one that matches it, one that does not): an argument and key points, or a key point and arguments."""
    found: dict[tuple[str, str], tuple[list[str], list[str]]] = defaultdict(lambda: ([], []))
    for p in pairs:
        where = f"{p.topic} {p.stance}"
        found[where, p.argument][not p.match].append(p.key_point)
        found[where, p.key_point][not p.match].append(p.argument)
    return [
        (text, same[i % len(same)], other[i % len(other)])
        for (_, text), (same, other) in found.items()
        if same and other
        for i in range(max(len(same), len(other)))
    ]


def _vectors(matcher: Matcher, states: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return dict(zip(states, matcher.vectors(np.stack(list(states.values()))), strict=True))


def _calibrate(
    items: Sequence[Reasons], pairs: Sequence[KeyPointPair], vectors: dict[str, np.ndarray]
) -> tuple[float, float]:
    """Slope and bias of the logistic curve, on development data; both data sets and both classes weigh the same."""
    from sklearn.linear_model import LogisticRegression

    comve = [(a, b, 1) for r in items for a, b in combinations(r.right, 2)]
    comve += [(a, b, 0) for r in items for a in r.confusing for b in r.right]
    argkp = [(p.argument, p.key_point, int(p.match)) for p in pairs]
    cosines, labels, weights = [], [], []
    for rows in (comve, argkp):
        for label in (0, 1):
            chosen = [float(vectors[a] @ vectors[b]) for a, b, y in rows if y == label]
            cosines += chosen
            labels += [label] * len(chosen)
            weights += [1.0 / len(chosen)] * len(chosen)
    curve = LogisticRegression(C=1e6)
    curve.fit(np.array(cosines)[:, None], labels, sample_weight=np.array(weights) * len(weights) / 4)
    return float(curve.coef_[0, 0]), float(curve.intercept_[0])


def _repeat_threshold(pairs: Sequence[KeyPointPair], vectors: dict[str, np.ndarray], matcher: Matcher) -> float:
    """The similarity that one in a thousand couples of different key points of one topic and stance exceeds."""
    groups: dict[str, set[str]] = defaultdict(set)
    for p in pairs:
        groups[f"{p.topic} {p.stance}"].add(p.key_point)
    cosines = [vectors[a] @ vectors[b] for group in groups.values() for a, b in combinations(sorted(group), 2)]
    if not cosines:
        return 1.0
    return float(np.quantile(matcher.probability(np.array(cosines)), 0.999))
