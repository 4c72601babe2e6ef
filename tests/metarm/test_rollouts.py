"""Rollouts and their exact targets, with a judge whose replies are written here."""

from pathlib import Path

import pytest

from metarm.rollouts import Rollouts, draw, judge_pairs, require_labelled, tidy
from metarm.train import split
from nlhf.critique.matching import CritiqueMatch
from nlhf.critique.scorers import CritiqueScorer, ExactScorer
from nlhf.errors import UserError
from nlhf.files import read_jsonl, write_jsonl
from nlhf.formats import get_format
from nlhf.judge import Judge, Reply
from nlhf.pairs import HumanCritique, Pair, Turn
from nlhf.rewards import CritiqueReward
from nlhf.sampler import put_in_order

HUMAN = HumanCritique(strengths_a="accuracy\ntone")  # A is better, for two reasons


def pair(name="p", label="A", critiques=(HUMAN,), **values):
    return Pair(name, [Turn("user", "q")], f"good {name}", f"bad {name}", label, critiques=list(critiques), **values)


def reply(critique, choice):
    return f"<critics>{critique}</critics><choice>[[{choice}]]</choice>"


class Scripted:
    """A generator that gives the same replies to every prompt, and counts the prompts."""

    def __init__(self, *replies):
        self.replies, self.prompts = replies, 0

    def generate(self, prompts, samples=1, progress=None):
        self.prompts += len(prompts)
        return [[Reply(text, False, 1) for text in self.replies[:samples]] for _ in prompts]


def judge(*replies):
    return Judge(get_format("rm_nlhf"), Scripted(*replies))


def answered(*replies, pairs=None, scorer=None):
    pairs = pairs or [pair()]
    reward = CritiqueReward(scorer or ExactScorer())
    return judge_pairs(judge(*replies), pairs, {p.id: p for p in pairs}, reward, len(replies))


BOTH = "A praise: accuracy\nA praise: tone"
TABLE = [
    ("right, all reasons: F1 1", reply(BOTH, "A"), 1.5, None),
    ("right, one of two reasons: F1 2/3", reply("A praise: accuracy", "A"), 1.5, None),
    # P = 1/2, R = 1/2: F1 is 0.5 exactly, which is enough
    ("right, F1 just 0.5", reply("A praise: accuracy\nB blame: tone", "A"), 1.5, None),
    # P = 1/3, R = 1/2: F1 = 2/5
    ("right, F1 0.4", reply("A praise: accuracy\nB blame: tone\nB blame: safety", "A"), 1.0, None),
    ("right, other reasons", reply("B blame: safety", "A"), 1.0, None),
    ("right, a point made twice", reply("A praise: accuracy\nA praise: accuracy", "A"), 1.0, None),
    ("wrong, sound reasons", reply(BOTH, "B"), 0.0, None),
    ("wrong, unsound reasons", reply("B praise: tone", "B"), 0.0, None),
    ("no verdict", f"<critics>{BOTH}</critics>", None, "format failure"),
    ("no critique", "<choice>[[A]]</choice>", None, "format failure"),
    ("five lines", reply("\n".join("A praise: tone" for _ in range(5)), "A"), None, "format failure"),
]


@pytest.mark.parametrize(("text", "target", "dropped"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_targets(text, target, dropped):
    [example] = answered(text)
    assert (example.target, example.dropped) == (target, dropped)
    assert example.sound == (target == 1.5)


def test_a_failure_of_the_scorer_is_no_target():
    """Its bonus is 0, but MetaRM must not learn that the critique is unsound."""

    class Broken(CritiqueScorer):
        name = "broken"

        def score(self, critiques, pairs):
            return [CritiqueMatch(0.0, 0.0, 0.0, failure="busy") for _ in critiques]

    right, wrong = answered(reply(BOTH, "A"), reply(BOTH, "B"), scorer=Broken())
    assert (right.target, right.dropped) == (None, "scorer failure")
    assert (wrong.target, wrong.dropped) == (0.0, None)  # nothing had to be scored


def test_a_swapped_pair_is_scored_as_it_was_shown():
    """Shown in the other order, B is better and praised."""
    original = pair()
    examples = judge_pairs(
        judge(reply("B praise: accuracy\nB praise: tone", "B")),
        [original.swap()],
        {"p": original},
        CritiqueReward(ExactScorer()),
        1,
    )
    assert [(e.order, e.correct, e.f1, e.target) for e in examples] == [("BA", True, 1.0, 1.5)]
    rollouts = Rollouts({"p": original}, examples)
    assert rollouts.shown(examples[0]) == original.swap()


def test_the_swap_is_seeded_and_every_reply_is_counted(tmp_path):
    pairs = [pair(f"p{i}") for i in range(40)]
    replies = [reply(BOTH, "A"), reply("A praise: safety", "A"), "nothing"]
    draw_all(tmp_path, pairs, replies)
    rollouts = Rollouts.read(tmp_path)
    orders = {e.pair_id: e.order for e in rollouts.examples}
    assert 8 < list(orders.values()).count("BA") < 32
    assert orders == {p.id: "BA" if p.response_a.startswith("bad") else "AB" for p in put_in_order(pairs, "random", 5)}
    straight = list(orders.values()).count("AB")
    assert rollouts.counts() == {
        "pairs": 40,
        "rollouts": 120,
        "targets": {"0": 2 * (40 - straight), "1": straight, "1.5": straight},
        "dropped": {"format failure": 40},
    }


def draw_all(folder: Path, pairs, replies, chunk=7) -> Scripted:
    write_jsonl(folder / "pairs.jsonl", [p.to_dict() for p in pairs])
    answering = judge(*replies)
    originals = {p.id: p for p in pairs}
    reward = CritiqueReward(ExactScorer())
    draw(answering, put_in_order(pairs, "random", 5), originals, reward, len(replies), folder, chunk=chunk)
    tidy(folder, pairs)
    return answering.generator


def test_an_interrupted_drawing_goes_on_where_it_stopped(tmp_path):
    pairs = [pair(f"p{i}") for i in range(9)]
    replies = [reply(BOTH, "A"), reply(BOTH, "B")]
    whole, torn = tmp_path / "whole", tmp_path / "torn"
    assert draw_all(whole, pairs, replies).prompts == 9
    lines = (whole / "rollouts.jsonl").read_text().splitlines(keepends=True)
    torn.mkdir()
    (torn / "rollouts.jsonl").write_text("".join(lines[:11]) + lines[11][:30])  # five pairs, half of a sixth
    assert draw_all(torn, pairs, replies).prompts == 4
    assert (torn / "rollouts.jsonl").read_text() == (whole / "rollouts.jsonl").read_text()


def test_rollouts_that_are_not_whole_are_refused(tmp_path):
    pairs = [pair(f"p{i}") for i in range(4)]
    draw_all(tmp_path, pairs, [reply(BOTH, "A")])
    rows = [row for _, row in read_jsonl(tmp_path / "rollouts.jsonl")]
    write_jsonl(tmp_path / "rollouts.jsonl", rows[:-1])
    with pytest.raises(UserError, match=r"1 of 4 pairs have no rollout.*'p3'.*--resume true"):
        Rollouts.read(tmp_path)
    write_jsonl(tmp_path / "rollouts.jsonl", [{**rows[0], "pair_id": "stranger"}])
    with pytest.raises(UserError, match=r"'stranger' is not in pairs\.jsonl"):
        Rollouts.read(tmp_path)
    write_jsonl(tmp_path / "rollouts.jsonl", [{"pair": 1}])
    with pytest.raises(UserError, match=r"rollouts\.jsonl:1: not a rollout written by this version"):
        Rollouts.read(tmp_path)
    with pytest.raises(UserError, match=r"cannot read .*pairs\.jsonl"):
        Rollouts.read(tmp_path / "nowhere")


def test_without_a_human_critique_there_is_nothing_to_learn():
    assert require_labelled([pair(), pair(critiques=())], "data") == [pair()]
    with pytest.raises(UserError, match=r"data: none of the 2 pairs.*data\.labelled_fraction"):
        require_labelled([pair(critiques=()), pair(critiques=(), label=None)], "data")


def test_the_split_keeps_pairs_and_groups_together():
    pairs = [pair(f"p{i}", group=f"g{i // 2}") for i in range(40)]
    rollouts = Rollouts({p.id: p for p in pairs}, answered(reply(BOTH, "A"), reply(BOTH, "B"), pairs=pairs))
    training, held_out = split(rollouts, 0.1, seed=3)
    groups = [{rollouts.pairs[e.pair_id].group for e in part} for part in (training, held_out)]
    assert not groups[0] & groups[1]
    assert (len(groups[1]), len(held_out), len(training)) == (2, 8, 72)
    assert split(rollouts, 0.1, seed=3) == (training, held_out)
    assert split(rollouts, 0.1, seed=4) != (training, held_out)
    assert len(split(rollouts, 0.001, seed=3)[1]) == 4  # never empty


def test_a_judge_that_does_not_know_its_format_is_said_so():
    rollouts = Rollouts({"p": pair()}, answered("nonsense", "nonsense"))
    with pytest.raises(UserError, match=r"only 0 of 2 rollouts.*'format failure': 2.*nlhf cold-start"):
        split(rollouts, 0.05, 0)
