"""Look at an evaluated run in a notebook: metrics and results as tables to filter, judgements to read.

Station of the path: metrics -> **report**, by hand. What a model or a data set wrote is shown as text, never as markup.
"""

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nlhf.critique.arguments import generated_arguments, reference_sets
from nlhf.evaluation.figures import definitions, flipped, lucky, with_twins
from nlhf.evaluation.records import Record
from nlhf.evaluation.results import Run, compare_runs
from nlhf.judge import as_shown
from nlhf.report.browser import numbered

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

    rows = [_row(record, twin, run) for record, twin in with_twins(run.records)]
    index = pd.MultiIndex.from_tuples([r.key for r in run.records], names=["pair", "order", "sample"])
    return pd.DataFrame(rows, index=index).astype(
        {"correct": "boolean", "f1": float, "precision": float, "recall": float}
    )


def _row(record: Record, twin: Record | None, run: Run) -> dict[str, Any]:
    score = record.scored
    return {
        "subset": record.subset,
        "label": record.label,
        "winner": record.winner,
        "correct": record.correct if record.label else None,
        "flipped": flipped(record, twin),
        "lucky": lucky(record, run.config["wrong_critique_threshold"]),
        "f1": score and score.f1,
        "precision": score and score.precision,
        "recall": score and score.recall,
        "tokens": record.tokens,
        "truncated": record.truncated,
        "critique": record.critique,
        "reply": record.reply,
    }


def figure_table(run: Run) -> "pd.DataFrame":
    """The figures that count something: value, ends of the 95 % interval, k and n; see `metrics.Metric`."""
    import pandas as pd

    titles = {name: definition.title for name, definition in definitions().items()}
    rows = {titles[name]: vars(metric) for name, metric in run.metrics.items() if metric.n}
    return pd.DataFrame(rows).T.astype({"value": float, "low": float, "high": float, "n": int})


def difference_table(first: Run, second: Run) -> "pd.DataFrame":
    """Paired differences, second minus first, with the ends of their 95 % intervals; see `results.compare_runs`.

    Raises:
        UserError: the runs were not measured on the same pairs.
    """
    import pandas as pd

    found = compare_runs(first, second)
    titles = {name: definition.title for name, definition in definitions().items()}
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

    by_key = {r.key: (r, twin) for r, twin in with_twins(run.records)}
    cards = [_card(*by_key[key], run) for key in rows.index[:limit]]
    return HTML(_template().render(cards=cards, left_out=max(0, len(rows) - limit)))


def _card(record: Record, twin: Record | None, run: Run) -> dict[str, Any]:
    pair = as_shown(run.pairs[record.pair_id], record.order)
    row, match = _row(record, twin, run), record.match
    generated = match.generated if match else generated_arguments(record.critique)
    reference = match.reference if match else [a for arguments in reference_sets(pair) for a in arguments]
    matched = match.matched if match else ()
    return {
        "record": record,
        "pair": pair,
        "remarks": [remark for name, remark in _REMARKS.items() if row[name]],
        "generated": numbered(generated, [i for i, _ in matched]),
        "reference": numbered(reference, [j for _, j in matched]),
    }


@functools.cache
def _template() -> "jinja2.Template":
    import jinja2

    loader = jinja2.FileSystemLoader(Path(__file__).parent / "assets" / "notebook")
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template("judgements.html.jinja")
