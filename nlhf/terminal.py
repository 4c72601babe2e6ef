"""Judged text on a terminal: beside the path of a pair, wherever one is printed for the eyes of a person."""

import re

from rich.text import Text

# Escape sequences in judged text could clear or rewrite the terminal, and overrides of the writing direction the order
# of what is read (text from right to left needs none); half a surrogate pair cannot be printed at all.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def shown(text: str) -> Text:
    """Judged text as it is: no markup of ours is read in it, and control characters become visible."""
    return Text(_UNPRINTABLE.sub(lambda match: repr(match[0])[1:-1], text))
