"""Fixtures of the MetaRM tests: the sandbox's layout, and small MetaRMs."""

from pathlib import Path

import pytest

SANDBOX = {
    "format": "sandbox",
    "conversation": "task: ",
    "response_a": " A: ",
    "response_b": " B: ",
    "critique": " judge <critics> ",
    "end": " </critics>",
}


@pytest.fixture(scope="session")
def sandbox_layout() -> dict[str, str]:
    return dict(SANDBOX)


@pytest.fixture(scope="session")
def metarm_folder(tmp_path_factory) -> Path:
    """An untrained MetaRM of the sandbox, saved as `metarm train` would."""
    import torch

    from metarm.model import Layout, MetaRM
    from nlhf.models import ModelConfig

    folder = tmp_path_factory.mktemp("metarm")
    torch.manual_seed(1)
    MetaRM.load(ModelConfig("package:nlhf"), Layout(**SANDBOX), new_head=True).save(folder)
    return folder
