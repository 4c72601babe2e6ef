"""The one exception for mistakes that the user can mend; everything else keeps its traceback."""

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Bad input or bad configuration.

    The entry point prints the message and exits with code 2, without a traceback. The message says what is wrong,
    where (file, row, field) and how to mend it.
    """


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ``" Did you mean 'x'?"`` for the known name closest to ``name``, or an empty string."""
    close = difflib.get_close_matches(str(name), [str(k) for k in known], n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""
