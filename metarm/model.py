"""MetaRM: reads a pair and a critique, and says what reward the critique's rollout would earn.

Station of the path: Verdict -> **rewards**, in place of a human critique. A sequence classifier with one output, used
as it comes (no squashing); a model of its own, not a head on the judge. Source: RM-NLHF (arXiv 2601.07349), section on
MetaRM.
"""

import copy
import itertools
import logging
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nlhf.errors import UserError
from nlhf.files import read_json, write_json
from nlhf.formats import get_format
from nlhf.model_names import explained, resolve
from nlhf.models import ModelConfig, load_config, load_tokenizer, pick_dtype, safe_messages, words_known
from nlhf.pairs import Pair

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

MAX_LENGTH = 10_240
SETTINGS_FILE = "metarm.json"


@dataclass
class Layout:
    """How a pair and a critique become one text: what stands before each part."""

    format: str = "rm_nlhf"
    """Judge format that writes the conversation and the responses (its tags and prompt are not used)."""

    conversation: str = "[Conversation]\n"
    """Before the conversation."""

    response_a: str = "\n\n[Response A]\n"
    """Before response A."""

    response_b: str = "\n\n[Response B]\n"
    """Before response B."""

    critique: str = "\n\n[Critique]\n"
    """Before the critique."""

    end: str = ""
    """After the critique."""

    def __post_init__(self):
        if get_format(self.format).pointwise:
            raise UserError(f"layout.format: {self.format!r} shows one response; a MetaRM reads both")
        if not self.critique.strip():
            raise UserError("layout.critique must say where the critique begins; it is empty")


@dataclass
class LoraSettings:
    """Train low-rank adapters and the head in place of all weights."""

    rank: int = 16
    """Rank of the adapters."""

    alpha: int = 32
    """Their scale is alpha / rank."""

    def __post_init__(self):
        if self.rank < 1 or self.alpha < 1:
            raise UserError(f"lora.rank and lora.alpha must be at least 1, got {self.rank} and {self.alpha}")


class MetaRM:
    """A sequence classifier with its tokenizer and the layout of its text.

    A score depends on pair and critique alone, never on the batch it was computed in: rows are padded on the right,
    and dropout is off, also in training (as in trl's RewardTrainer; the targets are rewards, not noisy classes).

    Attributes:
        model: The classifier, one output.
        tokenizer: Its tokenizer, whose padding is not its end of turn.
        layout: How texts are put together.
        max_length: Most tokens of a text.
        shortened: How many conversations and responses had to be cut so far, by name.
    """

    def __init__(self, model: Any, tokenizer: Any, layout: Layout, max_length: int = MAX_LENGTH):
        """Put the parts together.

        Raises:
            UserError: padding and end of turn are one token, so that the classifier would read the wrong token; the
                model does not have exactly one output; or nothing but the headings fits into ``max_length``.
        """
        if tokenizer.pad_token_id is None or tokenizer.pad_token_id == tokenizer.eos_token_id:
            raise UserError(
                f"tokenizer {tokenizer.name_or_path!r} pads with its end of turn {tokenizer.eos_token!r}; a classifier "
                "takes the last token that is not padding, so the two must differ: set model.tokenizer to one with a "
                "padding token of its own"
            )
        if model.config.num_labels != 1:
            raise UserError(f"a MetaRM has one output, but this classifier has {model.config.num_labels}")
        model.config.pad_token_id = model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
        self.model, self.tokenizer, self.layout = model.eval(), tokenizer, layout
        windows = (getattr(model.config.get_text_config(), "max_position_embeddings", None), tokenizer.model_max_length)
        self.max_length = min([max_length, *(w for w in windows if w)])
        if self.max_length < max_length:
            logger.info("MetaRM reads at most %d tokens (its window) instead of %d", self.max_length, max_length)
        self.shortened: Counter = Counter()
        self._format = get_format(layout.format)
        self._headings = dict(zip(_PARTS, self._tokens([getattr(layout, name) for name in _PARTS]), strict=True))
        self._before, self._after = self._special_tokens()
        headings = sum(map(len, (*self._headings.values(), self._before, self._after)))
        if headings >= self.max_length:
            raise UserError(
                f"max_length = {self.max_length} tokens leaves no room for a critique: the headings of the text alone "
                f"have {headings}; raise max_length, or shorten layout"
            )

    @classmethod
    def load(
        cls,
        config: ModelConfig,
        layout: Layout | None = None,
        max_length: int | None = None,
        new_head: bool = False,
        dtype: str | None = None,
        lora: LoraSettings | None = None,
        device: "str | torch.device | None" = None,
    ) -> "MetaRM":
        """Load a MetaRM, or a backbone to make one from.

        Args:
            config: The model: any that AutoModelForSequenceClassification loads.
            layout: How texts are put together; None takes what was saved with the model, else the default.
            max_length: Most tokens of a text; None takes what was saved with the model, else 10,240.
            new_head: The model may come without a head; it gets one with random weights (torch's global generator).
            dtype: Number format in place of the configuration's.
            lora: Freeze the backbone and train adapters and head.
            device: Where to put it; None is the GPU if there is one.

        Raises:
            UserError: it cannot be loaded, or weights are missing that would be random.
        """
        import torch
        from transformers import AutoModelForSequenceClassification

        tokenizer = load_tokenizer(config)
        device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        model_config = load_config(config.name, config.revision, config.trust_remote_code)
        _without_dropout(model_config)
        if new_head:
            model_config.num_labels = 1
            model_config.problem_type = "regression"
        with explained("classifier", config.name), _quiet_loading(), _whole_weights():
            model, report = AutoModelForSequenceClassification.from_pretrained(
                resolve(config.name),
                config=model_config,
                dtype=pick_dtype(dtype or config.dtype, device),
                attn_implementation=config.attn_implementation,
                revision=config.revision,
                trust_remote_code=config.trust_remote_code,
                output_loading_info=True,
            )
        missing = sorted(report["missing_keys"])
        if unexpected := [k for k in missing if not (new_head and _may_be_new(k, model))]:
            hint = "" if new_head else "; train it first: metarm train"
            raise UserError(
                f"model {config.name!r} is not a complete MetaRM: its checkpoint lacks {len(missing)} weights, for "
                f"example {unexpected[0]}{hint}"
            )
        saved = _saved_settings(config.name)
        layout = layout or Layout(**saved.get("layout", {}))
        metarm = cls(model.to(device), tokenizer, layout, max_length or saved.get("max_length", MAX_LENGTH))
        if lora:
            metarm.model = _with_adapters(metarm.model, lora, missing)
        return metarm

    @property
    def device(self) -> "torch.device":
        """Where the model is."""
        return next(self.model.parameters()).device

    def encode(self, pairs: Sequence[Pair], critiques: Sequence[str]) -> list[list[int]]:
        """The ids of each pair (in the order shown to the judge) with its critique.

        What is too long loses the beginning of its conversation first, then the ends of its responses, both cut to one
        length; never the critique. `shortened` counts them.

        Raises:
            UserError: a critique alone does not fit.
        """
        variables = [self._format.variables(pair) for pair in pairs]
        parts = [[str(v["context"]), str(v["response_a"]), str(v["response_b"])] for v in variables]
        # The rollouts of a group share their pair, and some of them their critique: each text is read once.
        texts = list(dict.fromkeys(itertools.chain(*parts, critiques)))
        # Judged text may hold control tokens, and padding among them would move the token that is read.
        safe = safe_messages(self.tokenizer, [{"content": text} for text in texts])
        tokens = dict(zip(texts, self._tokens([message["content"] for message in safe]), strict=True))
        return [
            self._assemble(pair, *(tokens[text] for text in (*three, critique)))
            for pair, three, critique in zip(pairs, parts, critiques, strict=True)
        ]

    def _assemble(
        self, pair: Pair, conversation: list[int], a: list[int], b: list[int], critique: list[int]
    ) -> list[int]:
        heads = self._headings
        fixed = sum(map(len, heads.values())) + len(self._before) + len(self._after) + len(critique)
        room = self.max_length - fixed
        if room < 0:
            raise UserError(
                f"pair {pair.id!r}: the critique has {len(critique)} tokens, {-room} more than fit into max_length = "
                f"{self.max_length} with the headings; a critique is never cut, so raise max_length"
            )
        if len(a) + len(b) > room:
            self.shortened["responses"] += 1
            cap = max(room // 2, room - min(len(a), len(b)))
            a, b = a[:cap], b[:cap]
            room = len(a) + len(b)  # an odd token is not worth a piece of conversation
        left = room - len(a) - len(b)
        if len(conversation) > left:
            self.shortened["conversations"] += 1
            conversation = conversation[len(conversation) - left :]
        shown = (heads["conversation"], conversation, heads["response_a"], a, heads["response_b"], b)
        judged = (heads["critique"], critique, heads["end"])
        return list(itertools.chain(self._before, *shown, *judged, self._after))

    def _tokens(self, texts: Sequence[str]) -> list[list[int]]:
        if not texts:
            return []
        with words_known(self.tokenizer):
            return [list(ids) for ids in self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]]

    def _special_tokens(self) -> tuple[list[int], list[int]]:
        """What the tokenizer puts before and after a text ([CLS] and [SEP], a beginning of sequence, or nothing)."""
        bare = self._headings["critique"]
        whole = list(self.tokenizer(self.layout.critique)["input_ids"])
        start = next(i for i in range(len(whole)) if whole[i : i + len(bare)] == bare)
        return whole[:start], whole[start + len(bare) :]

    def collate(
        self, rows: Sequence[Sequence[int]], device: "str | torch.device | None" = None
    ) -> dict[str, "torch.Tensor"]:
        """Ids and mask of one batch, int64 [n, longest], padded on the right; on the model's device if not said."""
        import torch

        device = device or self.device
        width, pad = max(map(len, rows)), self.tokenizer.pad_token_id
        ids = [[*row, *[pad] * (width - len(row))] for row in rows]
        mask = [[1] * len(row) + [0] * (width - len(row)) for row in rows]
        return {
            "input_ids": torch.tensor(ids, device=device),
            "attention_mask": torch.tensor(mask, device=device),
        }

    def predict(self, rows: Sequence[Sequence[int]]) -> "torch.Tensor":
        """Scores of one batch of ids, float32 [n], with gradients where torch records them."""
        import torch

        weights = next(self.model.parameters())
        # Weights that are trained are float32 also on a GPU, where they compute in bfloat16 (see training_dtype).
        mixed = weights.is_cuda and weights.dtype == torch.float32
        with torch.autocast("cuda", torch.bfloat16, enabled=mixed):
            logits = self.model(**self.collate(rows)).logits
        return logits[:, 0].float()

    def score_ids(self, rows: Sequence[Sequence[int]], batch_size: int = 16) -> list[float]:
        """Scores of encoded texts, in their order; equal texts go through the model once."""
        import torch

        distinct, place = unique(rows)
        scores = [0.0] * len(distinct)
        with torch.no_grad():
            for batch in by_length(distinct, batch_size):
                for i, score in zip(batch, self.predict([distinct[i] for i in batch]).tolist(), strict=True):
                    scores[i] = score
        return [scores[i] for i in place]

    def score(self, pairs: Sequence[Pair], critiques: Sequence[str], batch_size: int = 16) -> list[float]:
        """The predicted total reward of each critique: about 0 wrong label, 1 right label, 1.5 and a sound critique.

        Args:
            pairs: The pairs, in the order in which they were shown to the judge.
            critiques: What the judge wrote as its reasons, without the verdict.
            batch_size: Texts that go through the model at once.
        """
        return self.score_ids(self.encode(pairs, critiques), batch_size)

    def save(self, folder: str | Path) -> None:
        """Save to a folder that `load` and AutoModelForSequenceClassification read; adapters are merged."""
        merged = copy.deepcopy(self.model).merge_and_unload() if hasattr(self.model, "merge_and_unload") else self.model
        merged.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        write_json(Path(folder) / SETTINGS_FILE, {"layout": asdict(self.layout), "max_length": self.max_length})


_PARTS = ("conversation", "response_a", "response_b", "critique", "end")


def unique(rows: Sequence[Sequence[int]]) -> tuple[list[tuple[int, ...]], list[int]]:
    """The distinct rows, in the order of their first appearance, and for each row which of them it is."""
    position: dict[tuple[int, ...], int] = {}
    place = [position.setdefault(tuple(row), len(position)) for row in rows]
    return list(position), place


def by_length(rows: Sequence[Sequence[int]], batch_size: int) -> list[list[int]]:
    """Batches of indices, longest first: neighbours need little padding."""
    order = sorted(range(len(rows)), key=lambda i: (-len(rows[i]), i))
    return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]


@contextmanager
def _quiet_loading() -> Iterator[None]:
    """Without transformers' warnings of missing weights: a new head is expected, and all else is an error of ours."""
    log = logging.getLogger("transformers")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


@contextmanager
def _whole_weights() -> Iterator[None]:
    """All weights in this process, also where the launcher has the judge's split over processes (FSDP, ZeRO-3).

    transformers finds out about that from the environment and from a global of its own, and would split (or leave out)
    the weights of any model that it loads.
    """
    from transformers.integrations import deepspeed

    variable = "FSDP_CPU_RAM_EFFICIENT_LOADING"
    value, reference = os.environ.get(variable), deepspeed._hf_deepspeed_config_weak_ref
    os.environ[variable] = "false"
    deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        deepspeed._hf_deepspeed_config_weak_ref = reference
        del os.environ[variable]
        os.environ.update({variable: value} if value is not None else {})


def _without_dropout(config: Any) -> None:
    for name, value in vars(config).items():
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)


def _may_be_new(key: str, model: Any) -> bool:
    """The weight belongs to the head (or the pooler before it) rather than to the backbone."""
    return not key.startswith(f"{model.base_model_prefix}.") or ".pooler." in key


def _saved_settings(name: str) -> dict[str, Any]:
    path = Path(resolve(name)) / SETTINGS_FILE
    return read_json(path) if path.is_file() else {}


def _with_adapters(model: Any, lora: LoraSettings, missing: Sequence[str]) -> Any:
    """The model with trainable adapters; the head and whatever else is new is trained, and saved, as a whole."""
    from peft import LoraConfig, get_peft_model

    heads = [n for n, m in model.named_children() if n != model.base_model_prefix and any(True for _ in m.parameters())]
    new = heads + (["pooler"] if any(".pooler." in key for key in missing) else [])
    settings = LoraConfig(
        task_type="SEQ_CLS", r=lora.rank, lora_alpha=lora.alpha, target_modules="all-linear", modules_to_save=new
    )
    return get_peft_model(model, settings).eval()
