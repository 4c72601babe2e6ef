"""The teacher of self-distillation, beside the student at the station **JudgeFormat.render** and at the **trainer**.

It is the judge itself with feedback in its prompt: the student's prompt with z inserted before the closing instruction,
and the student's weights, averaged over the steps (arXiv 2609.38792).
"""

import copy
import functools
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nlhf.errors import UserError
from nlhf.formats import get_format
from nlhf.formats.base import JudgeFormat, Message
from nlhf.models import render_chat
from nlhf.pairs import Pair
from selfdistill.contexts import NAMING, name_responses
from selfdistill.settings import Mode

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Slot:
    """The place of z in a judge prompt; exactly one of ``after`` and ``before`` names it, by its last occurrence.

    Attributes:
        after: The text that z follows.
        before: The text that z precedes.
        lead: What stands between the text before and z, and is left out with an empty z.
        naming: What the prompt calls a response: z does the same. Empty leaves z as it is. See `name_responses`.
    """

    after: str = ""
    before: str = ""
    lead: str = "\n\n"
    naming: str = NAMING

    def insert(self, prompt: str, z: str) -> str:
        """The prompt with z inserted and nothing else changed; the prompt itself when z is blank.

        Raises:
            UserError: the prompt has no such place.
        """
        at = prompt.rfind(self.after or self.before)
        if at < 0:
            raise UserError(
                f"the judge prompt has no {self.after or self.before!r}, where the teacher's feedback goes; "
                "keep that text in the prompt file, or name another place (feedback_after or feedback_before)"
            )
        at += len(self.after)
        return prompt[:at] + self.lead + z.strip() + prompt[at:] if z.strip() else prompt

    def worded(self, z: str) -> str:
        """Z with the prompt's own names of the responses."""
        return name_responses(z, self.naming) if self.naming else z


NAMES = {
    "arena_hard": "Assistant {}'s answer",
    "auto_j": "Response {number}",
    "deepseek_grm": "Response {number}",
    "her_rm": "cand_{number}",
    "her_rm_teacher": "cand_{number}",
    "j1": "Assistant {}'s answer",
    "judgelrm": "Assistant {number}'s answer",
    "llmbar": "Output ({lower})",
    "nemotron_genrm": "response_{number}",
    "prometheus2": "Response {}",
    "rewardbench": "Assistant {}'s answer",
    "rewardbench2": "Assistant {}'s answer",
    "rm_nlhf": "Chatbot {}'s response",
    "rm_r1": "Chatbot {}'s response",
    "rrm": "Assistant {number}'s response",
    "sandbox": "",
    "sdrm": "Assistant {}'s response",
    "skywork_critic": "Assistant {}'s answer",
    "think_rm": "Assistant {}'s response",
    "think_rm_strength": "Assistant {}'s response",
}
"""What each judge format's own prompt calls a response; see `name_responses`."""

SLOTS = {
    "sdrm": Slot(after="[End of Assistant B's Response]"),
    "rm_nlhf": Slot(after="[The End of Chatbot B's Response]", naming=NAMES["rm_nlhf"]),
    "sandbox": Slot(before=" judge", lead=" note: ", naming=""),
}
"""The slot of each judge format. A blank line follows the marker of the first two, so that z stands by itself."""


def slot_of(judge_format: JudgeFormat, after: str | None = None, before: str | None = None) -> Slot:
    """The slot of a format, or the one that is named for a prompt file.

    Args:
        judge_format: The format.
        after: Text of the prompt that z follows, named by the user.
        before: Text that it precedes.

    Raises:
        UserError: the format has none and none is named, or two are.
    """
    if after and before:
        raise UserError("give feedback_after or feedback_before, not both: the feedback has one place")
    if after or before:
        # A prompt file may call the responses anything.
        own = judge_format.prompt_text == get_format(judge_format.name).prompt_text
        naming = NAMES.get(judge_format.name, NAMING) if own else NAMING
        return Slot(after=after or "", before=before or "", naming=naming)
    if judge_format.name not in SLOTS:
        raise UserError(
            f"format {judge_format.name!r} has no place for the teacher's feedback; formats that have: "
            f"{', '.join(sorted(SLOTS))}; or name the place (feedback_after or feedback_before)"
        )
    return SLOTS[judge_format.name]


def teacher_messages(judge_format: JudgeFormat, pair: Pair, z: str, slot: Slot | None = None) -> list[Message]:
    """The student's messages with z inserted into the last one, and not a byte else changed."""
    slot = slot or slot_of(judge_format)
    *others, last = judge_format.render(pair)
    return [*others, {**last, "content": slot.insert(last["content"], z)}]


@dataclass(frozen=True)
class TeacherPrompt:
    """A teacher's prompt that fits.

    Attributes:
        ids: Its tokens.
        feedback: z as shown, maybe shortened; blank when there is none, and then the ids are the student's.
    """

    ids: list[int]
    feedback: str

    @property
    def has_feedback(self) -> bool:
        """Whether the teacher knows more than the student: rows without give no loss."""
        return bool(self.feedback.strip())


def teacher_prompt(
    tokenizer: Any,
    judge_format: JudgeFormat,
    pair: Pair,
    z: str,
    slot: Slot,
    max_tokens: int,
    variables: Mapping[str, Any],
    counts: Counter | None = None,
) -> TeacherPrompt | None:
    """The teacher's prompt for a pair as it is shown; see `fit_teacher_prompt` for the budget and what is counted.

    Args:
        tokenizer: The judge's.
        judge_format: Renders the student's prompt.
        pair: As it is shown.
        z: The feedback.
        slot: Its place.
        max_tokens: The budget.
        variables: Of the chat template.
        counts: What was shortened or left out.
    """

    def encode(z: str) -> list[int]:
        return render_chat(tokenizer, teacher_messages(judge_format, pair, z, slot), **variables)

    # Named before it is cut: "Assistant A's", the rest cut off, would be named once more.
    return fit_teacher_prompt(encode, slot.worded(z), max_tokens, counts)


def fit_teacher_prompt(
    encode: Callable[[str], list[int]], z: str, max_tokens: int, counts: Counter | None = None
) -> TeacherPrompt | None:
    """The teacher's prompt within a budget: z is cut at its end, between words where it has any, and nothing else is.

    Args:
        encode: The ids of the teacher's whole prompt, chat template and closing instruction included, given z.
        z: The feedback.
        max_tokens: The budget.
        counts: Counts ``without feedback``, ``feedback shortened``, ``feedback cut to nothing``, ``prompt too long``.

    Returns:
        The prompt, or None when it is too long even without z.
    """
    counts = Counter() if counts is None else counts
    z = z.strip()
    whole = encode(z)
    if len(whole) <= max_tokens:
        counts["without feedback"] += not z
        return TeacherPrompt(whole, z)
    bare = encode("")
    if len(bare) > max_tokens:
        counts["prompt too long"] += 1
        return None
    # The longest beginning that fits. Lengths in tokens all but grow with those in characters; where they do not, the
    # search may settle for less, never for too much, because each result was measured.
    fits, too_long, prompt = 0, len(z), TeacherPrompt(bare, "")
    while too_long - fits > 1:
        middle = (fits + too_long) // 2
        shorter = _cut(z, middle)
        ids = encode(shorter)
        if len(ids) <= max_tokens:
            fits, prompt = middle, TeacherPrompt(ids, shorter)
        else:
            too_long = middle
    counts["feedback shortened" if prompt.has_feedback else "feedback cut to nothing"] += 1
    return prompt


def _cut(z: str, length: int) -> str:
    """The first ``length`` characters, back to the end of a word if the cut goes through one that a blank precedes."""
    head = z[:length]
    if length < len(z) and not z[length].isspace():
        words = re.match(r".*\s", head, re.DOTALL)
        head = words[0] if words else head
    return head.rstrip()


class EMATeacher:
    """The teacher's weights: an exponential moving average of the student's, the student's own, or those it began with.

    - ``ema``: a copy that moves by ``rate`` towards the student at each `update`. The average is kept in fp32 whatever
      the type of the model, and the model gets it rounded: in bf16 a hundredth of a small step is rounded away, and the
      teacher would stand still.
    - ``live``: the student itself; nothing is copied or saved.
    - ``frozen``: a copy that never moves. It is not saved: a resumed run makes it anew from the model it began with,
      before the student's checkpoint is loaded.

    LoRA: the average of B A is not (average of B)(average of A). The copy is therefore a model without adapters whose
    full matrices are averaged, W <- W + rate (W_0 + scale B A - W): exact, at the price of the base model once more
    and, in low precision, of an fp32 copy of the adapted matrices. `modules_to_save` are averaged as they are.

    Parameters are matched by name and tied ones are averaged once. Sharded parameters (FSDP2) work as long as teacher
    and student are sharded alike, both before the first `update`; a checkpoint holds whole ones.

    Args:
        student: The model trained; a PEFT model with LoRA adapters will do.
        mode: ema, live or frozen.
        rate: Of the average, in (0, 1]; 0.01 in the paper, after every optimiser step.

    Raises:
        UserError: a value is out of its range, or the adapters cannot be merged exactly.
    """

    def __init__(self, student: "PreTrainedModel", mode: Mode = "ema", rate: float = 0.01):
        if mode not in ("ema", "live", "frozen"):
            raise UserError(f"teacher must be ema, live or frozen, got {mode!r}")
        if not 0 < rate <= 1:
            raise UserError(f"the rate of the teacher's average must lie in (0, 1], got {rate}")
        self.student, self.mode, self.rate = student, mode, rate
        self.updates = 0
        moving = _moving_weights(student) if mode == "ema" else {}
        self.model = student if mode == "live" else _plain_copy(student)
        unknown = moving.keys() - dict(self.model.named_parameters())
        if unknown:
            raise UserError(
                f"the ema teacher cannot follow {min(unknown)}: the model without adapters has no such weight"
            )
        self._wide: dict[str, Tensor] = {}

    # Looked up when first needed: sharding puts other tensors in the place of the parameters.
    @functools.cached_property
    def _own(self) -> "dict[str, Tensor]":
        return dict(self.model.named_parameters())

    @functools.cached_property
    def _moving(self) -> "dict[str, Callable[[], Tensor]]":
        return _moving_weights(self.student) if self.mode == "ema" else {}

    def update(self) -> None:
        """Move towards the student, after an optimiser step; does nothing unless the mode is ema."""
        if self.mode != "ema":
            return
        import torch

        # Without a backward pass FSDP2 leaves the teacher's last parameters whole after a forward: the next one would
        # take these, and not what is written into the pieces here.
        for module in self.model.modules():
            if hasattr(module, "reshard"):
                module.reshard()
        with torch.no_grad():
            for name, weight in self._moving.items():
                average = self._average(name)
                average.lerp_(weight().to(average), self.rate)
                self._own[name].copy_(average)
        self.updates += 1

    def _average(self, name: str) -> "Tensor":
        """The average of a parameter: itself if it is precise enough, else an fp32 copy, made when first asked for."""
        import torch

        own = self._own[name].detach()
        if own.dtype in (torch.float32, torch.float64):
            return own
        if name not in self._wide:
            self._wide[name] = own.float()
        return self._wide[name]

    def state_dict(self, keep: bool = True) -> dict[str, Any]:
        """What a checkpoint needs: mode, number of updates, and the averages (not copies) of all weights that move.

        Args:
            keep: False in processes that do not write the checkpoint, but must take part where weights are sharded.
        """
        weights = {}
        for name in self._moving:
            average = self._average(name)
            if hasattr(average, "full_tensor"):  # one at a time on the device
                average = average.full_tensor().cpu()
            if keep:
                weights[name] = average
        return {"mode": self.mode, "updates": self.updates, "weights": weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`; the student must be the same model with the same adapters.

        Raises:
            UserError: the state is of another mode or another model.
        """
        import torch

        if state["mode"] != self.mode:
            raise UserError(f"the checkpoint's teacher is {state['mode']!r} but the configuration says {self.mode!r}")
        weights = state["weights"]
        different = set(weights) ^ set(self._moving)
        different |= {n for n in set(weights) & set(self._moving) if weights[n].shape != self._own[n].shape}
        if different:
            raise UserError(f"the checkpoint's teacher is of another model: {min(different)} differs")
        with torch.no_grad():
            for name, weight in weights.items():
                average = self._average(name)
                average.copy_(_split_like(weight, average))
                self._own[name].copy_(average)
        self.updates = state["updates"]


def _split_like(whole: "Tensor", like: "Tensor") -> "Tensor":
    """A whole tensor as the DTensor that ``like`` is, if it is one; each process has the whole and takes its part."""
    if not hasattr(like, "full_tensor"):
        return whole
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def _plain_copy(student: Any) -> Any:
    """A copy without adapters (merged), without gradients, in evaluation mode."""
    duplicate = copy.deepcopy(student)
    if hasattr(student, "peft_config"):
        duplicate = duplicate.merge_and_unload()
    return duplicate.requires_grad_(False).eval()


def _moving_weights(student: Any) -> dict[str, Callable[[], "Tensor"]]:
    """The weights that training moves, by their name in the model without adapters; called, each gives its value.

    Raises:
        UserError: the adapters are not plain LoRA on matrices in floating point.
    """
    if not hasattr(student, "peft_config"):
        return {name: p.detach for name, p in student.named_parameters() if p.requires_grad}
    from peft.tuners.lora import LoraLayer

    if any(config.peft_type != "LORA" or config.lora_bias for config in student.peft_config.values()):
        raise UserError("the ema teacher averages LoRA without lora_bias exactly and no other adapter: use that")
    moving: dict[str, Callable[[], Tensor]] = {}
    model = student.base_model.model
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            _check_mergeable(name, module)
            moving[f"{name}.weight"] = functools.partial(_merged_weight, module)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and ".lora_" not in name:  # modules_to_save, and biases if they are trained
            plain = re.sub(r"\.modules_to_save\.[^.]+", "", name).replace(".base_layer", "")
            moving[plain] = parameter.detach
    return moving


def _check_mergeable(name: str, module: Any) -> None:
    weight = getattr(module.get_base_layer(), "weight", None)
    if module.lora_variant or weight is None or not weight.is_floating_point() or not hasattr(module, "scaling"):
        raise UserError(
            f"adapter on {name}: the ema teacher can average plain LoRA on weights in floating point only "
            "(no DoRA or other variant, no 4- or 8-bit base, no target_parameters); use such, or teacher live or frozen"
        )


def _merged_weight(module: Any) -> "Tensor":
    weight = module.get_base_layer().weight.detach().float()
    return sum((module.get_delta_weight(adapter).float() for adapter in module.active_adapters), weight)
