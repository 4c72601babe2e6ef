"""How to reach a server, and how patient to be with it: what the **Generator** station and the LLM scorer share.

Keys are named here and never held: a configuration is written to the run's folder.
"""

import os
import re
from dataclasses import dataclass
from typing import ClassVar
from urllib.parse import urlsplit

from nlhf.errors import UserError

OPENAI_URL = "https://api.openai.com/v1"


@dataclass
class ServerConfig:
    """How to reach a server, and how patient to be with it."""

    base_url: str | None = None
    """Address of the server up to /v1; left out, OpenAI's own."""

    api_key_env: str | None = None
    """NAME of the environment variable that holds the key, never the key itself; left out, OPENAI_API_KEY for
    OpenAI's own address and no key for any other."""

    concurrency: int = 16
    """Requests under way at once."""

    timeout: float = 600.0
    """Seconds until one request is given up, however slowly its answer trickles in."""

    retries: int = 5
    """How often a request is repeated after an error or a malformed reply before its prompt counts as failed."""

    backoff: float = 1.0
    """Seconds before the first repetition; doubles each time, up to a minute, unless the server names a time."""

    where: ClassVar[str] = ""  # what error messages put before a field's name

    def __post_init__(self):
        problems = []
        if self.concurrency < 1:
            problems.append(f"{self.where}concurrency must be at least 1, got {self.concurrency}")
        if self.retries < 0:
            problems.append(f"{self.where}retries must not be negative, got {self.retries}")
        if not 0 < self.timeout < float("inf"):
            problems.append(f"{self.where}timeout must be positive, got {self.timeout}")
        if not 0 <= self.backoff < float("inf"):
            problems.append(f"{self.where}backoff must not be negative, got {self.backoff}")
        problems += _url_problems(f"{self.where}base_url", self.base_url)
        # What is refused here may be the key itself, so it is not repeated.
        if self.api_key_env is not None and not re.fullmatch(r"[A-Z_][A-Z0-9_]*", self.api_key_env):
            problems.append(
                f"{self.where}api_key_env must be the NAME of an environment variable (capital letters, digits and _), "
                "never the key itself"
            )
        if problems:
            raise UserError("; ".join(problems))

    @property
    def url(self) -> str:
        """The address in use."""
        return (self.base_url or OPENAI_URL).rstrip("/")

    def key(self) -> str | None:
        """The key from the environment; None where none is needed.

        Raises:
            UserError: the variable is not set.
        """
        name = self.api_key_env or ("OPENAI_API_KEY" if self.base_url is None else None)
        if name is None:
            return None
        if not os.environ.get(name):
            other = "" if self.base_url else ", or base_url for a server of your own"
            raise UserError(f"set the environment variable {name} to the key of {self.url}{other}")
        key = os.environ[name]
        if not key.isascii() or not key.isprintable() or " " in key:  # no HTTP header could carry it
            raise UserError(f"the key in {name} holds a blank, a line break or a letter beyond ASCII; set it anew")
        return key


def _url_problems(name: str, url: str | None) -> list[str]:
    if url is None:
        return []
    try:
        parts = urlsplit(url)
        fits = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        return [f"{name} cannot be read as an address"]
    if parts.username or parts.password or parts.query or parts.fragment:
        # The configuration is written to the run's folder.
        return [f"{name} must hold no user, password or query; a key belongs into the variable that api_key_env names"]
    fits = fits and url.isprintable() and " " not in url
    return [] if fits else [f"{name} must be an address like http://localhost:8000/v1, got {url!r}"]
