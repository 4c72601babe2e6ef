"""The **trainer** of SDRM: trl's DistillationTrainer with the judge as its own teacher (arXiv 2609.38792).

trl draws the rollouts (transformers or vLLM), cuts them into micro-batches, steps and logs. What differs from it:

- several rollouts of each prompt, in an order that survives resuming, A and B exchanged in odd epochs;
- the teacher reads a prompt of its own, which holds the feedback, before the same tokens;
- the loss is `selfdistill.loss`: it chooses positions and projects only those to the vocabulary with gradient. Its
  divisor is known from the lengths of all rollouts of the step, so it does not depend on how the step is cut up;
- the teacher's weights follow the student's (`selfdistill.teacher.EMATeacher`) and are kept in checkpoints.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback
from trl import DistillationConfig, DistillationTrainer
from trl.trainer.utils import RepeatSampler, pad

from nlhf.errors import UserError
from nlhf.rewards import RewardConfig, Rollout, well_formed
from nlhf.sampler import ShuffledSampler, epoch_of
from selfdistill.head import Head
from selfdistill.loss import Positions, States, look, loss_at
from selfdistill.prompts import Prompt, Prompts
from selfdistill.selection import loss_total
from selfdistill.settings import SDRMSettings
from selfdistill.teacher import EMATeacher

TEACHER_FILE = "teacher.pt"

# No length is a fault: what is rewarded nowhere needs no guard against listing everything.
_ANY_LENGTH = RewardConfig(max_lines=10**9, max_characters=10**9)


class SDRMTrainer(DistillationTrainer):
    """Position-selective self-distillation of a judge; see the module.

    Args:
        model: Name or folder of the judge, or the loaded model (a PEFT model with LoRA adapters will do).
        prompts: The training pairs as student and teacher read them.
        settings: Settings of SDRM.
        args: trl's own settings.
        tokenizer: The judge's tokenizer.
        record: Is handed (step, rows) to keep rollouts for reading.

    Raises:
        UserError: the model has no plain language-model head, its adapters cannot be averaged, or its weights are
            sharded in a way that the teacher cannot follow.
    """

    def __init__(
        self,
        model: Any,
        prompts: Prompts,
        settings: SDRMSettings,
        args: DistillationConfig,
        tokenizer: Any,
        record: Callable[[int, list[dict[str, Any]]], None] | None = None,
    ):
        rows = [{"row": i} for i in range(len(prompts))]
        super().__init__(model=model, args=args, train_dataset=rows, processing_class=tokenizer)
        self.prompts, self.settings, self.record = prompts, settings, record
        if self._dist.is_zero3 or self._dist.fsdp_version == 1:
            raise UserError(
                "SDRM's teacher follows weights that are whole in each process or sharded by FSDP2, not by DeepSpeed "
                "ZeRO-3 or FSDP1; launch with experiments/accelerate/fsdp2.yaml"
            )
        Head.of(self.model)  # refuses what the loss could not train
        self.teacher = EMATeacher(self.model, settings.teacher, settings.teacher_rate)
        if self._dist.is_fsdp and settings.teacher != "live":
            from accelerate.utils.fsdp_utils import fsdp2_prepare_model

            # As accelerate shards the student, parameter by parameter.
            self.teacher.model = fsdp2_prepare_model(self.accelerator, self.teacher.model).eval()
        self.add_callback(_Follow(self.teacher))
        self._sums: Tensor | int = 0
        self._sampled_log_probs: list[list[float]] | None = None
        if self.use_vllm:
            self._keep_log_probs()

    def create_model_card(self, *arguments, **keywords):
        """The run folder says how it was made; trl's card would name a base model that it does not know."""

    # ---------------------------------------------------------------------------------------------------- rollouts

    def _get_train_sampler(self, dataset: Any = None) -> ShuffledSampler:
        parent = super()._get_train_sampler(dataset)
        n = self.settings.num_generations
        rows = parent.data_source
        repeats = RepeatSampler(rows, n, parent.batch_size // n, parent.repeat_count, shuffle=False)
        return ShuffledSampler(repeats, len(rows), self, self.args.seed)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        exchanged = self.settings.exchange and epoch_of(self) % 2 == 1
        shown = {row: self.prompts.get(row, exchanged) for row in {x["row"] for x in inputs}}
        prompts = [shown[x["row"]] for x in inputs]
        output = super()._generate_and_score_completions([{"prompt": p.messages} for p in prompts])
        device = output["prompt_ids"].device
        teacher_ids = [torch.tensor(p.teacher.ids) for p in prompts]
        padding = {"padding_side": "left", "pad_to_multiple_of": self.pad_to_multiple_of}
        masks = [torch.ones_like(ids) for ids in teacher_ids]
        output["teacher_prompt_ids"] = pad(teacher_ids, self._tokenizer.pad_token_id, **padding).to(device)
        output["teacher_prompt_mask"] = pad(masks, 0, **padding).to(device)
        output["feedback"] = torch.tensor([p.teacher.has_feedback for p in prompts], device=device)
        if self._sampled_log_probs is not None:
            width = output["completion_ids"].shape[1]
            log_probs = [torch.tensor(row + [0.0] * (width - len(row))) for row in self._sampled_log_probs]
            output["sampled_log_probs"] = torch.stack(log_probs).to(device)
        lengths = output["completion_mask"].sum(-1)
        own = loss_total(lengths, output["feedback"], self.settings.rho, self.settings.normalizer)
        output["num_items_in_batch"] = self.accelerator.gather(own).sum()
        self._read(prompts, output)
        return output

    def _read(self, prompts: list[Prompt], output: dict[str, Any]) -> None:
        """Log what the replies say, though nothing of it is rewarded, and keep some for reading."""
        ids = [row[mask.bool()] for row, mask in zip(output["completion_ids"], output["completion_mask"], strict=True)]
        texts = self._tokenizer.batch_decode(ids, skip_special_tokens=True)
        rollouts = []
        for prompt, text in zip(prompts, texts, strict=True):
            verdict = self.prompts.format.parse(text)
            rollouts.append(Rollout(prompt.pair, verdict, text, well_formed(verdict, _ANY_LENGTH)))
        facts = {
            "accuracy": [r.correct for r in rollouts],
            "verdict_rate": [r.verdict.label is not None for r in rollouts],
            "format_rate": [r.well_formed for r in rollouts],
            "feedback_rate": [p.teacher.has_feedback for p in prompts],
        }
        table = torch.tensor(list(facts.values()), dtype=torch.float, device=self.accelerator.device).T.contiguous()
        for name, value in zip(facts, self.accelerator.gather(table).mean(0).tolist(), strict=True):
            self._metrics["train"][name].append(value)
        if self.record:
            rows = [_sample(prompt, rollout) for prompt, rollout in zip(prompts, rollouts, strict=True)]
            self.record(self.state.global_step, rows)

    def _keep_log_probs(self) -> None:
        """Have vLLM say how likely the sampled tokens were; trl's distillation does not ask, and drops the answer."""
        self.vllm_generation.logprobs = 0
        generate = self.vllm_generation.generate

        def generate_and_keep(*arguments: Any, **keywords: Any) -> tuple:
            result = generate(*arguments, **keywords)
            # One number a token, or NaN: see `importance_ratio`.
            self._sampled_log_probs = [[float("nan") if t[0] is None else t[0] for t in row] for row in result[2]]
            return result

        self.vllm_generation.generate = generate_and_keep

    # -------------------------------------------------------------------------------------------------------- loss

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """The loss of one micro-batch; figures are gathered once a step."""
        loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if self.accelerator.sync_gradients:
            sums = self.accelerator.gather(self._sums.unsqueeze(0)).sum(0)
            self._sums = 0
            for name, value in _figures(*sums.tolist()).items():
                self._metrics["train"][name].append(value)
        return loss

    def _compute_loss(self, unwrapped_student, inputs, num_items_in_batch):
        # Called inside the student's (FSDP) forward, where its head is whole. The parent's divisor is the total over
        # all processes divided by their number, clamped in between; ours is the total itself.
        with self.accelerator.autocast():
            student, positions = self._look(unwrapped_student, inputs)
            loss = loss_at(
                positions,
                student,
                inputs["feedback"],
                inputs["num_items_in_batch"],
                self.settings,
                inputs.get("sampled_log_probs"),
            )
        self._sums = self._sums + _sums(positions, inputs["feedback"])
        # Gradients are averaged over processes; the divisor counts the positions of all of them.
        loss = loss * self.accelerator.num_processes
        return loss, positions.scores.student_entropy.sum(), positions.mask.sum()

    def _look(self, unwrapped_student: Any, inputs: dict[str, Any]) -> tuple[States, Positions]:
        student = self._states(unwrapped_student, inputs, "prompt")
        with torch.no_grad():
            if self.settings.teacher == "live":
                teacher = self._states(unwrapped_student, inputs, "teacher_prompt")
            else:
                model = self.teacher.model
                teacher = self._forward_redirection(model, model, self._states, model, inputs, "teacher_prompt")
        # The seed of a step, so that random draws anew each time and alike in all micro-batches and processes.
        seed = (self.args.seed << 32) + self.state.global_step
        tokens, mask = inputs["completion_ids"], inputs["completion_mask"]
        return student, look(student, teacher, tokens, mask, self.settings, seed)

    def _states(self, model: Any, inputs: dict[str, Any], prompt: str) -> States:
        ids = torch.cat([inputs[f"{prompt}_ids"], inputs["completion_ids"]], dim=1)
        mask = torch.cat([inputs[f"{prompt}_mask"], inputs["completion_mask"]], dim=1)
        hidden = self._get_last_hidden_state(model, ids, mask, inputs["completion_ids"].shape[1])
        head = Head.of(model, self.temperature)
        # After its forward the teacher's head is in pieces again.
        if self._dist.is_fsdp and not torch.is_grad_enabled():
            head = replace(head, weight=head.weight.clone(), bias=None if head.bias is None else head.bias.clone())
        return States(hidden, head)

    # ------------------------------------------------------------------------------------------------- checkpoints

    # The teacher is kept with the state of the optimiser: before trainer_state.json, which makes a checkpoint whole.
    def _save_optimizer_and_scheduler(self, output_dir):
        super()._save_optimizer_and_scheduler(output_dir)
        if self.settings.teacher == "ema":
            state = self.teacher.state_dict(keep=self.args.should_save)
            if self.args.should_save:
                torch.save(state, Path(output_dir) / TEACHER_FILE)

    def _load_optimizer_and_scheduler(self, checkpoint):
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint and self.settings.teacher == "ema":
            state = torch.load(Path(checkpoint) / TEACHER_FILE, map_location="cpu", weights_only=True, mmap=True)
            self.teacher.load_state_dict(state)


class _Follow(TrainerCallback):
    """Moves the teacher after every step of the optimiser."""

    def __init__(self, teacher: EMATeacher):
        self.teacher = teacher

    def on_optimizer_step(self, args, state, control, **_):
        """Called by the trainer."""
        self.teacher.update()


def _sums(positions: Positions, feedback: Tensor) -> Tensor:
    """Over the rollouts with feedback: positions, kept ones, sums of H_S, of H_T, of the divergence, of that kept."""
    scores = positions.scores
    counted = feedback.bool().unsqueeze(-1).expand_as(positions.mask)[positions.mask]
    kept = positions.keep[positions.mask] & counted
    kl = scores.divergence
    parts = [counted.sum(), kept.sum()]
    parts += [scores.student_entropy[counted].sum(), scores.teacher_entropy[counted].sum()]
    parts += [kl[counted].sum(), kl[kept].sum()]
    return torch.stack([p.double() for p in parts])


def _figures(n: float, kept: float, h_s: float, h_t: float, kl: float, kept_kl: float) -> dict[str, float]:
    """Means over the positions of the rollouts with feedback; nothing when there are none."""
    if not n:
        return {}
    figures = {"kl": kl / n, "teacher_entropy": h_t / n, "entropy_gap": (h_s - h_t) / n, "kept/share": kept / n}
    return figures | ({"kept/kl_share": kept_kl / kl} if kl > 0 else {})


def _sample(prompt: Prompt, rollout: Rollout) -> dict[str, Any]:
    pair, verdict = rollout.pair, rollout.verdict
    return {
        "pair_id": pair.id,
        "context": [turn.content for turn in pair.context],
        "response_a": pair.response_a,
        "response_b": pair.response_b,
        "label": pair.label,
        "feedback": prompt.teacher.feedback,
        "reply": rollout.text,
        "verdict": verdict.label,
        "critique": verdict.critique,
        "well_formed": rollout.well_formed,
    }
