"""The trainer of SDRM on the shipped 152-thousand-parameter judge: loss, divisor, prompts, teacher, warnings."""

import dataclasses
import inspect
import logging
import math
from types import SimpleNamespace

import pytest
import torch
from trl import DistillationTrainer
from trl.generation.vllm_generation import VLLMGeneration

from nlhf.errors import UserError
from nlhf.formats import get_format
from nlhf.models import ModelConfig, load_tokenizer
from nlhf.sources import DataConfig, load_pairs
from selfdistill.contexts import sandbox_note
from selfdistill.divergence import divergence
from selfdistill.loss import look
from selfdistill.prompts import Prompts
from selfdistill.selection import kept_count
from selfdistill.settings import SDRMSettings
from selfdistill.teacher import slot_of, teacher_messages
from selfdistill.train import make_trainer
from selfdistill.trainer import _figures, _sums
from selfdistill.watch import CollapseWatch

START = ModelConfig("package:nlhf")
FORMAT = get_format("sandbox")
PAIRS = load_pairs(DataConfig("sandbox", limit=8))
SETTINGS = {
    "learning_rate": 1e-3,
    "max_steps": 2,
    "per_device_train_batch_size": 8,
    "num_generations": 2,
    "max_prompt_length": 64,
    "max_teacher_prompt_length": 96,
    "max_completion_length": 26,
    "support_size": 6,
}


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(START)


def without_critiques(pair):
    return dataclasses.replace(pair, critiques=[])


@pytest.fixture
def make(tmp_path, tokenizer):
    """A trainer that stands before its first step."""

    def build(pairs=PAIRS, **changes):
        settings = SDRMSettings(**SETTINGS | changes)
        prompts = Prompts(pairs, FORMAT, sandbox_note, slot_of(FORMAT), settings, tokenizer)
        trainer = make_trainer(START, tokenizer, prompts, settings, tmp_path / "run", seed=3)
        trainer.model.train()
        trainer.accelerator.gradient_state._set_sync_gradients(True)
        return trainer

    return build


def draw(trainer, rows=(0, 0, 1, 1, 2, 2, 3, 3)):
    """A step's rollouts, ready for the loss."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return trainer._generate_and_score_completions([{"row": i} for i in rows])


def part(inputs, rows):
    """A micro-batch."""
    return {k: v[rows] if v.ndim else v for k, v in inputs.items()}


def gradient(trainer, *batches):
    """The loss of several micro-batches and the gradient of all parameters, added up."""
    trainer.model.zero_grad()
    losses = []
    for batch in batches:
        loss = trainer.compute_loss(trainer.model, batch)
        loss.backward()
        losses.append(loss.item())
    return sum(losses), torch.cat([p.grad.flatten() for p in trainer.model.parameters()])


def reference(trainer, inputs):
    """The loss of spec and paper with whole logits, position by position, in float64."""
    s = trainer.settings

    def logits(model, prompt):
        ids = torch.cat([inputs[f"{prompt}_ids"], inputs["completion_ids"]], 1)
        mask = torch.cat([inputs[f"{prompt}_mask"], inputs["completion_mask"]], 1)
        width = inputs["completion_ids"].shape[1]
        out = model(input_ids=ids, attention_mask=mask).logits[:, -width - 1 : -1].double()
        return (out / s.temperature).log_softmax(-1)

    ls = logits(trainer.model, "prompt")
    with torch.no_grad():
        lt = logits(trainer.teacher.model, "teacher_prompt")
    total, weight = 0.0, 0.0
    for b, n in enumerate(inputs["completion_mask"].sum(1).tolist()):
        if not inputs["feedback"][b]:
            continue
        p, q = ls[b, :n], lt[b, :n]
        dh = (-(p.exp() * p).sum(-1) + (q.exp() * q).sum(-1)).detach()
        kept = sorted(range(n), key=lambda t: (dh[t].item(), t))[: kept_count(n, s.rho)]
        if s.support == "teacher_topk":
            top = q.topk(s.support_size).indices

            def categories(x, top=top):
                tail = x.exp().scatter(-1, top, 0.0).sum(-1, keepdim=True).clamp(min=1e-7).log()
                return torch.cat([x.gather(-1, top), tail], -1)

            p, q = categories(p), categories(q)
        d = divergence(p, q, s.divergence, s.jsd_beta)[kept]
        total = total + (d.mean() if s.normalizer == "per_rollout" else d.sum())
        weight += 1 if s.normalizer == "per_rollout" else len(kept)
    return total / weight


# ------------------------------------------------------------------------------------------------------------ the loss


@pytest.mark.parametrize(
    "changes",
    [
        {"rho": 0.0},
        {"rho": 0.7},
        {"rho": 0.7, "normalizer": "per_rollout", "temperature": 1.5},
        {"rho": 0.5, "divergence": "forward"},
        {"rho": 0.5, "divergence": "jsd", "support": "full", "jsd_beta": 0.3},
        {"rho": 0.3, "support": "full", "teacher": "live"},
        {"rho": 0.3, "teacher": "frozen"},
    ],
    ids=lambda c: " ".join(map(str, c.values())),
)
def test_loss_and_gradient_are_those_of_whole_logits(make, changes):
    pairs = [without_critiques(p) if i == 1 else p for i, p in enumerate(PAIRS)]
    trainer = make(pairs, **changes)
    inputs = draw(trainer)
    loss, found = gradient(trainer, inputs)
    trainer.model.zero_grad()
    expected = reference(trainer, inputs)
    expected.backward()
    wanted = torch.cat([p.grad.flatten() for p in trainer.model.parameters()])
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    assert (found - wanted).norm() < 1e-4 * wanted.norm()
    assert loss > 0


@pytest.mark.parametrize("teacher", ["ema", "live", "frozen"])
def test_a_teacher_that_reads_the_same_prompt_is_the_student(make, teacher):
    trainer = make(teacher=teacher)
    inputs = draw(trainer)
    inputs["teacher_prompt_ids"], inputs["teacher_prompt_mask"] = inputs["prompt_ids"], inputs["prompt_mask"]
    _, positions = trainer._look(trainer.model, inputs)
    assert not positions.scores.divergence.any()
    assert not positions.scores.entropy_gap.any()
    loss, found = gradient(trainer, inputs)
    assert loss == 0
    assert found.abs().max() < 1e-6


def test_without_feedback_the_teachers_ids_are_those_that_trl_gives_the_student(make):
    trainer = make([without_critiques(p) if i < 2 else p for i, p in enumerate(PAIRS)])
    inputs = draw(trainer, rows=(0, 1, 2, 3))
    assert inputs["feedback"].tolist() == [False, False, True, True]
    for b in range(4):
        own, teachers = (inputs[f"{p}_ids"][b][inputs[f"{p}_mask"][b].bool()] for p in ("prompt", "teacher_prompt"))
        assert torch.equal(own, teachers) == (b < 2)
        text = trainer.processing_class.decode(teachers)
        assert ("note:" in text) == (b >= 2)
        assert text.replace(text[text.find(" note:") : text.find(" judge")], "") == trainer.processing_class.decode(own)


@pytest.mark.parametrize("normalizer", ["kept_tokens", "per_rollout"])
def test_the_loss_does_not_depend_on_how_a_step_is_cut_up(make, normalizer):
    trainer = make([without_critiques(p) if i == 1 else p for i, p in enumerate(PAIRS)], normalizer=normalizer)
    inputs = draw(trainer)
    lengths = inputs["completion_mask"].sum(1).tolist()
    kept = [kept_count(n, 0.7) * f for n, f in zip(lengths, inputs["feedback"].tolist(), strict=True)]
    assert inputs["num_items_in_batch"] == (sum(kept) if normalizer == "kept_tokens" else 6)
    whole_loss, whole = gradient(trainer, inputs)
    loss, found = gradient(trainer, *(part(inputs, [i]) for i in range(8)))  # rows 2 and 3 have no feedback
    assert loss == pytest.approx(whole_loss, rel=1e-5)
    assert (found - whole).norm() < 1e-4 * whole.norm()


@pytest.mark.parametrize("selector", ["low_dh", "kl", "random"])
def test_the_positions_chosen_do_not_depend_on_neighbours_or_padding(make, selector):
    trainer = make(selector=selector)
    inputs = draw(trainer)
    _, together = trainer._look(trainer.model, inputs)
    for i in range(8):
        alone = part(inputs, [i])
        n = int(alone["completion_mask"].sum())
        for name, value in (("completion_ids", 5), ("completion_mask", 0)):  # other padding, and more of it
            tail = torch.full((1, 3), value)
            alone[name] = torch.cat([alone[name][:, :n], tail.to(alone[name])], 1)
        _, positions = trainer._look(trainer.model, alone)
        assert positions.keep[0, :n].tolist() == together.keep[i, :n].tolist()
        assert positions.keep.sum() == together.keep[i].sum() == kept_count(n, 0.7)


def test_rows_without_feedback_give_no_loss(make):
    trainer = make()
    inputs = draw(trainer)
    inputs["feedback"][4:] = False
    inputs["num_items_in_batch"] = inputs["num_items_in_batch"] * 0 + 50
    loss, found = gradient(trainer, inputs)
    half_loss, half = gradient(trainer, part(inputs, slice(0, 4)))
    assert loss == pytest.approx(half_loss, rel=1e-6)
    assert torch.allclose(found, half, atol=1e-7)


def test_a_batch_without_any_feedback_is_a_finite_zero_on_the_graph(make):
    trainer = make()
    inputs = draw(trainer)
    inputs["feedback"][:] = False
    inputs["num_items_in_batch"] = torch.tensor(0)
    loss, found = gradient(trainer, inputs)
    assert loss == 0
    assert not found.any()
    assert all(p.grad is not None for p in trainer.model.parameters())


def test_the_mask_takes_the_lowest_entropy_gaps(make):
    trainer = make(rho=0.7)
    inputs = draw(trainer)
    _, positions = trainer._look(trainer.model, inputs)
    gap = torch.full(positions.mask.shape, math.nan).masked_scatter(positions.mask, positions.scores.entropy_gap)
    for row, keep, mask in zip(gap, positions.keep, positions.mask, strict=True):
        assert row[keep].max() <= row[mask & ~keep].min()


def test_random_draws_anew_at_each_step_and_alike_within_one(make):
    trainer = make(selector="random")
    inputs = draw(trainer)
    first, again = (trainer._look(trainer.model, inputs)[1].keep for _ in range(2))
    trainer.state.global_step = 1
    later = trainer._look(trainer.model, inputs)[1].keep
    assert torch.equal(first, again)
    assert not torch.equal(first, later)


# ------------------------------------------------------------------------------------------------- importance ratios


def vllm(trainer, shift):
    """A stand-in for trl's vLLM generation: tokens, and the student's log-probabilities less ``shift``."""
    inputs = draw(trainer)
    _, positions = trainer._look(trainer.model, inputs)
    grid = torch.zeros(positions.mask.shape).masked_scatter(positions.mask, positions.scores.token_log_probs)
    rows = [r[m].tolist() for r, m in zip(grid, positions.mask, strict=True)]
    ids = [r[m].tolist() for r, m in zip(inputs["completion_ids"], positions.mask, strict=True)]
    log_probs = [[[None if shift is None else x - shift] for x in row] for row in rows]
    fake = SimpleNamespace(logprobs=None, sync_weights=lambda: None, generate=lambda **_: (None, ids, log_probs, None))
    trainer.use_vllm, trainer.vllm_generation, trainer._last_loaded_step = True, fake, -1
    trainer._keep_log_probs()
    assert fake.logprobs == 0  # asks for the sampled token's
    return inputs


@pytest.mark.parametrize(
    ("shift", "factor"),
    [(0.0, 1.0), (math.log(1.5), 1.5), (math.log(8.0), 2.0), (-math.log(4.0), 0.25), (None, 1.0)],
    ids=["on policy", "ratio 1.5", "clipped at 2", "ratio 1/4 is not clipped", "unknown counts as 1"],
)
def test_vllms_probabilities_weight_the_loss(make, shift, factor):
    trainer = make()
    plain, _ = gradient(trainer, vllm(trainer, shift))
    inputs = draw(trainer)
    assert inputs["sampled_log_probs"].shape == inputs["completion_ids"].shape
    weighted, found = gradient(trainer, inputs)
    assert weighted == pytest.approx(factor * plain, rel=1e-4)
    assert torch.isfinite(found).all()


# ------------------------------------------------------------------------------------------------- prompts and order


def test_a_and_b_are_exchanged_in_odd_epochs_and_the_feedback_follows(make):
    trainer = make()
    even, odd = (trainer.prompts.get(0, exchanged) for exchanged in (False, True))
    assert odd.pair == even.pair.swap()
    words = even.teacher.feedback.split()
    flipped = [{"A": "B", "B": "A"}.get(word, word) for word in words]
    sides = [word for word in odd.teacher.feedback.split() if word in "AB"]
    assert sorted(sides) == sorted(word for word in flipped if word in "AB")
    for epoch, prompt in ((0.0, even), (0.9, even), (1.0, odd), (1.5, odd), (2.0, even)):
        trainer.state.epoch = epoch
        inputs = draw(trainer, rows=(0,))
        text = trainer.processing_class.decode(inputs["prompt_ids"][0])
        assert f"A: {prompt.pair.response_a} B:" in text
        assert inputs["teacher_prompt_ids"][0].tolist() == prompt.teacher.ids


def test_nothing_is_exchanged_when_told_so(make):
    trainer = make(exchange=False)
    trainer.state.epoch = 1.0
    text = trainer.processing_class.decode(draw(trainer, rows=(0,))["prompt_ids"][0])
    assert f"A: {trainer.prompts.pairs[0].response_a} B:" in text


def test_every_epoch_shows_every_pair_n_times_in_an_order_of_its_own(make):
    trainer = make(gradient_accumulation_steps=2, per_device_train_batch_size=4)
    sampler = trainer._get_train_sampler()
    orders = []
    for epoch in (0.0, 1.0):
        trainer.state.epoch = epoch
        rows = list(sampler)
        assert len(rows) == len(sampler) == 8 * 2 * 2  # each step's prompts are asked for at each accumulation
        for step in range(2):
            first, second = rows[16 * step :][:8], rows[16 * step :][8:16]
            assert first == second
            assert first[::2] == first[1::2]
        orders.append(list(dict.fromkeys(rows)))
    assert all(sorted(order) == list(range(8)) for order in orders)
    assert orders[0] != orders[1]
    trainer.state.epoch = 1.5  # as a checkpoint inside the second epoch says
    assert list(dict.fromkeys(sampler)) == orders[1]


def lengths_of(tokenizer, **limits):
    settings = SDRMSettings(**SETTINGS | limits)
    return Prompts(PAIRS, FORMAT, sandbox_note, slot_of(FORMAT), settings, tokenizer)


def test_a_teachers_prompt_that_is_too_long_loses_feedback_alone(tokenizer):
    whole = lengths_of(tokenizer)
    longest = max(len(whole.get(i).teacher.ids) for i in range(8))
    short = lengths_of(tokenizer, max_teacher_prompt_length=longest - 2)
    assert len(short) == 8
    assert short.counts["feedback shortened"] >= 1
    for i in range(8):
        before, after = whole.get(i).teacher, short.get(i).teacher
        assert len(after.ids) <= longest - 2
        assert before.feedback.startswith(after.feedback)
        assert tokenizer.decode(after.ids).split("note:")[0] == tokenizer.decode(before.ids).split("note:")[0]
        assert "judge" in tokenizer.decode(after.ids)


def test_a_prompt_that_is_too_long_even_without_feedback_is_left_out_and_counted(tokenizer, caplog):
    exchange = lengths_of(tokenizer)
    bare = [len(tokenizer(exchange.get(i).messages[0]["content"])["input_ids"]) for i in range(8)]
    template = len(exchange.get(0).teacher.ids) - len(
        tokenizer(teacher_messages(FORMAT, PAIRS[0], sandbox_note(PAIRS[0]))[0]["content"])["input_ids"]
    )
    limit = max(bare) + template - 1
    prompts = lengths_of(tokenizer, max_teacher_prompt_length=limit)
    assert 0 < len(prompts) == sum(n + template <= limit for n in bare) < 8
    assert prompts.counts["prompt too long"] == 8 - len(prompts)
    assert f"left out {8 - len(prompts)} of 8 pairs" in caplog.text
    with pytest.raises(UserError, match=r"sdrm\.max_prompt_length = 2 "):
        lengths_of(tokenizer, max_prompt_length=2)


def test_nothing_to_tell_the_teacher_is_refused(tokenizer):
    pairs = [without_critiques(p) for p in PAIRS]
    with pytest.raises(UserError, match="none of the 8 training pairs has feedback"):
        Prompts(pairs, FORMAT, sandbox_note, slot_of(FORMAT), SDRMSettings(**SETTINGS), tokenizer)


def test_chat_template_variables_reach_both_prompts(make):
    trainer = make(extra={"chat_template_kwargs": {"enable_thinking": False}})
    assert trainer.chat_template_kwargs == trainer.prompts.variables == {"enable_thinking": False}


# ------------------------------------------------------------------------------------------------------- the teacher


def test_the_teacher_gets_no_gradient_and_follows_each_step(make):
    trainer = make(teacher_rate=0.25)
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    gradient(trainer, draw(trainer))
    teacher = dict(trainer.teacher.model.named_parameters())
    assert all(p.grad is None and not p.requires_grad for p in teacher.values())
    trainer.model.zero_grad()
    trainer.args.max_steps = 1
    trainer.train()
    moved = 0
    for name, after in trainer.model.named_parameters():
        expected = before[name] + 0.25 * (after.detach() - before[name])
        assert torch.allclose(teacher[name], expected, atol=1e-7)
        moved += not torch.equal(after.detach(), before[name])
    assert moved == len(before)
    assert trainer.teacher.updates == 1


def test_an_adapters_teacher_is_a_model_of_its_own(tokenizer, tmp_path):
    from peft import LoraConfig, get_peft_model
    from trl import DistillationConfig

    from nlhf.models import load_model
    from selfdistill.trainer import SDRMTrainer

    settings = SDRMSettings(**SETTINGS, teacher_rate=0.5)
    prompts = Prompts(PAIRS, FORMAT, sandbox_note, slot_of(FORMAT), settings, tokenizer)
    config = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(load_model(START, "cpu"), config)
    args = DistillationConfig(
        str(tmp_path), per_device_train_batch_size=8, max_steps=2, learning_rate=1e-2, max_completion_length=26,
        use_cpu=True, bf16=False, report_to="none", save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = SDRMTrainer(model, prompts, settings, args, tokenizer)
    assert not hasattr(trainer.teacher.model, "peft_config")
    start = {n: p.detach().clone() for n, p in trainer.teacher.model.named_parameters()}
    trainer.train()
    changed = {n for n, p in trainer.teacher.model.named_parameters() if not torch.equal(p, start[n])}
    assert changed == {n for n in start if "q_proj.weight" in n or "down_proj.weight" in n}


# ------------------------------------------------------------------------------------------------ figures and warnings


def test_figures_are_means_over_the_positions_with_feedback(make):
    trainer = make()
    inputs = draw(trainer)
    inputs["feedback"][2:] = False
    _, positions = trainer._look(trainer.model, inputs)
    figures = _figures(*_sums(positions, inputs["feedback"]).tolist())
    n = int(positions.mask[:2].sum())
    kl, h_t = positions.scores.divergence[:n], positions.scores.teacher_entropy[:n]
    kept = positions.keep[positions.mask][:n]
    assert figures["kl"] == pytest.approx(kl.mean().item(), rel=1e-5)
    assert figures["teacher_entropy"] == pytest.approx(h_t.mean().item(), rel=1e-5)
    assert figures["entropy_gap"] == pytest.approx(positions.scores.entropy_gap[:n].mean().item(), rel=1e-4)
    assert figures["kept/share"] == pytest.approx(kept.sum().item() / n)
    assert figures["kept/kl_share"] == pytest.approx((kl[kept].sum() / kl.sum()).item(), rel=1e-4, abs=1e-9)
    assert _figures(0, 0, 0, 0, 0, 0) == {}


def warned(rows, caplog, patience=25):
    watch, history = CollapseWatch(patience), []
    caplog.clear()
    for row in rows:
        history.append(row)
        state = SimpleNamespace(global_step=len(history), is_world_process_zero=True, log_history=history)
        with caplog.at_level(logging.WARNING):
            watch.on_log(None, state, None, logs=row)
    return [record.getMessage() for record in caplog.records]


GOOD = {"entropy": 0.5, "completions/mean_length": 100.0, "verdict_rate": 0.9, "format_rate": 0.9}


@pytest.mark.parametrize(
    ("bad", "part"),
    [
        ({"entropy": 0.05}, "the entropy of the replies is 0.05, 0.5 in the first steps"),
        ({"entropy": 3.0}, "the entropy of the replies is 3, 0.5 in the first steps"),
        ({"completions/mean_length": 30.0}, "the length of the replies is 30, 100 in the first steps"),
        ({"completions/mean_length": 300.0}, "the length of the replies is 300"),
        ({"verdict_rate": 0.5}, "the share of replies with a verdict is 0.5, 0.9 in the first steps"),
        ({"format_rate": 0.3}, "lower the learning rate or sdrm.teacher_rate"),
        ({"completions/clipped_ratio": 0.5}, "raise sdrm.max_completion_length"),
    ],
)
def test_a_collapse_is_noticed_and_said_now_and_then(caplog, bad, part):
    assert warned([GOOD] * 40, caplog) == []
    messages = warned([GOOD] * 5 + [GOOD | bad] * 60, caplog)
    assert len(messages) == 3
    assert all(part in message for message in messages)


def test_a_judge_that_was_bad_from_the_start_has_not_collapsed(caplog):
    assert warned([GOOD | {"verdict_rate": 0.1, "entropy": 0.01}] * 30, caplog) == []


# ----------------------------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rho": 1.0}, r"must lie in \[0, 1\)"),
        ({"num_generations": 0}, "sdrm.num_generations must be at least 1"),
        ({"temperature": 0.0}, "sdrm.temperature must be positive"),
        ({"teacher_rate": 0.0}, r"sdrm.teacher_rate must lie in \(0, 1\]"),
        ({"support_size": 0, "ratio_clip": 0.0}, "sdrm.support_size must be at least 1, got 0; sdrm.ratio_clip"),
        ({"jsd_beta": 1.0}, "its ends are the divergences forward and reverse"),
        ({"extra": {"beta": 0.5}}, "set sdrm.divergence and sdrm.jsd_beta"),
        ({"extra": {"shuffle_dataset": False}}, "'shuffle_dataset' does nothing here"),
    ],
)
def test_settings_out_of_range(changes, message):
    with pytest.raises(UserError, match=message):
        SDRMSettings(**changes)


def test_rollouts_that_do_not_divide_name_what_would():
    settings = SDRMSettings(**SETTINGS | {"num_generations": 3})
    with pytest.raises(
        UserError, match=r"set num_generations to one of \[1, 2, 4, 8\], or gradient_acc.*multiple of 3"
    ):
        settings.check_batch(1, "random", 8)


def test_trl_still_has_what_we_rely_on():
    def parameters(function):
        return list(inspect.signature(function).parameters)

    trainer = DistillationTrainer
    assert parameters(trainer._generate_and_score_completions) == ["self", "inputs"]
    assert parameters(trainer._get_train_sampler) == ["self", "dataset"]
    assert parameters(trainer._compute_loss) == ["self", "unwrapped_student", "inputs", "num_items_in_batch"]
    assert parameters(trainer._get_last_hidden_state)[:5] == [
        "self", "unwrapped_model", "input_ids", "attention_mask", "logits_to_keep",
    ]  # fmt: skip
    assert parameters(trainer.compute_loss) == ["self", "model", "inputs", "return_outputs", "num_items_in_batch"]
    assert trainer.loss_is_scaled_for_ga is True
    source = inspect.getsource(trainer)
    assert "_, completion_ids, _, _ = self.vllm_generation.generate(" in source
    assert "logprobs" in inspect.signature(VLLMGeneration.__init__).parameters


def test_look_is_pure(make):
    """The same on the states of a batch whoever asks, and nothing in it hangs on the graph."""
    trainer = make()
    inputs = draw(trainer)
    student = trainer._states(trainer.model, inputs, "prompt")
    with torch.no_grad():
        teacher = trainer._states(trainer.teacher.model, inputs, "teacher_prompt")
    positions = look(student, teacher, inputs["completion_ids"], inputs["completion_mask"], trainer.settings)
    assert student.hidden.requires_grad
    assert not positions.scores.divergence.requires_grad
    assert not positions.scores.teacher.log_probs.requires_grad
