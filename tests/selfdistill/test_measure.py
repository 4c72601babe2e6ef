"""What is measured is what a plain computation over full logits gives, whatever the batch."""

from collections import Counter

import numpy as np
import pytest
import torch

from nlhf.errors import UserError
from nlhf.formats import get_format
from nlhf.generation import SamplingConfig
from nlhf.models import ModelConfig, load_model, load_tokenizer, render_chat
from nlhf.pairs import HumanCritique
from nlhf.sources import DataConfig, load_pairs
from selfdistill.contexts import get_context
from selfdistill.judged import read_judged, summarize, write_judged
from selfdistill.measure import measure, token_texts
from selfdistill.settings import Objective
from selfdistill.teacher import teacher_messages

NOTE = get_context("sandbox_note")
FULL = Objective(support="full")


@pytest.fixture(scope="module")
def sandbox():
    config = ModelConfig("package:nlhf")
    return load_model(config), load_tokenizer(config)


@pytest.fixture(scope="module")
def pairs():
    return load_pairs(DataConfig("sandbox", limit=5), seed=1)


def look(sandbox, pairs, batch_size=64, temperature=1.0, samples=2, **options):
    sampling = SamplingConfig(max_new_tokens=26, temperature=temperature, batch_size=batch_size)
    options = {"rho": 0.7, "sampling": sampling, "samples": samples, **options}
    return measure(*sandbox, get_format("sandbox"), pairs, NOTE, **options)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_are_those_of_full_logits(sandbox, pairs, temperature):
    model, tokenizer = sandbox
    judge_format = get_format("sandbox")
    judged = look(sandbox, pairs, temperature=temperature, objective=FULL)
    assert [(j.pair.id, j.sample) for j in judged] == [(p.id, k) for p in pairs for k in range(2)]
    for j in judged:
        read = []
        for messages in (judge_format.render(j.pair), teacher_messages(judge_format, j.pair, NOTE(j.pair))):
            prompt = render_chat(tokenizer, messages)
            with torch.no_grad():
                logits = model(torch.tensor([[*prompt, *j.ids]])).logits[0, len(prompt) - 1 : -1].double()
            read.append((logits / temperature).log_softmax(-1))
        student, teacher = read
        expected = {
            "student_entropy": -(student.exp() * student).sum(-1),
            "teacher_entropy": -(teacher.exp() * teacher).sum(-1),
            "kl": (student.exp() * (student - teacher)).sum(-1),
        }
        for name, values in expected.items():
            np.testing.assert_allclose(getattr(j, name), values.numpy(), rtol=1e-4, atol=2e-5, err_msg=name)


def test_batches_do_not_matter(sandbox, pairs):
    together, alone = look(sandbox, pairs), look(sandbox, pairs, batch_size=1)
    for a, b in zip(together, alone, strict=True):
        assert (a.pair, a.sample, a.ids, a.tokens, a.verdict) == (b.pair, b.sample, b.ids, b.tokens, b.verdict)
        np.testing.assert_allclose(a.kl, b.kl, atol=1e-4)
        np.testing.assert_allclose(a.dh, b.dh, atol=1e-4)


def test_the_end_of_the_turn_is_a_position(sandbox, pairs):
    _, tokenizer = sandbox
    whole = look(sandbox, pairs)
    assert all(j.ids[-1] == tokenizer.eos_token_id for j in whole if not j.verdict.truncated)
    cut = look(sandbox, pairs, sampling=SamplingConfig(max_new_tokens=4, temperature=1.0))
    assert all(len(j.ids) == 4 and j.verdict.truncated and tokenizer.eos_token_id not in j.ids for j in cut)


def test_a_share_of_each_rollout_is_kept(sandbox, pairs):
    for j in look(sandbox, pairs, rho=0.7):
        assert j.kept.sum() == len(j.ids) - 7 * len(j.ids) // 10
        assert j.dh[j.kept].max() <= j.dh[~j.kept].min()
    assert all(j.kept.all() for j in look(sandbox, pairs, rho=0))
    for j in look(sandbox, pairs, selector="kl"):
        assert j.kl[j.kept].min() >= j.kl[~j.kept].max()


def test_a_teacher_of_its_own(sandbox, pairs):
    """A teacher whose head is zero knows nothing: its entropy is that of the uniform distribution."""
    config = ModelConfig("package:nlhf")
    blank = load_model(config)
    with torch.no_grad():
        blank.get_output_embeddings().weight.zero_()
    vocabulary = blank.get_output_embeddings().weight.shape[0]
    for j in look(sandbox, pairs, teacher=blank):
        np.testing.assert_allclose(j.teacher_entropy, np.log(vocabulary), rtol=1e-5)


def test_adapters_take_part(sandbox, pairs):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    adapted = get_peft_model(load_model(ModelConfig("package:nlhf")), config).eval()
    merged = get_peft_model(load_model(ModelConfig("package:nlhf")), config)
    merged.load_state_dict(adapted.state_dict())
    a = look((adapted, sandbox[1]), pairs)
    b = look((merged.merge_and_unload().eval(), sandbox[1]), pairs)
    for x, y in zip(a, b, strict=True):
        assert x.ids == y.ids
        np.testing.assert_allclose(x.kl, y.kl, atol=1e-4)


def test_pairs_without_feedback_are_left_out_and_counted(sandbox, pairs):
    from dataclasses import replace

    mute = [replace(pairs[0], critiques=[]), replace(pairs[1], critiques=[HumanCritique()]), *pairs[2:]]
    counts = Counter()
    judged = look(sandbox, mute, counts=counts)
    assert {j.pair.id for j in judged} == {p.id for p in pairs[2:]}
    assert counts["without feedback"] == 2
    with pytest.raises(UserError, match=r"none of the 2 pairs has feedback that fits.*2 x without feedback"):
        look(sandbox, mute[:2])


def test_feedback_is_shortened_and_nothing_else(sandbox, pairs):
    _, tokenizer = sandbox
    judge_format = get_format("sandbox")
    limit = max(len(render_chat(tokenizer, judge_format.render(p))) for p in pairs) + 4
    for j in look(sandbox, pairs, max_teacher_prompt=limit):
        assert j.feedback
        assert NOTE(j.pair).startswith(j.feedback)
    with pytest.raises(UserError, match="prompt too long"):
        look(sandbox, pairs, max_teacher_prompt=5)


def test_the_model_is_left_as_it_was(pairs):
    config = ModelConfig("package:nlhf")
    model = load_model(config).train()
    look((model, load_tokenizer(config)), pairs)
    assert model.training
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"samples": 0}, "samples must lie between 1 and"),
        ({"samples": 2, "temperature": 0.0}, "would repeat one reply"),
        ({"rho": 1.0}, "must lie in"),
        ({"selector": "lowdh"}, "unknown selector"),
    ],
    ids=["no_samples", "greedy", "rho", "selector"],
)
def test_settings_out_of_range(sandbox, pairs, options, message):
    with pytest.raises(UserError, match=message):
        look(sandbox, pairs, **options)


def test_files_hold_what_was_measured(sandbox, pairs, tmp_path):
    judged = look(sandbox, pairs)
    write_judged(tmp_path, judged)
    for a, b in zip(judged, read_judged(tmp_path), strict=True):
        assert (a.pair, a.sample, a.feedback, a.verdict.label) == (b.pair, b.sample, b.feedback, b.verdict.label)
        assert (a.ids, a.tokens) == (b.ids, b.tokens)
        for name in ("kl", "student_entropy", "teacher_entropy", "kept"):
            np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
    assert summarize(read_judged(tmp_path)) == summarize(judged)

    lines = (tmp_path / "positions.jsonl").read_text(encoding="utf-8").splitlines()
    (tmp_path / "positions.jsonl").write_text("\n".join(lines[:-1]), encoding="utf-8")
    with pytest.raises(UserError, match=r"judgements.jsonl:10: \d+ positions expected"):
        read_judged(tmp_path)


# --- texts of tokens


TEXTS = ["The dose is right.", "naïve 你好 שלום 🙂🇫🇷", "a\n\n  b\t", "<b>&amp;</b>", "�x", ""]


@pytest.mark.parametrize("text", TEXTS)
def test_texts_of_byte_level_tokens_join_to_the_reply(tiny_model, text):
    tokenizer = load_tokenizer(ModelConfig(tiny_model))
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    texts = token_texts(tokenizer, ids)
    assert len(texts) == len(ids)
    assert "".join(texts) == tokenizer.decode(ids, clean_up_tokenization_spaces=False)


def test_texts_of_words_keep_the_blanks_between(sandbox):
    _, tokenizer = sandbox
    ids = tokenizer("<critics> B praise: tone </critics>")["input_ids"] + [tokenizer.eos_token_id]
    assert token_texts(tokenizer, ids) == ["<critics>", " B", " praise:", " tone", " </critics>", " <eos>"]


def test_a_character_cut_off_by_the_limit_is_still_there(tiny_model):
    tokenizer = load_tokenizer(ModelConfig(tiny_model))
    ids = tokenizer("ok 你", add_special_tokens=False)["input_ids"]
    assert len(ids) > 4, "a byte-level tokenizer"
    texts = token_texts(tokenizer, ids[:-1])
    assert "".join(texts) == tokenizer.decode(ids[:-1], clean_up_tokenization_spaces=False)
