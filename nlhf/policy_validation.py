"""What a policy answers beside its rollouts: the frozen reference's responses, and held-out prompts during training.

Station of the path: **trainer**, beside `nlhf.callbacks`, for `nlhf.train_policy`.
"""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from nlhf.callbacks import MetricsLog, Validation, Watch, keep_best
from nlhf.comparer import Comparison
from nlhf.files import append_jsonl, read_jsonl, write_jsonl
from nlhf.formats.base import Message
from nlhf.generation import SamplingConfig, TransformersGenerator
from nlhf.generation.backends import BackendConfig
from nlhf.models import ModelConfig, load_model, load_tokenizer
from nlhf.pairs import Pair, Turn
from nlhf.policy_reward import PolicyReward
from nlhf.roleplay.conversations import ScenePrompt

if TYPE_CHECKING:
    from nlhf.train import GRPOSettings
    from nlhf.train_policy import PolicyValidationConfig

logger = logging.getLogger(__name__)

REFERENCES_FILE = "references.jsonl"
HELD_OUT_FILE = "held_out.jsonl"
_BATCH = 32  # responses of the reference computed at once


class PolicyWatch(Watch):
    """`nlhf.callbacks.Watch` in the words of a policy."""

    cut_off = "are judged as far as they go"
    rows = "prompts"
    format_rate = "response/format_rate"


class Conversation:
    """How a prompt is shown to a policy, in the place of a judge's format: as the conversation that it is."""

    def render(self, prompt: Pair) -> list[Message]:
        """The chat messages."""
        return [{"role": turn.role, "content": turn.content} for turn in prompt.context]


class References:
    """What the frozen policy answers to each prompt, once: drawn as the policy's rollouts are, greedy for validation.

    Each process answers its share. What an interrupted run has in its folder is not drawn again.
    """

    def __init__(self, trainer: Any, model: ModelConfig, grpo: "GRPOSettings", seed: int, folder: Path | None):
        """Set up; ``folder`` is that of an interrupted run."""
        self.trainer, self.model, self.grpo, self.seed = trainer, model, grpo, seed
        self.weights = BackendConfig().weights_hash(model)
        path = folder / REFERENCES_FILE if folder else None
        self.rows = [row for _, row in read_jsonl(path)] if path and path.is_file() else []

    def __call__(self, prompts: Sequence[Pair], greedy: bool = False) -> list[str]:
        """A response to each prompt.

        Raises:
            UserError: the model cannot be loaded, or a prompt is too long for it.
        """
        known = {row["key"]: row["response"] for row in self.rows if row["greedy"] == greedy}
        owed = [prompt for prompt in prompts if prompt.key not in known]
        if owed:
            answers = shared_out(self.trainer, owed, lambda share: self._answer(share, greedy))
            self.rows += [
                {"key": prompt.key, "greedy": greedy, "prompt": Conversation().render(prompt), "response": response}
                for prompt, response in zip(owed, answers, strict=True)
            ]
            known |= {prompt.key: response for prompt, response in zip(owed, answers, strict=True)}
        return [known[prompt.key] for prompt in prompts]

    def _answer(self, prompts: Sequence[Pair], greedy: bool) -> list[str]:
        sampling = SamplingConfig(
            self.grpo.max_completion_length,
            temperature=0.0 if greedy else self.grpo.temperature,
            top_p=self.grpo.top_p,
            seed=self.seed,
            batch_size=_BATCH,
        )
        generator = TransformersGenerator(load_model(self.model), load_tokenizer(self.model), sampling)
        return respond(generator, prompts)

    def save(self, folder: Path) -> None:
        """Write all of them beside the run's other files."""
        if self.trainer.accelerator.is_main_process:
            write_jsonl(folder / REFERENCES_FILE, self.rows)


def respond(generator: TransformersGenerator, prompts: Sequence[Pair]) -> list[str]:
    """One response to each prompt."""
    return [group[0].text for group in generator.generate([Conversation().render(prompt) for prompt in prompts])]


def shared_out(trainer: Any, items: Sequence[Any], work: Callable[[Sequence[Any]], list[Any]]) -> list[Any]:
    """``work(items)``, where each process does its share and all get the whole, in the order of the items."""
    from accelerate.utils import gather_object

    rank, count = trainer.accelerator.process_index, trainer.accelerator.num_processes
    share = items[rank::count]
    done = gather_object(list(zip(range(rank, len(items), count), work(share) if share else [], strict=True)))
    return [result for _, result in sorted(done, key=lambda pair: pair[0])]


def judged(prompt: Pair) -> tuple[tuple[Turn, ...], str | None]:
    """The conversation as the judge reads it, and who is to speak where the response is a dual-layer turn."""
    if isinstance(prompt, ScenePrompt):
        return prompt.scene, prompt.character
    return tuple(prompt.context), None


class PolicyValidation(Validation):
    """Answers held-out prompts greedily now and then, compares with the reference, and keeps the best in ``best/``."""

    def __init__(
        self,
        config: "PolicyValidationConfig",
        trainer: Any,
        folder: Path,
        prompts: Sequence[Pair],
        references: Sequence[str],
        tokenizer: Any,
        grpo: "GRPOSettings",
        reward: PolicyReward,
        log: MetricsLog,
    ):
        limit, judge_format = grpo.max_completion_length, reward.comparer.format
        super().__init__(config, trainer, folder, judge_format, prompts, tokenizer, limit, log)
        self.references, self.reward = list(references), reward

    def _validate(self, step: int) -> None:
        from accelerate.utils import DistributedType
        from trl.models import unwrap_model_for_generation

        accelerator = self.trainer.accelerator
        rows = list(zip(self.pairs, self.references, strict=True))
        with unwrap_model_for_generation(self.trainer.model_wrapped, accelerator) as model:
            generator = TransformersGenerator(model, self.tokenizer, self.sampling)
            if accelerator.distributed_type == DistributedType.FSDP:  # split weights need all processes at every step
                found = self._compared(generator, rows)
            else:
                found = shared_out(self.trainer, rows, lambda share: self._compared(generator, share))
        metrics = _figures(found)
        if not any(isinstance(prompt, ScenePrompt) for prompt in self.pairs):
            del metrics["format_rate"]  # any text is a response
        if accelerator.is_main_process:
            for row in found:
                append_jsonl(self.folder / HELD_OUT_FILE, {"step": step, **row})
            self.log.write(step, {f"validation/{k}": v for k, v in metrics.items() if v is not None})
            logger.info(
                "step %d: validation %s", step, ", ".join(f"{k} {v:.3g}" for k, v in metrics.items() if v is not None)
            )
        keep_best(self.trainer, self.folder / "best", {"step": step, **metrics}, self.config.metric)

    def _compared(self, generator: TransformersGenerator, rows: Sequence[tuple[Pair, str]]) -> list[dict[str, Any]]:
        """The policy's response to each prompt, and its margin over the reference."""
        texts = respond(generator, [prompt for prompt, _ in rows])
        comparisons, found = [], []
        for text, (prompt, reference) in zip(texts, rows, strict=True):
            context, character = judged(prompt)
            seen = self.reward.shown(text, character)
            comparisons.append(Comparison(context, seen, self.reward.shown(reference, character)))
            asked = {"id": prompt.id, "group": prompt.group, "prompt": context[-1].content, "character": character}
            found.append({**asked, "response": text, "reference": reference, "shown": seen})
        margins = self.reward.comparer.margins(comparisons)
        return [{**row, "margin": margin} for row, margin in zip(found, margins, strict=True)]


def _figures(found: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """Score, win and tie rate over the comparisons with a verdict, the share without one, form and mean length."""
    margins = [row["margin"] for row in found if row["margin"] is not None]
    return {
        "score": fmean(margins) if margins else None,
        "win_rate": sum(margin > 0 for margin in margins) / len(margins) if margins else None,
        "tie_rate": sum(margin == 0 for margin in margins) / len(margins) if margins else None,
        "invalid_rate": 1 - len(margins) / len(found),
        "format_rate": sum(row["shown"] is not None for row in found) / len(found),
        "characters": fmean(len(row["shown"] or "") for row in found),
    }
