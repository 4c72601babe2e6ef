"""Train and measure generative judges from natural-language feedback.

The path of one pair, which is also the map of this package::

    source -> Pair -> JudgeFormat.render -> Generator -> text -> JudgeFormat.parse -> Verdict
                                                                              |-> rewards  -> trainer  (train)
                                                                              |-> metrics  -> report   (evaluate)
"""

__version__ = "0.1.0"
