"""What is counted about a judge, from its judgements to figures with intervals.

Stations of the path: Verdict -> **Record -> metrics -> results** -> report. `nlhf.evaluate` is the verb.
"""
