"""Reinforcement of a policy: GRPO of a model that answers prompts, rewarded by a judge's verdicts on its responses.

Station of the path: Verdict -> rewards -> **trainer**, as `nlhf.train`, with a policy in the place of the judge. The
reward is `nlhf.policy_reward.PolicyReward`; the trainer, its settings, the order of prompts and exact resuming are
those of `nlhf.train`. A prompt travels as a `nlhf.pairs.Pair` whose responses are empty: only its conversation is used.
Prompts of role-play (HER, arXiv 2601.21459) are conversations without their last turn
(`nlhf.roleplay.conversations`).
"""

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from nlhf.comparer import Comparer, JudgeConfig
from nlhf.config import ClassSpec
from nlhf.errors import UserError
from nlhf.generation.backends import PATIENCE, BackendConfig, report_usage
from nlhf.logs import setup_logging
from nlhf.models import ModelConfig
from nlhf.pairs import Pair
from nlhf.policy_reward import PolicyReward, PolicyRewardConfig
from nlhf.roleplay.conversations import ConversationConfig
from nlhf.runs import MAY_DIFFER, check_run
from nlhf.sources import DataConfig, load_pairs
from nlhf.sources.rows import read_rows
from nlhf.train import GRPOSettings, SamplesConfig, make_trainer, ready
from nlhf.training import begin_run, processes, run_trainer

logger = logging.getLogger(__name__)


@dataclass
class PromptConfig:
    """Where prompts come from: a file, the conversations of a data set of pairs, or conversations of a role-play."""

    file: str | None = None
    """JSONL, JSON, CSV, TSV or parquet with field prompt (or context): a text, or a list of {role, content}."""

    data: DataConfig | None = None
    """A data set of pairs; their conversations are the prompts, their responses are not used."""

    conversations: ConversationConfig | None = None
    """Dual-layer conversations, without their last turn; the response is a turn of who speaks that one."""

    limit: int | None = None
    """Keep the first N different prompts."""

    skip: int = 0
    """Pass over the first N different prompts."""

    def __post_init__(self):
        if sum(source is not None for source in (self.file, self.data, self.conversations)) != 1:
            raise UserError("prompts: set either file, data or conversations")
        if self.skip < 0 or (self.limit is not None and self.limit < 1):
            raise UserError("prompts.skip must not be negative and prompts.limit must be at least 1")

    def load(self, seed: int = 0) -> list[Pair]:
        """The prompts, each once, as pairs with empty responses.

        Raises:
            UserError: the source says what is wrong with it, a prompt ends with the assistant's turn, or none is left.
        """
        if self.conversations is not None:
            rows = [conversation.prompt() for conversation in self.conversations.load(seed)]
        else:
            rows = map(_prompt, _read_prompts(self.file) if self.file else load_pairs(self.data, seed=seed))
        prompts: dict[str, Pair] = {}
        for prompt in rows:
            prompts.setdefault(prompt.key, prompt)
        kept = list(prompts.values())[self.skip :][: self.limit]
        if not kept:
            raise UserError(f"prompts: none is left of {len(prompts)} different ones; see skip")
        return kept


def _read_prompts(file: str) -> list[Pair]:
    pairs = []
    for i, (where, row) in enumerate(read_rows(file)):
        if ("prompt" in row) == ("context" in row):
            raise UserError(f"{where}: a prompt needs field 'prompt' or 'context', one of them; found {sorted(row)}")
        context = row.get("prompt", row.get("context"))
        fields = {"id": str(row.get("id") or f"{Path(file).stem}-{i}"), "context": context}
        pairs.append(Pair.from_dict({**fields, "response_a": "", "response_b": ""}, where))
    return pairs


def _prompt(pair: Pair) -> Pair:
    if pair.context[-1].role == "assistant":
        raise UserError(f"prompt {pair.id!r} ends with the assistant's turn; a policy answers another's")
    return Pair(pair.id, pair.context, "", "", source=pair.source)


@dataclass
class PolicyValidationConfig:
    """Comparing the policy with the reference on held-out prompts during training, to keep the best model."""

    prompts: PromptConfig
    """The held-out prompts; none of them may be trained on."""

    every: int = 20
    """Steps between validations; the first is before training, the last after it."""

    batch_size: int = 32
    """Prompts that are generated for at once."""

    metric: ClassVar[str] = "score"
    scorer: ClassVar[ClassSpec | None] = None

    def __post_init__(self):
        for name in ("every", "batch_size"):
            if getattr(self, name) < 1:
                raise UserError(f"validation.{name} must be at least 1, got {getattr(self, name)}")


# How a server is asked, not what; and as elsewhere.
_MAY_DIFFER = (*MAY_DIFFER, *(f"judge.{name}" for name in PATIENCE))
_REWARD = PolicyRewardConfig()
_SAMPLES = SamplesConfig()


def train_policy(
    model: ModelConfig,
    prompts: PromptConfig,
    judge: JudgeConfig,
    out: str,
    grpo: GRPOSettings,
    reward: PolicyRewardConfig = _REWARD,
    reference: ModelConfig | None = None,
    validation: PolicyValidationConfig | None = None,
    samples: SamplesConfig = _SAMPLES,
    seed: int = 0,
    resume: bool = False,
    dry_run: bool = False,
) -> Path:
    """Train a policy by GRPO on a judge's verdicts.

    Args:
        model: The policy to start from.
        prompts: What it answers.
        judge: Compares its responses, in both orders.
        out: Folder of the run.
        grpo: Settings of GRPO.
        reward: Against a frozen policy's responses, or by tournaments among the policy's own.
        reference: The frozen policy; by default the model itself, before training.
        validation: Held-out prompts to choose the best model by.
        samples: Which responses to keep for reading.
        seed: Seed of the shuffling, the references, tournaments and everything random in training.
        resume: Continue an interrupted run in ``out``.
        dry_run: Load and check everything but the weights, print the budget, and stop.
    """
    config = {k: v for k, v in locals().items() if k != "dry_run"}
    setup_logging()
    check_run(out, config, resume, _MAY_DIFFER)
    reference = reference or model
    rows = prompts.load(seed)
    held_out = _held_out(validation, rows, seed)
    grpo.check_batch(processes(), "given", len(rows))
    if reward.kind == "tournament":
        _check_whole_groups(grpo)

    from nlhf.callbacks import MetricsLog, attach, sample_writer
    from nlhf.policy_validation import Conversation, PolicyValidation, PolicyWatch, References

    tokenizer, rows, too_long = ready(model, grpo, Conversation(), rows, "given")
    if dry_run:
        return Path(out)

    comparer = Comparer(judge.load())
    function = WithReferences(PolicyReward(comparer, reward, seed), rows)
    trainer = make_trainer(model, tokenizer, Conversation(), rows, function, grpo, Path(out), seed, "given")
    references = References(trainer, reference, grpo, seed, Path(out) if resume else None)
    function.texts = references(rows) if reward.kind == "reference" else [None] * len(rows)
    held_out_texts = references(held_out, greedy=True)
    manifest = {
        "prompts": _described(rows),
        "held_out": _described(held_out),
        "too_long": too_long,
        "judge": judge.identity() | {"format": comparer.format.name, "prompt_hash": comparer.format.prompt_hash},
        "reference": {"model": reference.name, "weights": references.weights},
    }
    if manifest["judge"]["weights"] and manifest["judge"]["weights"] == BackendConfig().weights_hash(model):
        logger.warning("judge and policy are the same model, which favours what it would write itself")
    folder = begin_run(trainer, out, config, resume, manifest, _MAY_DIFFER)
    references.save(folder)
    function.reward.record = sample_writer(trainer, folder, samples.every, samples.count)
    log = MetricsLog(folder)
    keeps_best = None
    if validation:
        keeps_best = PolicyValidation(
            validation, trainer, folder, held_out, held_out_texts, tokenizer, grpo, function.reward, log
        )
    attach(trainer, log, keeps_best, PolicyWatch())
    try:
        run_trainer(trainer, folder, resume)
    finally:
        if trainer.accelerator.is_main_process:
            report_usage(comparer.judge.judge.generator, judge.backend, folder)
    return folder


def _held_out(validation: PolicyValidationConfig | None, training: Sequence[Pair], seed: int) -> list[Pair]:
    if validation is None:
        return []
    prompts, known = validation.prompts.load(seed), {prompt.key for prompt in training}
    groups = {prompt.group for prompt in training if prompt.group}
    shared = [prompt.id for prompt in prompts if prompt.key in known or prompt.group in groups]
    if shared:
        raise UserError(
            f"{len(shared)} of {len(prompts)} held-out prompts are trained on too, or belong to a group that is, for "
            f"example {shared[0]!r}; use prompts.limit and validation.prompts.skip, or another split"
        )
    return prompts


def _check_whole_groups(grpo: GRPOSettings) -> None:
    """A tournament needs all responses to a prompt in one process."""
    generated = grpo.generated(processes()) // processes()
    if processes() > 1 and generated % grpo.num_generations:
        raise UserError(
            f"reward.kind tournament needs whole groups in each process, but {generated} responses a process are not "
            f"divisible by grpo.num_generations {grpo.num_generations}; raise gradient_accumulation_steps"
        )


def _described(prompts: Sequence[Pair]) -> dict[str, Any]:
    keys = "".join(prompt.key for prompt in prompts)
    return {"prompts": len(prompts), "hash": hashlib.sha256(keys.encode()).hexdigest()[:12]}


class WithReferences:
    """The reward with each row's reference, by the row's index: the references come later, they need a trainer."""

    __name__ = "policy_reward"  # trl names its metrics after it; of a class, __name__ is the name of the class
    process = None

    def __init__(self, reward: PolicyReward, prompts: Sequence[Pair]):
        from nlhf.policy_validation import judged

        self.reward = reward
        self.scenes = [judged(prompt) for prompt in prompts]
        self.texts: list[str | None] = []

    def __call__(self, pair_index: Sequence[int], **columns: Any) -> list[float]:
        """See `nlhf.policy_reward.PolicyReward`."""
        texts = [self.texts[i] for i in pair_index]
        scenes, characters = zip(*(self.scenes[i] for i in pair_index), strict=True)
        return self.reward(
            reference=None if None in texts else texts,
            scenes=scenes,
            characters=None if None in characters else characters,
            **columns,
        )
