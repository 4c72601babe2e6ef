"""Curves over steps: what is read of the logs of several seeds, and that the drawing is the page's."""

import re

import pytest

from nlhf.files import append_jsonl
from nlhf.report.curves import PANELS, Curve, draw, read_curves


def log(folder, name, rows):
    path = folder / name / "metrics.jsonl"
    path.parent.mkdir()
    for row in rows:
        append_jsonl(path, row)
    return path


def by_key(curves):
    return {(curve.name, curve.key): curve for curve in curves}


def test_mean_and_interval_are_over_seeds_at_each_step(tmp_path):
    """Step 1: rewards 0.2, 0.4, 0.6, so 0.4 +- t(0.975, 2) 0.2 / sqrt(3), where t = 4.302653."""
    logs = [
        log(tmp_path, f"seed-{i}", [{"step": 1, "reward": 0.2 * i}, {"step": 2, "reward": 1.0}, {"step": 3, "loss": 0}])
        for i in (1, 2, 3)
    ]
    [curve] = read_curves({"ours": logs})
    assert (curve.name, curve.key, curve.steps) == ("ours", "reward", [1, 2])
    assert curve.mean == pytest.approx([0.4, 1.0])
    half = 4.302653 * 0.2 / 3**0.5
    assert curve.low == pytest.approx([0.4 - half, 1.0], abs=1e-5)
    assert curve.high == pytest.approx([0.4 + half, 1.0], abs=1e-5)


def test_one_seed_has_no_band(tmp_path):
    [curve] = read_curves({"ours": [log(tmp_path, "a", [{"step": 5, "reward": 0.5}])]})
    assert (curve.mean, curve.low, curve.high) == ([0.5], [], [])


def test_a_step_that_a_seed_lacks_is_no_mean_of_the_others(tmp_path):
    """MetaRM logs no error at a step without a labelled rollout."""
    one = log(tmp_path, "a", [{"step": 1, "metarm/mse_before": 0.1}, {"step": 2, "metarm/mse_before": 0.2}])
    two = log(tmp_path, "b", [{"step": 1, "metarm/mse_before": None}, {"step": 2, "metarm/mse_before": 0.4}])
    [curve] = read_curves({"ours": [one, two]})
    assert (curve.steps, curve.mean) == ([2], [pytest.approx(0.3)])


def test_rows_of_one_step_are_put_together_and_a_torn_line_is_passed_over(tmp_path):
    path = log(tmp_path, "a", [{"step": 1, "validation/accuracy": 0.7}, {"step": 1, "reward": 0.9}])
    with path.open("a") as file:
        file.write('{"step": 2, "rew')
    curves = by_key(read_curves({"ours": [path]}))
    assert {key for _, key in curves} == {"validation/accuracy", "reward"}


def test_an_arm_without_a_log_has_no_curve(tmp_path):
    there = log(tmp_path, "a", [{"step": 1, "reward": 0.5}])
    curves = read_curves({"start": [], "half": [there, tmp_path / "none.jsonl"], "whole": [there]})
    assert {curve.name for curve in curves} == {"whole"}


def flat(name, key, value=0.5, banded=True):
    return Curve(name, key, [0, 10], [value, value], *(([value] * 2,) * 2 if banded else ([], [])))


def test_only_panels_with_something_to_show_are_drawn_and_in_their_order():
    keys = ("validation/accuracy", "reward", "metarm/mse_after", "metarm/mse_before")
    titles = [plot["title"] for plot in draw([flat("ours", key) for key in keys])]
    assert titles == [p.title for p in PANELS if set(p.keys) & set(keys)]
    assert draw([]) == []


def test_the_drawing_takes_its_colours_from_the_page_and_one_a_name():
    plots = draw([flat("base", "reward"), flat("ours", "reward", 0.7), flat("ours", "validation/accuracy", 0.7)])
    both, single = (plot["svg"] for plot in plots)
    assert "var(--series-0)" in both
    assert "var(--series-1)" in both
    assert "var(--series-1)" in single  # though it stands there alone
    assert "var(--series-0)" not in single
    assert re.findall(r"#[0-9a-f]{6}", both) == []
    assert "<image" not in both


def test_a_band_is_drawn_for_several_seeds_only():
    banded, bare = (draw([flat("ours", "reward", banded=b)])[0]["svg"] for b in (True, False))
    assert banded.count("opacity: 0.15") == 1
    assert "opacity: 0.15" not in bare


def test_what_a_name_holds_shows_as_text():
    [plot] = draw([flat("<b>&", "reward"), flat("other", "reward")])
    assert "<b>" not in plot["svg"]
    assert "&lt;b&gt;&amp;" in plot["svg"]


def test_more_names_than_colours_differ_by_their_dashes():
    [plot] = draw([flat(f"arm {i}", "reward", banded=False) for i in range(8)])
    assert plot["svg"].count("stroke-dasharray") > draw([flat("arm", "reward", banded=False)])[0]["svg"].count(
        "stroke-dasharray"
    )
