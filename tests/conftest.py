"""Fixtures shared by all tests."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of real data sets, ``$NLHF_DATA``; without it a test skips, but fails in CI."""
    folder = ROOT / os.environ.get("NLHF_DATA", "../shared/data")
    if not folder.is_dir():
        reason = f"needs the real data sets: {folder} is no folder; set NLHF_DATA"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    return folder


@pytest.fixture(scope="session", autouse=True)
def model_cache(tmp_path_factory) -> Path:
    """An empty cache of built and converted models, so that no test sees the user's own."""
    folder = tmp_path_factory.mktemp("models")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NLHF_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="session")
def tiny_model(model_cache) -> str:
    """The folder of a two-layer model with random weights and a byte-level tokenizer."""
    from nlhf.models import resolve

    return resolve("random:qwen3-tiny")
