import hashlib
import math
import random

import pytest
import torch

from nlhf.errors import UserError
from nlhf.generation import GumbelNoise, SamplingConfig, TransformersGenerator, _mix
from nlhf.generation.prefill import common_length
from nlhf.models import ModelConfig, load_model, load_tokenizer, render_chat


@pytest.fixture(scope="module")
def model(tiny_model):
    return load_model(ModelConfig(tiny_model), device="cpu")


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    return load_tokenizer(ModelConfig(tiny_model))


@pytest.fixture
def generator(model, tokenizer):
    def build(**options):
        return TransformersGenerator(model, tokenizer, SamplingConfig(**{"max_new_tokens": 12, **options}))

    return build


def chat(text):
    return [{"role": "user", "content": text}]


PROMPTS = [chat(text) for text in ("a", "bb" * 20, "第二个", "ccc" * 9, "d" * 31, "e f g", "h" * 3)]


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.8, "top_k": 50}])
@pytest.mark.parametrize("samples", [1, 3])
def test_replies_do_not_depend_on_the_batch(generator, options, samples):
    expected = generator(batch_size=1, **options).generate(PROMPTS, samples)
    assert generator(batch_size=7, **options).generate(PROMPTS, samples) == expected
    assert generator(batch_size=64, **options).generate(PROMPTS, samples) == expected
    order = random.Random(3).sample(range(len(PROMPTS)), len(PROMPTS))
    shuffled = generator(batch_size=4, **options).generate([PROMPTS[i] for i in order], samples)
    assert shuffled == [expected[i] for i in order]
    assert generator(**options).generate(PROMPTS[2:3], samples) == expected[2:3]


def test_first_samples_do_not_depend_on_their_number(generator):
    three = generator(temperature=1.0).generate(PROMPTS, samples=3)
    assert generator(temperature=1.0).generate(PROMPTS, samples=1) == [group[:1] for group in three]


def test_samples_and_seeds_differ_and_greedy_ones_do_not(generator):
    sampled = generator(temperature=1.0).generate(PROMPTS, samples=3)
    assert all(len({r.text for r in group}) == 3 for group in sampled)
    other = generator(temperature=1.0, seed=1).generate(PROMPTS, samples=3)
    assert all(a != b for a, b in zip(sampled, other, strict=True))
    greedy = generator().generate(PROMPTS, samples=3)
    assert all(group == [group[0]] * 3 for group in greedy)
    assert greedy == generator(seed=1).generate(PROMPTS, samples=3)


def test_equal_prompts_get_equal_replies(generator):
    first, second = generator(temperature=1.0).generate([PROMPTS[0], PROMPTS[0]])
    assert first == second


def test_greedy_is_what_step_by_step_argmax_gives(generator, model, tokenizer):
    [[reply]] = generator().generate([PROMPTS[1]])
    ids = render_chat(tokenizer, PROMPTS[1])
    start = len(ids)
    with torch.no_grad():
        for _ in range(12):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    assert reply.text == tokenizer.decode(ids[start:], skip_special_tokens=True)


def test_sampling_at_a_tiny_temperature_is_greedy(generator):
    assert generator(temperature=1e-5).generate(PROMPTS) == generator().generate(PROMPTS)
    assert generator(temperature=1.0, top_k=1).generate(PROMPTS) == generator().generate(PROMPTS)


@pytest.mark.parametrize("stops", ["tokenizer", "generation_config"])
def test_reply_ends_before_the_stop_token_and_says_whether_it_was_cut(generator, model, tiny_model, stops, monkeypatch):
    """A token of the greedy reply is declared to end the turn, by the tokenizer or by the model."""
    [[whole]] = generator().generate([PROMPTS[0]])
    assert (whole.truncated, whole.tokens, len(whole.ids)) == (True, 12, 12)
    tokenizer = load_tokenizer(ModelConfig(tiny_model))
    ids = render_chat(tokenizer, PROMPTS[0])
    start = len(ids)
    with torch.no_grad():
        for _ in range(12):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    reply_ids = ids[start:]
    stop = next(t for t in reply_ids[1:] if t != reply_ids[0])
    end = reply_ids.index(stop)
    if stops == "tokenizer":
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(stop)
    else:
        monkeypatch.setattr(model.generation_config, "eos_token_id", [258, stop])
    ending = TransformersGenerator(model, tokenizer, SamplingConfig(max_new_tokens=12))
    [reply], *_ = ending.generate(PROMPTS)
    assert (reply.truncated, reply.tokens) == (False, end)
    assert reply.text == tokenizer.decode(reply_ids[:end])
    assert reply.ids == (*reply_ids[:end], stop)  # with the token that ended it


def test_reply_that_ends_on_its_last_token_is_not_truncated(generator, model, tokenizer, monkeypatch):
    first = int(model(torch.tensor([render_chat(tokenizer, PROMPTS[0])])).logits[0, -1].argmax())
    monkeypatch.setattr(model.generation_config, "eos_token_id", first)
    [[reply]] = generator(max_new_tokens=1).generate([PROMPTS[0]])
    assert (reply.text, reply.truncated, reply.tokens) == ("", False, 0)


def test_long_prompts_are_counted_and_refused_never_cut(generator):
    lengths = sorted(len(render_chat(generator().tokenizer, p)) for p in PROMPTS)
    generator(max_prompt_tokens=lengths[-1]).generate(PROMPTS)
    with pytest.raises(UserError, match=rf"2 of 7 prompts .*sampling.max_prompt_tokens.*has {lengths[-1]}"):
        generator(max_prompt_tokens=lengths[-3]).generate(PROMPTS)


def test_context_window_counts_prompt_and_reply(generator, model, monkeypatch):
    monkeypatch.setattr(model.config, "max_position_embeddings", 60)
    with pytest.raises(UserError, match=r"context of 60 less sampling\.max_new_tokens, 12"):
        generator().generate(PROMPTS)


@pytest.fixture
def early_ends(model, monkeypatch):
    """Every eighth token ends a reply, so that sampled replies end at all lengths."""
    monkeypatch.setattr(model.generation_config, "eos_token_id", list(range(0, 256, 8)))


@pytest.fixture
def shapes(model):
    """[rows, tokens] of everything that the model reads."""
    read = []
    hook = model.register_forward_pre_hook(
        lambda module, args, kwargs: read.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    yield read
    hook.remove()


def test_replies_that_end_early_leave_the_batch_and_the_others_as_they_are(generator, early_ends):
    options = {"temperature": 1.0, "max_new_tokens": 45}
    expected = generator(batch_size=1, **options).generate(PROMPTS, 4)
    lengths = {reply.tokens for group in expected for reply in group}
    assert min(lengths) < 5
    assert max(lengths) > 20  # beyond a chunk
    assert any(reply.truncated for group in expected for reply in group) == (45 in lengths)
    for batch_size in (7, 64):
        assert generator(batch_size=batch_size, **options).generate(PROMPTS, 4) == expected


def test_long_greedy_replies_are_what_step_by_step_argmax_gives(generator, model, tokenizer):
    """More than two chunks; a chunk must go on exactly where the one before stopped."""
    replies = generator(max_new_tokens=35).generate(PROMPTS[:3])
    for prompt, [reply] in zip(PROMPTS, replies, strict=False):
        ids = render_chat(tokenizer, prompt)
        start = len(ids)
        with torch.no_grad():
            for _ in range(35):
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        assert reply.text == tokenizer.decode(ids[start:], skip_special_tokens=True)


def test_ended_replies_are_not_computed_on(generator, early_ends, shapes):
    generator(temperature=1.0, max_new_tokens=45, batch_size=64).generate(PROMPTS, 4)
    rows = [rows for rows, tokens in shapes if tokens == 1]
    assert rows[0] == 28
    assert rows == sorted(rows, reverse=True)
    assert rows[-1] < 14


def test_k_votes_read_their_prompt_once_and_all_prompts_their_common_beginning(generator, tokenizer, shapes):
    """Two prompts, four votes each: beginning, the rest less the last token, then one token a row and step."""
    lengths = [len(render_chat(tokenizer, prompt)) for prompt in PROMPTS[:2]]
    shared = common_length([render_chat(tokenizer, prompt) for prompt in PROMPTS[:2]])
    assert shared > 5
    generator(temperature=1.0, max_new_tokens=3).generate(PROMPTS[:2], samples=4)
    assert shapes == [(1, shared), (2, max(lengths) - shared - 1), (8, 1), (8, 1), (8, 1)]


def test_one_prompt_is_read_once_for_all_its_votes(generator, tokenizer, shapes):
    length = len(render_chat(tokenizer, PROMPTS[1]))
    generator(temperature=1.0, max_new_tokens=2).generate([PROMPTS[1]], samples=4)
    assert shapes == [(1, length - 1), (4, 1), (4, 1)]


def test_progress_counts_each_prompt_once(generator):
    calls = []
    generator(batch_size=4, temperature=1.0).generate(PROMPTS, samples=3, progress=calls.append)
    assert sum(calls) == len(PROMPTS)
    assert len(calls) > 1
    assert 0 not in calls


def test_no_prompts_no_replies(generator):
    assert generator().generate([]) == []


def test_no_side_effects_on_randomness_mode_and_defaults(generator, model):
    state, defaults = torch.get_rng_state(), model.generation_config
    model.train()
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            first = generator(temperature=1.0).generate(PROMPTS, samples=2)
            torch.manual_seed(2)
            before = torch.get_rng_state()
            assert generator(temperature=1.0).generate(PROMPTS, samples=2) == first
            assert torch.equal(before, torch.get_rng_state())
        assert model.training
        assert model.generation_config is defaults
        with pytest.raises(ZeroDivisionError):
            generator().generate(PROMPTS, progress=lambda n: 1 / 0)
        assert model.training
        assert model.generation_config is defaults
    finally:
        model.eval()
    assert torch.equal(state, torch.get_rng_state())


def test_defaults_of_the_checkpoint_do_not_leak_in(generator, model, monkeypatch):
    expected = generator().generate(PROMPTS)
    for name, value in {"repetition_penalty": 3.0, "min_new_tokens": 3, "suppress_tokens": [0, 15], "top_k": 2}.items():
        monkeypatch.setattr(model.generation_config, name, value)
    assert generator().generate(PROMPTS) == expected


def test_adapter_generates_and_leaves_its_base_as_it_was(generator, tiny_model, tokenizer):
    from peft import LoraConfig, get_peft_model

    base = load_model(ModelConfig(tiny_model), device="cpu")
    base.generation_config.repetition_penalty = 3.0
    defaults = base.generation_config
    wrapped = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]))
    replies = TransformersGenerator(wrapped, tokenizer, SamplingConfig(max_new_tokens=12)).generate(PROMPTS)
    assert replies == generator().generate(PROMPTS)  # a fresh adapter changes nothing
    assert base.generation_config is defaults
    assert wrapped.generation_config is defaults


def test_model_can_be_trained_after_generating(generator, model, tokenizer):
    generator(temperature=1.0).generate(PROMPTS, samples=2)
    ids = torch.tensor([render_chat(tokenizer, PROMPTS[0])])
    model(ids, labels=ids).loss.backward()
    assert all(p.grad is not None for p in model.parameters())
    model.zero_grad()


def test_tokenizer_that_does_not_fit_is_refused(model, tiny_model):
    tokenizer = load_tokenizer(ModelConfig(tiny_model))
    tokenizer.add_tokens(["<extra>"])
    with pytest.raises(UserError, match="<extra>"):
        TransformersGenerator(model, tokenizer)


def test_no_token_that_ends_a_turn_is_refused(model, tiny_model, monkeypatch):
    tokenizer = load_tokenizer(ModelConfig(tiny_model))
    tokenizer.eos_token = None
    monkeypatch.setattr(model.generation_config, "eos_token_id", None)
    with pytest.raises(UserError, match="ends a turn"):
        TransformersGenerator(model, tokenizer)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"batch_size": 0}, "batch_size"),
        ({"max_prompt_tokens": 0}, "max_prompt_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -1}, "top_k"),
    ],
)
def test_bad_sampling_names_the_field(options, name):
    with pytest.raises(UserError, match=f"sampling.{name}"):
        SamplingConfig(**options)


def test_several_mistakes_are_told_at_once():
    with pytest.raises(UserError, match=r"batch_size.*top_p"):
        SamplingConfig(batch_size=0, top_p=2)


def test_samples_must_be_positive(generator):
    with pytest.raises(UserError, match="samples"):
        generator().generate(PROMPTS, samples=0)


def test_mix_is_splitmix64():
    """The generator's published outputs for seed 1234567, and a second implementation on unbounded integers."""

    def reference(z):
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        return z ^ (z >> 31)

    states = [(1234567 + n * 0x9E3779B97F4A7C15) % 2**64 for n in range(1, 6)]
    outputs = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    assert [reference(z) for z in states] == outputs
    signed = torch.tensor([z - 2**64 if z >= 2**63 else z for z in states])
    assert [int(z) % 2**64 for z in _mix(signed)] == outputs


def draws(logits, rows=20000):
    keys = [int.from_bytes(hashlib.sha256(str(k).encode()).digest()[:8], "little", signed=True) for k in range(rows)]
    noise = GumbelNoise(keys, width=5)
    scores = torch.tensor(logits).expand(rows, -1)
    return noise(torch.zeros(rows, 7, dtype=torch.long), scores).argmax(-1)


def test_frequencies_are_the_softmax():
    """20,000 rows: the standard error of a frequency is at most 0.0036, the tolerance four of them."""
    logits = [0.0, 1.0, -1.0, 2.0, -math.inf]
    counts = torch.bincount(draws(logits), minlength=5) / 20000
    torch.testing.assert_close(counts, torch.tensor(logits).softmax(-1), atol=0.015, rtol=0)
    assert counts[-1] == 0


def test_noise_is_finite_and_standard_gumbel():
    """Mean 0.5772 and variance pi^2 / 6 = 1.645, over a million draws."""
    noise = GumbelNoise([0, -1, 2**63 - 1, -(2**63)], width=1)(torch.zeros(4, 1), torch.zeros(4, 250_000))
    assert noise.isfinite().all()
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.006)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=0.02)


def test_noise_moves_with_the_position_and_not_with_the_padding():
    keys, scores = [11], torch.zeros(1, 300)
    at = {n: GumbelNoise(keys, width=4)(torch.zeros(1, 4 + n), scores) for n in (0, 1)}
    assert not torch.equal(at[0], at[1])
    assert torch.equal(at[1], GumbelNoise(keys, width=9)(torch.zeros(1, 10), scores))
    correlation = torch.corrcoef(torch.cat([at[0], at[1]]))[0, 1]
    assert abs(correlation) < 0.25


def test_replies_that_leave_no_room_for_a_prompt_name_the_setting(generator):
    with pytest.raises(UserError, match=r"no room is left .* lower sampling\.max_new_tokens"):
        generator(max_new_tokens=10**9).generate(PROMPTS)
