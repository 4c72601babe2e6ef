"""Look at an evaluated run in a notebook: metrics and results as tables to filter, judgements to read.

Station of the path: metrics -> **report**, by hand. What a model or a data set wrote is shown as text, never as markup.
"""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nlhf.critique.arguments import Argument, generated_arguments, reference_sets
from nlhf.metrics import Record, compare, definitions
from nlhf.results import Run

if TYPE_CHECKING:
    import jinja2
    import pandas as pd
    from IPython.display import HTML

_REMARKS = {"flipped": "flipped", "lucky": "right label, wrong critique", "truncated": "truncated"}


def judgement_table(run: Run) -> "pd.DataFrame":
    """One row for each judgement, by pair, order and sample, to be filtered with pandas.

    Columns: ``subset``; ``label`` and ``winner`` in the data's order; ``correct`` (missing without a label);
    ``flipped`` (the other order was judged differently); ``lucky`` (right label, wrong critique); ``f1``,
    ``precision`` and ``recall`` (missing where the critique does not count); ``tokens``, ``truncated``, ``critique``
    and ``reply``.
    """
    import pandas as pd

    rows = [_row(record, twin, run) for record, twin in _twins(run)]
    index = pd.MultiIndex.from_tuples([r.key for r in run.records], names=["pair", "order", "sample"])
    return pd.DataFrame(rows, index=index).astype(
        {"correct": "boolean", "f1": float, "precision": float, "recall": float}
    )


def _twins(run: Run) -> list[tuple[Record, Record | None]]:
    """Each record with that of the same pair and sample in the other order."""
    by_key = {r.key: r for r in run.records}
    return [(r, by_key.get((r.pair_id, "BA" if r.order == "AB" else "AB", r.sample))) for r in run.records]


def _row(record: Record, twin: Record | None, run: Run) -> dict[str, Any]:
    # The figures' own definitions, so that a filter finds exactly what a figure counts.
    figures = definitions(run.config["wrong_critique_threshold"])
    consistent, lucky = (figures[name].value for name in ("position_consistency", "wrong_critique_rate"))
    in_order = (record, twin) if record.order == "AB" else (twin, record)
    score = record.scored
    return {
        "subset": record.subset,
        "label": record.label,
        "winner": record.winner,
        "correct": record.correct if record.label else None,
        "flipped": twin is not None and consistent(*in_order) == 0,
        "lucky": lucky(record, twin) == 1,
        "f1": score and score.f1,
        "precision": score and score.precision,
        "recall": score and score.recall,
        "tokens": record.tokens,
        "truncated": record.truncated,
        "critique": record.critique,
        "reply": record.reply,
    }


def figure_table(run: Run) -> "pd.DataFrame":
    """The figures that count something: value, ends of the 95 % interval, k and n; see `nlhf.metrics.Metric`."""
    import pandas as pd

    titles = {name: definition.title for name, definition in definitions().items()}
    rows = {titles[name]: vars(metric) for name, metric in run.metrics.items() if metric.n}
    return pd.DataFrame(rows).T.astype({"value": float, "low": float, "high": float, "n": int})


def difference_table(first: Run, second: Run) -> "pd.DataFrame":
    """Paired differences, second minus first, with the ends of their 95 % intervals; see `nlhf.metrics.compare`.

    Raises:
        UserError: the runs were not measured on the same pairs.
    """
    import pandas as pd

    threshold, resamples = first.config["wrong_critique_threshold"], first.config["resamples"]
    found = compare(first.records, second.records, threshold, resamples, first.config["seed"])
    titles = {name: definition.title for name, definition in definitions(threshold).items()}
    rows = {titles[name]: vars(difference) for name, difference in found.items() if difference.value is not None}
    columns = {"first": first.name, "second": second.name, "value": "difference", "low": "low", "high": "high"}
    return pd.DataFrame(rows, index=list(columns)).T.astype(float).set_axis(list(columns.values()), axis=1)


def show_table(table: "pd.DataFrame", width: int = 200) -> "HTML":
    """A table for display: everything escaped, texts cut after ``width`` characters."""
    from IPython.display import HTML

    def cut(value: Any) -> Any:
        return f"{value[:width]}…" if isinstance(value, str) and len(value) > width else value

    html = table.map(cut).to_html(escape=True, float_format="{:.3f}".format, na_rep="–", border=0)
    # Jupyter would set what stands between dollar signs as mathematics.
    return HTML(f'<div class="tex2jax_ignore mathjax_ignore">{html}</div>')


def show_judgements(run: Run, rows: "pd.DataFrame", limit: int = 10) -> "HTML":
    """Judgements to read: the pair as the judge saw it, and both critiques; arguments that match carry one number.

    Args:
        run: The run.
        rows: Rows of `judgement_table` of this run.
        limit: At most so many are shown.
    """
    from IPython.display import HTML

    by_key = {r.key: (r, twin) for r, twin in _twins(run)}
    cards = [_card(*by_key[key], run) for key in rows.index[:limit]]
    return HTML(_template().render(cards=cards, left_out=max(0, len(rows) - limit)))


def _card(record: Record, twin: Record | None, run: Run) -> dict[str, Any]:
    pair = run.pairs[record.pair_id]
    pair = pair if record.order == "AB" else pair.swap()
    row, match = _row(record, twin, run), record.match
    generated = match.generated if match else generated_arguments(record.critique)
    reference = match.reference if match else [a for arguments in reference_sets(pair) for a in arguments]
    matched = match.matched if match else ()
    return {
        "record": record,
        "pair": pair,
        "remarks": [remark for name, remark in _REMARKS.items() if row[name]],
        "generated": _numbered(generated, [i for i, _ in matched]),
        "reference": _numbered(reference, [j for _, j in matched]),
    }


def _numbered(arguments: Sequence[Argument], matched: Sequence[int]) -> list[dict[str, Any]]:
    """Arguments with the number of their match, from 1; None where nothing matches."""
    numbers = {i: n for n, i in enumerate(matched, start=1)}
    return [{"text": str(argument), "match": numbers.get(i)} for i, argument in enumerate(arguments)]


@functools.cache
def _template() -> "jinja2.Template":
    import jinja2

    loader = jinja2.FileSystemLoader(Path(__file__).parent / "assets" / "notebook")
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template("judgements.html.jinja")
