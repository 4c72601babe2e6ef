"""Train and measure generative judges from natural-language feedback.

The path of one pair, which is also the map of this package::

    source -> Pair -> JudgeFormat.render -> Generator -> text -> JudgeFormat.parse -> Verdict
                                                                              |-> rewards  -> trainer  (train)
                                                                              |-> metrics  -> report   (evaluate)
"""

__version__ = "0.1.0"


def __getattr__(name: str):
    """``from nlhf import load_judge``, imported only when it is asked for: `import nlhf` stays light."""
    if name == "load_judge":
        from nlhf.judging import load_judge

        return load_judge
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
