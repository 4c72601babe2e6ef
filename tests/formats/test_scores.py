import pytest

from nlhf.errors import UserError
from nlhf.formats import get_format
from nlhf.pairs import Pair, Turn
from nlhf.verdict import Verdict, better, compare_ratings

PAIR = Pair("p", [Turn("system", "Be brief."), Turn("user", "How much?")], "Two.", "Ten.", "A", strength=-2)


@pytest.mark.parametrize(
    ("name", "reply", "label", "strength", "scores"),
    [
        ("arena_hard", "[[A>>B]]", "A", -3, None),
        ("arena_hard", "[[A>B]]", "A", -1, None),
        ("arena_hard", "[[A=B]]", "tie", 0, None),
        ("arena_hard", "[[B>A]]", "B", 1, None),
        ("arena_hard", "[[B>>A]]", "B", 3, None),
        ("arena_hard", "[[A<B]]", "B", 1, None),
        ("think_rm_strength", "<answer>-3</answer>", "A", -3, None),
        ("think_rm_strength", "<answer>−1</answer>", "A", -1, None),
        ("think_rm_strength", "<answer>+2</answer>", "B", 2, None),
        ("think_rm_strength", "<answer>0</answer>", None, None, None),
        ("judgelrm", "<answer>3</answer> <answer>5</answer>", "B", None, (3, 5)),
        ("judgelrm", "<answer>7.5</answer>\n<answer>7</answer>", "A", None, (7.5, 7)),
        ("judgelrm", "<answer>6</answer><answer>6</answer>", "tie", None, (6, 6)),
        ("judgelrm", "<answer>8/10</answer><answer>6/10</answer>", "A", None, (8, 6)),
        ("judgelrm", "<answer>0</answer><answer>5</answer>", None, None, None),
        ("judgelrm", "<answer>-3</answer><answer>5</answer>", None, None, None),
        ("judgelrm", "<answer>5</answer>", None, None, None),
        ("judgelrm", "<answer>3</answer><answer>5</answer> no: <answer>4</answer>", None, None, None),
        ("deepseek_grm", r"Scores: \boxed{8, 6}", "A", None, (8, 6)),
        ("deepseek_grm", r"It is \boxed{42}. \boxed{2, 4}, since \boxed{6}", "B", None, (2, 4)),
        ("deepseek_grm", r"\boxed{0, 11}", None, None, None),
        ("deepseek_grm", r"\boxed{5, 6, 7}", None, None, None),
        ("j1", "<score_A> 7 </score_A><score_B> 9.25 </score_B><answer> [[B]] </answer>", "B", None, (7, 9.25)),
        ("j1", "<score_A>7</score_A><score_B>12</score_B><answer>[[A]]</answer>", "A", None, None),
        ("j1", "<score_A>7</score_A><answer>[[A]]</answer>", "A", None, None),
        ("nemotron_genrm", r"\boxed{4, 2} \boxed{1}", "A", -3, (4, 2)),
        ("nemotron_genrm", r"\boxed{2, 4} \boxed{3}", "A", -1, (2, 4)),  # the ranking decides
        ("nemotron_genrm", r"\boxed{3, 3} \boxed{4}", "B", 1, (3, 3)),
        ("nemotron_genrm", r"\boxed{3, 3} \boxed{3.5}", None, None, (3, 3)),
        ("nemotron_genrm", r"\boxed{2, 4}", "B", None, (2, 4)),
        ("nemotron_genrm", r"\boxed{3, 3}", None, None, (3, 3)),
        ("nemotron_genrm", r"\boxed{0, 9} \boxed{6}", "B", 3, None),
        ("nemotron_genrm", '```json\n{"score_1": 2, "score_2": 5, "ranking": 5}\n```', "B", 2, (2, 5)),
        ("nemotron_genrm", '{"score_1": "4", "score_2": "3", "ranking": "2"} as said', "A", -2, (4, 3)),
        ("nemotron_genrm", '{"score_1": 2, "score_2": 5, "ranking": true}', None, None, (2, 5)),
        ("nemotron_genrm", r'It quotes {"ranking": 1}. \boxed{2, 4} \boxed{6}', "B", 3, (2, 4)),
        ("rrm", r"The sum is \boxed{42}, so \boxed{Assistant 2}", "B", None, None),
        ("rrm", r"\boxed{Assistant 1} for the sum is \boxed{42}", "A", None, None),
        ("rrm", r"\boxed{\text{Assistant 1}}", "A", None, None),
        ("prometheus2", "Feedback. [Result] **B**", "B", None, None),
        ("auto_j", "So, the final decision is **Response 2**.", "B", None, None),
        ("auto_j", "So, the final decision is Response 1 because Response 2 lies.", "A", None, None),
    ],
)
def test_strength_and_scores(name, reply, label, strength, scores):
    verdict = get_format(name).parse(reply)
    assert (verdict.label, verdict.strength, verdict.scores) == (label, strength, scores)


@pytest.mark.parametrize("name", ["rewardbench2_ratings", "prometheus2_absolute"])
def test_two_ratings_make_a_verdict(name):
    judge_format = get_format(name)
    assert judge_format.render(PAIR) != judge_format.render(PAIR.swap())
    first, second = judge_format.parse("why\n[RESULT] 2\nRating: 2"), judge_format.parse("why\n[RESULT] 4\nRating: 4")
    assert compare_ratings(first, second).label == "B"
    assert compare_ratings(second, first) == Verdict("A", scores=(4.0, 2.0), critique=second.critique, raw=second.raw)
    assert compare_ratings(first, first).label == "tie"
    assert compare_ratings(first, Verdict(None)).label is None
    assert compare_ratings(Verdict(None), first).label is None


def test_better_needs_two_scores():
    assert [better(s) for s in ((2, 1), (1, 2), (1, 1), (1,), (1, 2, 3))] == ["A", "B", "tie", None, None]


def test_four_responses_in_one_prompt():
    four = ["one", "two", "three", "four {{ x }}"]
    text = get_format("rewardbench2").render_list(PAIR, four)[0]["content"]
    for letter, response in zip("ABCD", four, strict=True):
        mark = f"Assistant {letter}'s Answer]"
        assert f"[The Start of {mark}\n{response}\n[The End of {mark}" in text
    read = get_format("rewardbench2").parse_list
    assert read("Not [[A]]. [[C]]", 4) == (0, 0, 1, 0)
    assert read("[[D]]", 3) is None
    assert read("[[A or C]]", 4) is None
    assert get_format("rewardbench2").parse("[[C]]").label is None  # a pair has no third response
    text = get_format("deepseek_grm").render_list(PAIR, four)[0]["content"]
    assert text.endswith("[The Begin of Response 4]\nfour {{ x }}\n[The End of Response 4]")
    assert get_format("deepseek_grm").parse_list(r"<think>\boxed{1,1,1,1}</think>\boxed{3, 9, 2, 1}", 4) == (3, 9, 2, 1)
    assert get_format("deepseek_grm").parse_list(r"\boxed{3, 9}", 4) is None
    with pytest.raises(UserError, match="2 to 26 responses, got 1"):
        get_format("rewardbench2").render_list(PAIR, four[:1])


def test_a_list_format_shows_a_pair_as_a_list_of_two():
    for name in ("rewardbench2", "deepseek_grm"):
        judge_format = get_format(name)
        assert judge_format.render(PAIR) == judge_format.render_list(PAIR, ["Two.", "Ten."])


def test_nemotron_speaks_in_roles_and_in_one_message_where_a_prompt_file_says_so(tmp_path):
    assert get_format("nemotron_genrm").render(PAIR) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "How much?"},
        {"role": "response_1", "content": "Two."},
        {"role": "response_2", "content": "Ten."},
    ]
    prompt = tmp_path / "p.jinja"
    prompt.write_text("{{ context }} | {{ response_a }} | {{ response_b }}")
    (message,) = get_format("nemotron_genrm", str(prompt)).render(PAIR)
    assert message == {"role": "user", "content": "system:\nBe brief.\n\nuser:\nHow much? | Two. | Ten."}


def test_a_strength_is_taught_where_the_pair_has_one():
    judge_format = get_format("think_rm_strength")
    reply = "".join(judge_format.target(PAIR, None))
    assert (judge_format.parse(reply).label, judge_format.parse(reply).strength) == ("A", -2)
    with pytest.raises(UserError, match=r"pair 'p'.*strength"):
        judge_format.target(Pair("p", PAIR.context, "x", "y", "A"), None)
