r"""JSON in the replies of judges: in fences, with prose around it, with LaTeX's backslashes, or cut off.

Text inside a JSON string is the judge's data and declares nothing, whatever it holds.
"""

import json
import re
from collections.abc import Sequence

_ESCAPE = re.compile(r'\\(["\\/bfnrt]|u[0-9a-fA-F]{4})?')
_STRING = re.compile(r'"((?:[^"\\]|\\.)*)"', re.DOTALL)
_DECODER = json.JSONDecoder(strict=False)  # lines may end inside a string


def repair(text: str) -> str:
    r"""The text with every backslash that begins no escape (``\alpha``) standing for itself."""
    return _ESCAPE.sub(lambda match: match[0] if match[1] else r"\\", text)


def json_objects(text: str) -> list[tuple[int, dict]]:
    """The JSON objects in a repaired text with their positions; of one that is cut off, the parts that are whole."""
    objects, end = [], 0
    for brace in re.finditer(r'\{(?=\s*["}])', text):
        if brace.start() < end:  # inside the last object
            continue
        try:
            found, end = _DECODER.raw_decode(text, brace.start())
        except json.JSONDecodeError:
            continue
        except RecursionError:  # a reply that repeats itself, thousands of braces deep
            break
        objects.append((brace.start(), found))
    return objects


def last_field(text: str, key: str, values: Sequence[str]) -> re.Match | None:
    """The last ``"key": "value"`` of a broken or cut-off object that stands outside its other strings.

    Args:
        text: From the object's brace on.
        key: The key.
        values: The values that count; group 1 of the match is the one found.
    """
    found = None
    value = re.compile(rf'\s*:\s*"({"|".join(map(re.escape, values))})"', re.IGNORECASE)
    for string in _STRING.finditer(text):
        if string[1] == key:
            found = value.match(text, string.end()) or found
    return found
