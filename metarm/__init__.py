"""MetaRM: predict the process reward from the critique, for pairs without a human critique.

Where nobody wrote a critique, agreement with one cannot be rewarded. MetaRM learns, from the rollouts of the pairs that
have one, what reward a critique earns, and serves the others (RM-NLHF, arXiv 2601.07349)::

    labelled pairs -> judge -> rollouts -> targets 0, 1, 1.5 -> MetaRM      metarm train
    pairs whose critiques were hidden -> judge -> MetaRM against the truth  metarm evaluate
    nlhf train, process: {class_path: metarm.MetaReward}                    learns on, and rewards the rest

Imports run from here to `nlhf`, never back.
"""

import importlib
from typing import Any

_HOMES = {"MetaReward": "metarm.online", "MetaRM": "metarm.model", "Layout": "metarm.model"}

__all__ = ["Layout", "MetaRM", "MetaReward"]


def __getattr__(name: str) -> Any:
    """Import what is asked for only now, so that ``import metarm`` stays light."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
