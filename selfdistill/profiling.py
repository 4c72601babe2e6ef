"""Look at it before you train: the verb `selfdistill profile`, beside the **trainer**.

It draws rollouts of the judge to be trained and shows where student and teacher differ, and what the positions that a
selector keeps have of the difference: in a few minutes, before hours of training on positions with nothing to learn.
"""

import logging
import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from nlhf.config import Presentation
from nlhf.errors import UserError
from nlhf.files import write_json, write_text
from nlhf.formats import get_format
from nlhf.generation import SamplingConfig
from nlhf.logs import setup_logging
from nlhf.manifest import build_manifest
from nlhf.models import ModelConfig, load_model, load_tokenizer, model_hash
from nlhf.pairs import Pair
from nlhf.runs import check_run, open_run
from nlhf.sampler import put_in_order
from nlhf.sources import DataConfig, load_pairs
from nlhf.training import require_verdicts
from selfdistill.contexts import Context, get_context, shuffle_critiques
from selfdistill.judged import Judged, summarize, write_judged
from selfdistill.profile import Profile
from selfdistill.settings import Objective, Selector, check_samples, masked_fraction
from selfdistill.teacher import slot_of
from selfdistill.views import SHOWN, divergence_figure, places_figure, tokens_page, words_csv, write_png

logger = logging.getLogger(__name__)

_OBJECTIVE = Objective()
_SAMPLING = SamplingConfig(max_new_tokens=8192, temperature=1.0)


def profile(
    model: ModelConfig,
    data: DataConfig,
    out: str,
    format: str = "sdrm",
    prompt_file: str | None = None,
    context: str = "rationale",
    shuffled: bool = False,
    feedback_after: str | None = None,
    feedback_before: str | None = None,
    teacher: ModelConfig | None = None,
    pairs: int = 64,
    samples: int = 4,
    sampling: SamplingConfig = _SAMPLING,
    max_teacher_prompt: int | None = None,
    order: Presentation = "random",
    objective: Objective = _OBJECTIVE,
    selector: Selector = "low_dh",
    rho: float = 0.7,
    shown: int = SHOWN,
    seed: int = 0,
) -> Profile:
    """Show where a judge differs from its teacher, and what the positions kept have of it. Nothing is trained.

    Prints the table of KL by dH and writes to ``out``: profile.json, profile.md, u_shape.png, positions.png, words.csv,
    positions.jsonl, judgements.jsonl and tokens.html.

    Args:
        model: The judge, as it would be trained: the student.
        data: The pairs; those without feedback are left out.
        out: Folder of the run; it must not hold a run yet.
        format: Judge format.
        prompt_file: Jinja template that replaces the format's own prompt.
        context: What the teacher is told: rationale, per_response_feedback, rubric, gold_verdict or sandbox_note.
        shuffled: Give each pair the critiques of another one: the control.
        feedback_after: Text of the prompt that the feedback follows, for a prompt of your own or a format without a
            place for it. The feedback calls the responses as the format's own prompt does; beside a prompt_file
            "Assistant A's response" and "Assistant B's response".
        feedback_before: Text of the prompt that it precedes; only one of both.
        teacher: Another model as the teacher; null is the judge itself, as at the start of training.
        pairs: How many pairs, chosen by the seed.
        samples: Rollouts of each pair.
        sampling: How they are drawn.
        max_teacher_prompt: Tokens of the teacher's prompt, whose feedback is shortened to fit; null is what the
            model's context leaves.
        order: random exchanges A and B by a seeded coin; both shows each pair in both orders; given as in the data.
        objective: The divergence.
        selector: Which positions are kept: low_dh, high_dh, abs_dh, student_entropy, teacher_entropy, kl, random.
        rho: The fraction of each rollout masked.
        shown: Judgements in tokens.html.
        seed: Of the choice and order of pairs and, unless data.seed is set, of loading them. That of the rollouts is
            sampling.seed.

    Raises:
        UserError: bad configuration or data, or a folder in use.
    """
    config = dict(locals())
    setup_logging()
    if pairs < 1 or shown < 0:
        raise UserError(f"pairs must be at least 1 and shown at least 0, got {pairs} and {shown}")
    if max_teacher_prompt is not None and max_teacher_prompt < 1:
        raise UserError(f"max_teacher_prompt must be at least 1, got {max_teacher_prompt}")
    check_samples(samples, sampling.temperature)
    masked_fraction(rho)
    check_run(out, config)
    judge_format = get_format(format, prompt_file)
    require_verdicts(judge_format, "format")
    slot, feedback = slot_of(judge_format, feedback_after, feedback_before), get_context(context, shuffled)
    drops: Counter = Counter()
    everything = load_pairs(data, drops, seed)
    chosen = choose_pairs(shuffle_critiques(everything, seed) if shuffled else everything, feedback, pairs, seed)

    from selfdistill.measure import measure

    tokenizer = load_tokenizer(model)
    if teacher and load_tokenizer(teacher).get_vocab() != tokenizer.get_vocab():
        raise UserError(
            f"teacher {teacher.name!r} has another vocabulary than model {model.name!r}: it cannot read the same "
            "tokens; choose a model of the same family, or leave out teacher"
        )
    student, counts = load_model(model), Counter()
    logger.info("drawing %d rollouts of each of %d pairs", samples, len(chosen))
    judged = measure(
        student,
        tokenizer,
        judge_format,
        put_in_order(chosen, order, seed),
        feedback,
        teacher=load_model(teacher) if teacher else None,
        slot=slot,
        samples=samples,
        sampling=sampling,
        max_teacher_prompt=max_teacher_prompt,
        objective=objective,
        selector=selector,
        rho=rho,
        seed=seed,
        counts=counts,
    )
    found = summarize(judged)
    folder = open_run(out, config)
    manifest = {
        "data": build_manifest(data, everything, drops).to_dict(),
        "pairs": len(chosen),
        "prompts": {reason: n for reason, n in counts.items() if n},
        "model_hash": model_hash(model.name, model.revision, model.trust_remote_code),
    }
    write_json(folder / "manifest.json", manifest)
    _write(folder, found, judged, f"{model.name}, {selector}, rho {rho:g}", shown)
    return found


def choose_pairs(pairs: Sequence[Pair], feedback: Context, n: int, seed: int) -> list[Pair]:
    """``n`` of the pairs that have feedback, by seed, in the data's order; all if there are fewer.

    Raises:
        UserError: none has.
    """
    able = [pair for pair in pairs if feedback(pair).strip()]
    if not able:
        raise UserError(
            f"none of the {len(pairs)} pairs has feedback for the teacher; set context to what the data have, or check "
            "field 'critiques' of the data and data.labelled_fraction"
        )
    picked = random.Random(f"profile/{seed}").sample(range(len(able)), min(n, len(able)))
    return [able[i] for i in sorted(picked)]


def _write(folder: Path, found: Profile, judged: Sequence[Judged], title: str, shown: int) -> None:
    write_judged(folder, judged)
    write_text(folder / "words.csv", words_csv(judged))
    write_text(folder / "tokens.html", tokens_page(judged, title, shown))
    write_png(divergence_figure(judged, found), folder / "u_shape.png")
    write_png(places_figure(found), folder / "positions.png")
    write_text(folder / "profile.md", to_markdown(found, title))
    write_json(folder / "profile.json", found.to_dict())
    report(found)
    print(f"token by token: {folder / 'tokens.html'}")


def report(found: Profile, show: Callable[[str], None] = print) -> None:
    """Show the table, and log the warning if there is reason for one."""
    show(found.table())
    if warning := found.warning():
        logger.warning(warning)


def to_markdown(found: Profile, title: str) -> str:
    """The table and the warning as markdown."""
    parts = [f"# {title}", f"```text\n{found.table()}\n```"]
    if warning := found.warning():
        parts.append(f"**Warning:** {warning}.")
    return "\n\n".join([*parts, "![KL by dH](u_shape.png)", "![KL by place](positions.png)"]) + "\n"
