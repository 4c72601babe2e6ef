"""Progress and warnings: each is said once."""

import subprocess
import sys

import pytest

SAID = """
import logging
import {library}
from nlhf.logs import setup_logging
setup_logging()
setup_logging()
logging.getLogger("{logger}").warning("the server is away")
"""


@pytest.mark.parametrize(
    ("library", "logger"),
    [("nlhf", "nlhf.judging"), ("huggingface_hub.utils.logging", "huggingface_hub.utils._http")],
    ids=["ours", "the hub's, which has a handler of its own"],
)
def test_a_warning_is_said_once(library, logger):
    """In a process of its own: pytest's handlers and those of other tests would count too."""
    said = SAID.format(library=library, logger=logger)
    shown = subprocess.run([sys.executable, "-c", said], capture_output=True, text=True, check=True)
    assert shown.stderr.count("the server is away") == 1
