"""Upstream parsers, quirks included, beside our own reading of the same reply."""

import pytest

from nlhf.formats import get_format

NOISY = "<think>[[B]] first</think> Response B begins well, but [[A]] is right."


@pytest.mark.parametrize(
    ("name", "reply", "upstream", "ours"),
    [
        ("rewardbench", "B looks like [[B]] until the end. [[A]] no: [[B]]", "A", "B"),
        ("rewardbench", "The verdict is B", None, None),
        ("skywork_critic", "[[B]], and A is worse", "A", "B"),
        ("skywork_critic", "neither", "B", None),
        ("arena_hard", "At first [[B>A]]. After checking: [[A>>B]]", None, "A"),
        ("arena_hard", "[[A=B]] and again [[A=B]]", "tie", "tie"),
        ("arena_hard", "[[a>b]]", None, "A"),
        ("rm_r1", "<answer>[[A]]</answer>" + " and so on" * 10, None, "A"),
        ("rm_r1", "<answer>[[A]]</answer> or <answer>[[B]]</answer>", None, "B"),
        ("think_rm", "<answer>Assistant A</answer>", None, "A"),
        ("think_rm", "<answer>B</answer><answer> A </answer>", "A", "A"),
        ("prometheus2", "clear. [RESULT] A", "A", "A"),
        ("prometheus2", "clear. [RESULT] A\n\nThat is all.", None, "A"),
        ("auto_j", "So, the final decision is Response 1 or Response 2.", "A", None),
        ("auto_j", "The Final Decision is Response 2", None, "B"),
        ("her_rm", '"better_response": "cand_2" ... {"better_response": "cand_1"}', "B", "A"),
        ("rm_nlhf", NOISY, "B", "A"),
        ("sdrm", "B is better than A", "A", None),
        ("llmbar", "Output (b) is better? No: Output (a) is better.", "A", "A"),
        ("llmbar", "Output (a) is better? No: Output (b) is better.", "A", "B"),
        ("rewardbench2", "Not [[A]]. [[B]]", "A", "B"),
    ],
)
def test_upstream_beside_ours(name, reply, upstream, ours):
    assert get_format(name, compat=True).parse(reply).label == upstream
    assert get_format(name).parse(reply).label == ours


@pytest.mark.parametrize(
    ("name", "reply", "upstream", "ours"),
    [
        ("rewardbench2_ratings", "Rating: 7", 7, 7),
        ("rewardbench2_ratings", "Rating: 7/10", 10, 7),
        ("rewardbench2_ratings", "I beat around 10", 10, 10),
        ("rewardbench2_ratings", "Rating: 7. It beats 3 others.", None, 7),
        ("prometheus2_absolute", "good [RESULT] 4", 4, 4),
        ("prometheus2_absolute", "good [RESULT] 4, that is all", None, 4),
    ],
)
def test_upstream_ratings_beside_ours(name, reply, upstream, ours):
    for compat, expected in ((True, upstream), (False, ours)):
        verdict = get_format(name, compat=compat).parse(reply)
        assert verdict.label is None
        assert verdict.scores == (None if expected is None else (float(expected),))


def test_the_first_letter_found_is_upstreams_choice_of_four():
    text = "[[D]] is wrong, so [[C]]"
    assert get_format("rewardbench2", compat=True).parse_list(text, 4) == (0, 0, 1, 0)
    assert get_format("rewardbench2", compat=True).parse_list("none", 4) is None
