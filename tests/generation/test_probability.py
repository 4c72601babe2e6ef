"""Probabilities of forced verdicts: against a plain reference, whatever the batch, the padding and the tokenisation."""

import contextlib
import math
import random

import pytest
import torch

from nlhf.errors import UserError
from nlhf.generation import SamplingConfig, TransformersGenerator
from nlhf.generation.prefill import SharedBeginning, by_length, common_length, lay_out, read, select
from nlhf.generation.probability import Branches, branch_log_probs
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
        return TransformersGenerator(model, tokenizer, SamplingConfig(**options))

    return build


def chat(text):
    return [{"role": "user", "content": text}]


PROMPTS = [chat(text) for text in ("a", "bb" * 20, "第二个", "ccc" * 9, "d" * 31, "e f g", "h" * 3)]
PREFIXES = ["<choice>[[", "", "x", "critique " * 5 + "[[", "[[", "第", "a\n"]
CHOICES = {
    "one token each": ["A", "B"],
    "several tokens": ["cand_1", "cand_2", "tie"],
    "one and several": ["A", "B", "neither"],
    "a common start": ["Response 1", "Response 2"],
    "different lengths": [" no", " yes, certainly", "第二"],
    "one alone": ["only"],
}


def reference(model, prompt_ids, prefix_ids, choice_ids):
    """One forward pass per choice, without cache, batch or padding; the whole softmax."""
    ids = prompt_ids + prefix_ids + choice_ids
    with torch.no_grad():
        log_p = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
    start = len(prompt_ids) + len(prefix_ids)
    return sum(log_p[n - 1, ids[n]].item() for n in range(start, len(ids)))


@contextlib.contextmanager
def forwards(model):
    """The shapes of the ids that the model reads."""
    shapes = []
    hook = model.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    try:
        yield shapes
    finally:
        hook.remove()


@pytest.mark.parametrize("continuations", CHOICES.values(), ids=CHOICES)
def test_equal_to_one_plain_forward_pass_for_each(generator, model, tokenizer, continuations):
    """The byte-level tokenizer never merges, so prefix and continuation can be tokenised apart."""

    def ids(text):
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    expected = [
        [reference(model, render_chat(tokenizer, prompt), ids(prefix), ids(c)) for c in continuations]
        for prompt, prefix in zip(PROMPTS, PREFIXES, strict=True)
    ]
    found = generator(batch_size=3).choice_log_probs(PROMPTS, PREFIXES, continuations)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("continuations", CHOICES.values(), ids=CHOICES)
def test_scores_do_not_depend_on_batch_padding_or_company(generator, continuations):
    def scores(order, batch_size):
        prompts, prefixes = [PROMPTS[i] for i in order], [PREFIXES[i] for i in order]
        return torch.tensor(generator(batch_size=batch_size).choice_log_probs(prompts, prefixes, continuations))

    everything = list(range(len(PROMPTS)))
    alone = torch.cat([scores([i], 1) for i in everything])
    shuffled = random.Random(3).sample(everything, len(everything))
    for order, batch_size in ((everything, 1), (everything, 2), (everything, 64), (shuffled, 4)):
        torch.testing.assert_close(scores(order, batch_size), alone[order], atol=1e-4, rtol=0)


def test_settings_of_sampling_play_no_part(generator):
    plain = generator().choice_log_probs(PROMPTS, PREFIXES, ["A", "B"])
    drawn = generator(temperature=0.3, top_k=1, seed=5, max_new_tokens=1).choice_log_probs(
        PROMPTS, PREFIXES, ["A", "B"]
    )
    assert drawn == plain


def test_all_continuations_of_one_token_sum_to_one(generator, tokenizer):
    """Every id as a branch of its own: the probabilities are the whole softmax."""
    items = [Branches([1, 2, 3], 0, [[i] for i in range(generator().model.config.vocab_size)])]
    with torch.no_grad():
        [scores] = branch_log_probs(generator().model, items, pad_id=0, batch_size=4)
    assert math.fsum(map(math.exp, scores)) == pytest.approx(1, abs=1e-5)


def test_one_reading_of_each_prompt_and_what_they_share_only_once(generator, model, tokenizer):
    """Seven prompts in batches of four; continuations of one token need nothing else."""
    lengths = [
        len(render_chat(tokenizer, m)) + len(tokenizer(p)["input_ids"]) for m, p in zip(PROMPTS, PREFIXES, strict=True)
    ]
    shared = common_length([render_chat(tokenizer, m) for m in PROMPTS])
    assert shared > 5
    with forwards(model) as shapes:
        generator(batch_size=4).choice_log_probs(PROMPTS, PREFIXES, ["A", "B"])
    own = sorted((length - shared for length in lengths), reverse=True)
    first, *batches = shapes
    assert first == (1, shared)
    assert batches == [(len(batch), own[batch[0]]) for batch in by_length(own, 4)]
    assert sum(rows for rows, _ in batches) == 7


def test_longer_continuations_are_read_on_the_same_cache(generator, model):
    with forwards(model) as shapes:
        generator(batch_size=8).choice_log_probs([PROMPTS[0]], [""], ["A", "no", "cand_1", "cand_2"])
    prompt, *rest = [shape for shape in shapes if shape != (1, 1)]
    assert prompt[0] == 1
    assert rest == [(3, len("cand_1") - 1)]


def test_only_the_needed_positions_are_projected(generator, model):
    kept = []
    hook = model.lm_head.register_forward_hook(lambda module, args, output: kept.append(output.shape[1]))
    try:
        generator().choice_log_probs(PROMPTS, PREFIXES, ["A", "B"])
        assert set(kept) == {1}
        kept.clear()
        generator().choice_log_probs(PROMPTS, PREFIXES, ["Response 1", "Response 2"])  # nine tokens in common
        assert max(kept) == len("Response ") + 1
    finally:
        hook.remove()


def test_progress_counts_each_prompt_once(generator):
    calls = []
    generator(batch_size=3).choice_log_probs(PROMPTS, PREFIXES, ["A", "B"], progress=calls.append)
    assert sum(calls) == len(PROMPTS)
    assert len(calls) > 2


def test_no_prompts_no_scores(generator):
    assert generator().choice_log_probs([], [], ["A", "B"]) == []


def test_mode_and_weights_are_left_as_they_were(generator, model):
    model.train()
    try:
        first = generator().choice_log_probs(PROMPTS, PREFIXES, ["A", "B"])
        assert model.training
    finally:
        model.eval()
    assert generator().choice_log_probs(PROMPTS, PREFIXES, ["A", "B"]) == first


def test_a_continuation_that_begins_another_is_refused(generator):
    with pytest.raises(ValueError, match="beginning of another"):
        generator().choice_log_probs(PROMPTS[:1], [""], ["A", "A>>B"])


def test_long_prompts_are_counted_and_refused(generator, model, monkeypatch):
    longest = sorted(len(render_chat(generator().tokenizer, p)) for p in PROMPTS)
    with pytest.raises(UserError, match=r"2 of 7 prompts .*sampling\.max_prompt_tokens"):
        generator(max_prompt_tokens=longest[-3] + 1).choice_log_probs(PROMPTS, [""] * 7, ["A", "B"])
    monkeypatch.setattr(model.config, "max_position_embeddings", 60)
    with pytest.raises(UserError, match=r"of 7 prompts .*the model's context"):
        generator().choice_log_probs(PROMPTS, PREFIXES, ["A", "B"])


def test_a_long_reply_limit_leaves_the_context_to_the_prompt(generator, model, monkeypatch):
    """No reply is written, so the limit of replies takes no room."""
    monkeypatch.setattr(model.config, "max_position_embeddings", 200)
    assert len(generator(max_new_tokens=10**6).choice_log_probs(PROMPTS, PREFIXES, ["A", "B"])) == 7


def test_nan_is_an_error_and_no_verdict(generator, model):
    hook = model.lm_head.register_forward_hook(lambda module, args, output: output * math.nan)
    try:
        with pytest.raises(UserError, match=r"NaN.*float32"):
            generator().choice_log_probs(PROMPTS, PREFIXES, ["A", "B"])
    finally:
        hook.remove()


@pytest.mark.parametrize(
    ("opened", "prefix", "seen"),
    [
        ("<think>\n", "[[", "<think>\n\n</think>\n\n[["),
        ("<think>", "[[", "<think>\n</think>\n\n[["),
        ("<think>\n", "so </think>\n[[", "<think>\nso </think>\n[["),
        ("<think>\n\n</think>\n\n", "[[", "<think>\n\n</think>\n\n[["),
        ("", "[[", "[["),
    ],
    ids=["open", "open, no line end", "closed by the prefix", "closed by the template", "none"],
)
def test_thinking_that_the_template_opens_is_closed(model, tiny_model, opened, prefix, seen):
    tokenizer = load_tokenizer(ModelConfig(tiny_model))
    tokenizer.chat_template = "{{ messages[0].content }}:{{ '" + opened.replace("\n", "\\n") + "' }}"
    plain = load_tokenizer(ModelConfig(tiny_model))
    plain.chat_template = "{{ messages[0].content }}:"
    found = TransformersGenerator(model, tokenizer).choice_log_probs([chat("q")], [prefix], ["A", "B"])
    expected = TransformersGenerator(model, plain).choice_log_probs([chat("q")], [seen], ["A", "B"])
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), atol=1e-5, rtol=0)


@pytest.fixture(scope="module")
def merging():
    """A tokenizer that joins ``[[`` and ``[[A``, a blank and ``B``, and ``tie``; every other character is a token."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    merges = [("[", "["), ("[[", "A"), (" ", "B"), ("t", "i"), ("ti", "e")]
    vocabulary = sorted({*" [ABCabcxties0123456789_", *(a + b for a, b in merges)})
    bpe = models.BPE(vocab={token: i for i, token in enumerate(vocabulary)}, merges=merges)
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(bpe))


@pytest.mark.parametrize(
    ("prefix", "continuations", "trunk", "scored", "branches"),
    [
        ("x[[", ["B", "C"], ["x", "[["], 0, [["B"], ["C"]]),
        ("x[[", ["A", "B"], ["x"], 0, [["[[A"], ["[[", "B"]]),
        ("x[", ["[A", "[B"], ["x"], 0, [["[[A"], ["[[", "B"]]),
        ("x ", ["A", "B"], ["x"], 0, [[" ", "A"], [" B"]]),
        ("x", ["ca1", "ca2"], ["x", "c", "a"], 2, [["1"], ["2"]]),
        ("x[", ["[1", "[2"], ["x", "[["], 1, [["1"], ["2"]]),
        ("", ["tie", "tic"], [], 0, [["tie"], ["ti", "c"]]),
        ("", ["A"], ["A"], 1, [[]]),
    ],
    ids=[
        "clean boundary",
        "one label merges with the prefix",
        "both labels merge",
        "the prefix's blank merges",
        "labels share tokens",
        "both merge alike",
        "no prefix",
        "a single label",
    ],
)
def test_prefix_and_label_are_tokenised_together(merging, prefix, continuations, trunk, scored, branches):
    found = Branches.of(merging, [7, 7], prefix, continuations)
    assert found.trunk[:2] == [7, 7]
    assert merging.convert_ids_to_tokens(found.trunk[2:]) == trunk
    assert found.scored == scored
    assert [merging.convert_ids_to_tokens(branch) for branch in found.branches] == branches


def test_merged_labels_have_the_scores_of_the_text_as_tokenised(merging, model):
    """P([[A) against P([[) P(B): the reference reads each whole text from where they part."""

    def ids(text):
        return list(merging(text, add_special_tokens=False)["input_ids"])

    item = Branches.of(merging, [5, 6], "x[[", ["A", "B"])
    with torch.no_grad():
        [found] = branch_log_probs(model, [item], pad_id=0, batch_size=2)
    assert ids("x[[A")[:2] != ids("x[[")  # or this test would not test a merge
    expected = [reference(model, [5, 6, *ids("x")], [], ids("x[[" + label)[1:]) for label in "AB"]
    assert found == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    ("sequences", "length"),
    [
        ([[1, 2, 3], [1, 2, 4], [1, 2]], 2),
        ([[1, 2], [1, 2]], 2),
        ([[1], [2]], 0),
        ([[], [1]], 0),
        ([[5, 6, 7]], 3),
        ([[1, 9, 0], [1, 3, 9], [1, 5]], 1),
    ],
)
def test_common_length(sequences, length):
    assert common_length(sequences) == length


@pytest.mark.parametrize(
    ("lengths", "size", "batches"),
    [
        ([4, 8, 6, 7], 4, [[1, 3, 2], [0]]),
        ([4, 8, 6, 7], 2, [[1, 3], [2], [0]]),
        ([5, 5, 5], 2, [[0, 1], [2]]),
        ([], 2, []),
    ],
    ids=["under three quarters", "full", "equal", "none"],
)
def test_batches_by_length(lengths, size, batches):
    assert list(by_length(lengths, size)) == batches


def test_layout_puts_the_padding_behind_what_is_shared():
    ids, mask = lay_out([[1, 2, 3, 4, 5], [1, 2, 6]], shared=2, pad_id=0, device="cpu")
    assert ids.tolist() == [[1, 2, 3, 4, 5], [1, 2, 0, 0, 6]]
    assert mask.tolist() == [[1, 1, 1, 1, 1], [1, 1, 0, 0, 1]]


def test_every_sequence_keeps_a_token_of_its_own(model):
    with torch.no_grad():
        assert SharedBeginning(model, [[1, 2, 3], [1, 2, 3]]).length == 2
        assert SharedBeginning(model, [[1, 2, 3], [1, 2]]).length == 1
        assert SharedBeginning(model, [[1], [1]]).length == 0
        assert SharedBeginning(model, []).length == 0


def test_sliding_windows_share_nothing_because_padding_would_fill_them(tiny_model):
    """With a window of 4 tokens, the padding between beginning and rest would hide the beginning from short rows."""
    windowed = load_model(ModelConfig(tiny_model), device="cpu")
    windowed.config.layer_types = ["sliding_attention"] * windowed.config.num_hidden_layers
    windowed.config.sliding_window, windowed.config.use_sliding_window = 4, True
    assert SharedBeginning(windowed, [[1, 2, 3], [1, 2, 4]]).length == 0


def test_rows_selected_from_a_cache_leave_it_alone(model):
    with torch.no_grad():
        shared = SharedBeginning(model, [[1, 2, 3], [1, 2, 4]])
        cache = shared.cache(3)
        mask = torch.ones(3, 3, dtype=torch.long)
        read(model, torch.tensor([[3], [4], [5]]), mask, cache)
        twice = select(cache, torch.tensor([2, 2]))
        read(model, torch.tensor([[8], [9]]), torch.ones(2, 4, dtype=torch.long), twice)
        assert (cache.layers[0].keys.shape[0], cache.get_seq_length()) == (3, 3)
        assert (twice.layers[0].keys.shape[0], twice.get_seq_length()) == (2, 4)
        assert shared.cache(1).get_seq_length() == 2
