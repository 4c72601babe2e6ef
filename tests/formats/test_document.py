"""docs/formats.md says what the code does."""

import re
from pathlib import Path

import pytest

from nlhf.formats import FORMATS, get_format
from nlhf.presets import PRESETS

TEXT = (Path(__file__).parents[2] / "docs" / "formats.md").read_text(encoding="utf-8")


def table(heading):
    """The rows of the table whose first column has this heading."""
    lines = TEXT[TEXT.index(f"| {heading} |") :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def code(cell):
    return [span.replace("\\|", "|") for span in re.findall(r"`([^`]+)`", cell)]


ROWS = {code(row[0])[0]: row[1:] for row in table("Format")}


def test_every_format_has_its_row_in_order():
    assert list(ROWS) == sorted(FORMATS)


@pytest.mark.parametrize("name", FORMATS)
def test_a_row_is_what_the_code_does(name):
    blocks, verdict, ties, compat = ROWS[name]
    judge_format = get_format(name)
    read = judge_format.parse(f"reasons\n{code(verdict)[0]}")
    for block in code(blocks):
        assert block in (judge_format.prompt_text or "response_1 response_2")
    assert ties == ("a rating" if judge_format.pointwise else "yes" if judge_format.ties else "no")
    assert read.label == (None if judge_format.pointwise else "A")
    assert read.scores or not judge_format.pointwise
    assert ("strength" in verdict) == (read.strength is not None and name != "nemotron_genrm")
    assert (compat == "no") == (not type(judge_format).has_upstream_parser())


def test_the_presets_are_the_codes():
    rows = [
        [name, p.model, f"`{p.format}`", ", ".join(f"{k} {v}" for k, v in p.sampling.items())]
        for name, p in PRESETS.items()
    ]
    assert [[code(row[0])[0], *row[1:]] for row in table("Preset")] == rows
