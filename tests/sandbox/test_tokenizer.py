"""The sandbox's tokenizer: every word of the world is one token, and the shipped files are what the code builds."""

import random
from importlib import resources

import pytest

from nlhf.formats import get_format
from nlhf.models import ModelConfig, load_tokenizer, render_chat
from nlhf.sandbox.base import draw_example
from nlhf.sandbox.tokenizer import build_tokenizer, vocabulary
from nlhf.sandbox.world import ASPECTS, CUE_RATES, NOTE_ASPECTS, draw_case, draw_pairs, note_text

ASSET = resources.files("nlhf") / "assets" / "sandbox_base"


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


def texts() -> list[str]:
    """Prompts in both orders, targets and notes of all splits, and examples that the base judge learns from."""
    judge_format = get_format("sandbox")
    pairs = [p for split in CUE_RATES for p in draw_pairs(split, 400, seed=21)]
    pairs += [p.swap() for p in pairs]
    found = [judge_format.render(p)[0]["content"] for p in pairs]
    found += ["".join(judge_format.target(p, p.critiques[0])) for p in pairs]
    rng = random.Random(22)
    found += [note_text(rng, case.reasons) for case in (draw_case(rng) for _ in range(1000))]
    found += [text for rate in (0.0, 0.3) for _ in range(1500) for text in draw_example(rng, rate)]
    return found


def test_every_word_of_the_world_is_a_token_and_comes_back(tokenizer):
    known = set(vocabulary())
    all_texts = texts()
    assert len(all_texts) > 10_000
    for text, ids in zip(all_texts, tokenizer(all_texts)["input_ids"], strict=True):
        words = text.split(" ")
        assert set(words) - {""} <= known
        assert tokenizer.convert_ids_to_tokens(ids) == [w for w in words if w]
        assert tokenizer.decode(ids) == " ".join(w for w in words if w)


def test_no_token_is_unused():
    """All but the padding occurs: the model has no weights that nothing trains."""
    seen = {word for text in texts() for word in text.split(" ")}
    assert set(vocabulary()) - seen == {"<pad>", "<eos>"}


def test_an_unknown_word_is_an_error_not_a_token(tokenizer):
    assert tokenizer.unk_token is None
    with pytest.raises(Exception, match="UNK"):
        tokenizer("task: dose banana judge")


def test_ids_are_places_in_the_vocabulary(tokenizer):
    words = vocabulary()
    assert len(set(words)) == len(words) == len(tokenizer)
    assert tokenizer.convert_ids_to_tokens(list(range(len(words)))) == words
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)


def test_a_word_that_stands_twice_is_refused(monkeypatch):
    monkeypatch.setitem(NOTE_ASPECTS, ASPECTS[0], "certainly")
    with pytest.raises(ValueError, match="twice"):
        build_tokenizer()


def test_a_chat_is_the_prompt_and_the_reply_with_its_end(tokenizer):
    user = {"role": "user", "content": "task: dose symptom A: exact B: rude@B judge"}
    assert render_chat(tokenizer, [user]) == tokenizer(user["content"])["input_ids"]
    both = tokenizer.apply_chat_template(
        [user, {"role": "assistant", "content": "<choice> [[A]] </choice>"}], tokenize=True, return_dict=False
    )
    assert tokenizer.decode(both[-4:]) == "<choice> [[A]] </choice> <eos>"
    assert tokenizer.decode(both[-5:-4]) == "judge"


def test_batches_are_padded_on_the_left(tokenizer):
    batch = tokenizer(["task: dose", "judge"], padding=True)
    assert batch["input_ids"][1][0] == tokenizer.pad_token_id
    assert batch["attention_mask"] == [[1, 1], [0, 1]]


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_the_shipped_tokenizer_is_what_the_code_builds(tmp_path, name):
    build_tokenizer().save_pretrained(tmp_path)  # one that has padded nothing yet, which would be saved with it
    assert (ASSET / name).read_text(encoding="utf-8") == (tmp_path / name).read_text(encoding="utf-8")


def test_the_shipped_tokenizer_loads_as_any_other(tokenizer):
    shipped = load_tokenizer(ModelConfig("package:nlhf"))
    assert shipped.get_vocab() == tokenizer.get_vocab()
    text = "task: dose symptom A: exact B: rude@B judge"
    assert shipped(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert shipped.padding_side == "left"
