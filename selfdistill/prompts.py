"""A pair as student and teacher read it, in either order, at the station **JudgeFormat.render**.

Prompts are made when a step asks for them: those of a whole data set, in both orders, would fill the memory.
"""

import itertools
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nlhf.errors import UserError
from nlhf.formats.base import JudgeFormat, Message
from nlhf.models import render_chat, safe_messages
from nlhf.pairs import Pair
from selfdistill.contexts import Context
from selfdistill.settings import SDRMSettings
from selfdistill.teacher import Slot, TeacherPrompt, teacher_prompt

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prompt:
    """One pair in one order.

    Attributes:
        pair: As it is shown.
        messages: The student's prompt; judged text cannot leave its turn.
        teacher: The teacher's.
    """

    pair: Pair
    messages: list[Message]
    teacher: TeacherPrompt


class Prompts:
    """The prompts of the training pairs that fit.

    A pair is left out when in one of the orders in which it will be shown the student's prompt is too long, or the
    teacher's even without feedback. Feedback alone is shortened. ``counts`` counts pairs left out (``prompt too long``)
    and, of the others, prompts (see `selfdistill.teacher.fit_teacher_prompt`).

    Args:
        pairs: In the order shown in even epochs; with the critiques that the teacher is to read.
        judge_format: Renders them.
        context: What the teacher is told about a pair.
        slot: Where.
        settings: Limits, and whether A and B are exchanged in odd epochs.
        tokenizer: Makes ids of the teacher's prompts, with the chat template's variables that trl gives the student's.

    Raises:
        UserError: nothing fits, no pair has feedback, or the prompt has no place for it.
    """

    def __init__(
        self,
        pairs: Sequence[Pair],
        judge_format: JudgeFormat,
        context: Context,
        slot: Slot,
        settings: SDRMSettings,
        tokenizer: Any,
    ):
        self.format, self.context, self.slot = judge_format, context, slot
        self.settings, self.tokenizer = settings, tokenizer
        self.variables = settings.extra.get("chat_template_kwargs") or {}
        self.counts: Counter = Counter()
        self.pairs = [pair for pair in pairs if self._fits(pair)]
        self._report(len(pairs))

    def __len__(self) -> int:
        return len(self.pairs)

    def get(self, index: int, exchanged: bool = False) -> Prompt:
        """The prompts of a pair, with A and B exchanged or as they were given."""
        pair = self.pairs[index]
        pair = pair.swap() if exchanged else pair
        messages = safe_messages(self.tokenizer, self.format.render(pair))
        return Prompt(pair, messages, self._teacher(pair, Counter()))

    def with_feedback(self, n: int) -> list[Pair]:
        """The first ``n`` pairs, as they are shown first, whose teacher knows more than the student."""
        return list(itertools.islice((p for p in self.pairs if self._teacher(p, Counter()).has_feedback), n))

    def _teacher(self, pair: Pair, counts: Counter) -> TeacherPrompt | None:
        limit, z = self.settings.max_teacher_prompt_length, self.context(pair)
        return teacher_prompt(self.tokenizer, self.format, pair, z, self.slot, limit, self.variables, counts)

    def _fits(self, pair: Pair) -> bool:
        counts: Counter = Counter()
        for shown in (pair, pair.swap()) if self.settings.exchange else (pair,):
            ids = render_chat(self.tokenizer, self.format.render(shown), **self.variables)
            if len(ids) > self.settings.max_prompt_length or self._teacher(shown, counts) is None:
                self.counts["prompt too long"] += 1
                return False
        self.counts += counts
        return True

    def _report(self, given: int) -> None:
        shown = 2 if self.settings.exchange else 1
        dropped, prompts = given - len(self.pairs), shown * len(self.pairs)
        if not self.pairs:
            raise UserError(
                f"no prompt fits into sdrm.max_prompt_length = {self.settings.max_prompt_length} and "
                f"sdrm.max_teacher_prompt_length = {self.settings.max_teacher_prompt_length} tokens; raise them"
            )
        if dropped:
            logger.warning(
                "left out %d of %d pairs longer than sdrm.max_prompt_length = %d or, without any feedback, than "
                "sdrm.max_teacher_prompt_length = %d",
                *(dropped, given, self.settings.max_prompt_length, self.settings.max_teacher_prompt_length),
            )
        lost = self.counts["without feedback"] + self.counts["feedback cut to nothing"]
        if lost == prompts:
            raise UserError(
                f"none of the {len(self.pairs)} training pairs has feedback for the teacher "
                f"({self.counts['feedback cut to nothing']} of {prompts} prompts left no room for it), so there is "
                "nothing to learn. Set context to what the data have, check field 'critiques' of the data and "
                "data.labelled_fraction, or raise sdrm.max_teacher_prompt_length"
            )
        if lost or self.counts["feedback shortened"]:
            logger.warning(
                "of %d prompts %d have no feedback and give no loss; in %d it was shortened to fit "
                "sdrm.max_teacher_prompt_length = %d",
                *(prompts, lost, self.counts["feedback shortened"], self.settings.max_teacher_prompt_length),
            )
