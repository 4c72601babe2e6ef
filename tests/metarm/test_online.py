"""MetaReward: the order of a step, what it pays, what it keeps, and several processes that agree."""

import math
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from metarm import MetaReward, MetaRM
from metarm.rollouts import TARGETS
from nlhf.critique.matching import CritiqueMatch
from nlhf.critique.scorers import CritiqueScorer, ExactScorer
from nlhf.errors import UserError
from nlhf.formats import get_format
from nlhf.models import ModelConfig
from nlhf.pairs import hide_critiques
from nlhf.rewards import CritiqueReward, JudgeReward, LearningReward, RewardConfig, Rollout, total_reward, well_formed
from nlhf.sandbox.world import draw_pairs

FORMAT = get_format("sandbox")
PAIRS = hide_critiques(draw_pairs("train", n=12, seed=0), 0.5, seed=0)
ROOT = Path(__file__).resolve().parents[2]


def rollouts_of(pairs=PAIRS) -> list[Rollout]:
    """Three rollouts of each pair: right and unsound or sound by chance, wrong, and ill-formed."""
    found = []
    for i, pair in enumerate(pairs):
        wrong = "B" if pair.label == "A" else "A"
        aspect = pair.meta["decisive"] if i % 2 else "tone"
        critique = f"{pair.label} praise: {aspect} \n {wrong} blame: {aspect}"
        for text in (
            f"<critics> {critique} </critics> <choice> [[{pair.label}]] </choice>",
            f"<critics> {critique} </critics> <choice> [[{wrong}]] </choice>",
            "<critics>",
        ):
            verdict = FORMAT.parse(text)
            found.append(Rollout(pair, verdict, text, well_formed(verdict, RewardConfig())))
    return found


def make(folder, **options) -> MetaReward:
    options = {"learning_rate": 1e-2, **options}
    return MetaReward(model=str(folder), scorer=ExactScorer(), **options)


def call(reward, rollouts=None):
    logged = {}
    rollouts = rollouts_of() if rollouts is None else rollouts
    return reward(rollouts, logged.__setitem__), logged


def weights(reward) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in reward.metarm.model.state_dict().items()}


def assert_equal(a, b) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


# --------------------------------------------------------------------------------------------------------- what it pays


class Says:
    """Stands for a MetaRM whose scores are known."""

    def __init__(self, score):
        self.value, self.shortened = score, {}

    def encode(self, pairs, critiques):
        return [[1]] * len(pairs)

    def score_ids(self, rows, batch_size=1):
        return [self.value] * len(rows)


def paid(score, folder, **options):
    reward = make(folder, online=False, **options)
    reward.metarm = Says(score)
    rollouts = rollouts_of()
    bonuses, _ = call(reward, rollouts)
    return rollouts, bonuses


@pytest.mark.parametrize(
    ("score", "paper", "matched"),
    [
        (-3.0, 0.0, 0.0),
        (0.0, 0.0, 0.0),
        (1.0, 0.0, 0.0),
        (1.25, 0.25, 0.5),
        (1.5, 0.5, 1.0),
        (1.75, 0.75, 1.0),
        (9.0, 1.0, 1.0),
    ],
)
@pytest.mark.parametrize("form", ["paper", "matched"])
def test_bonus_of_unlabelled_rollouts(metarm_folder, score, paper, matched, form):
    """paper: max(0, m - 1), so R = 1 + 0.5 max(0, m - 1); matched: clip(2 (m - 1), 0, 1)."""
    expected = {"paper": paper, "matched": matched}[form]
    rollouts, bonuses = paid(score, metarm_folder, unlabelled_bonus=form)
    for rollout, bonus in zip(rollouts, bonuses, strict=True):
        if rollout.pair.has_critique:
            continue
        reward = total_reward(rollout, bonus, RewardConfig())
        right = rollout.well_formed and rollout.correct
        assert bonus == (expected if right else None)
        assert reward == (1 + 0.5 * expected if right else 0.0 if rollout.well_formed else -1.0)


def test_labelled_rollouts_earn_what_the_human_critique_says(metarm_folder):
    rollouts, bonuses = paid(1.5, metarm_folder)
    human = CritiqueReward(ExactScorer())(rollouts, lambda *_: None)
    labelled = [i for i, r in enumerate(rollouts) if r.pair.has_critique]
    assert [bonuses[i] for i in labelled] == [human[i] for i in labelled]
    assert {human[i] for i in labelled} == {0.0, 1.0}


def test_without_outcome_the_score_is_the_reward_whatever_the_label(metarm_folder):
    reward = make(metarm_folder, online=False, outcome_gate=False)
    reward.metarm = Says(0.75)
    rollouts = rollouts_of()
    judged = JudgeReward(PAIRS, FORMAT.parse, RewardConfig(), reward)
    index = [PAIRS.index(r.pair) for r in rollouts]
    rewards = judged([r.text for r in rollouts], index, log_metric=lambda *_: None)
    human = CritiqueReward(ExactScorer())(rollouts, lambda *_: None)
    for rollout, bonus, found in zip(rollouts, human, rewards, strict=True):
        if not rollout.well_formed:
            assert found == -1.0
        elif rollout.pair.has_critique:  # as ever: 0, 1 or 1.5
            assert found == total_reward(rollout, bonus, TARGETS)
        else:
            assert found == 0.75


@pytest.mark.parametrize("score", [math.nan, math.inf])
def test_a_score_that_is_no_number_is_an_error_that_names_the_pair(metarm_folder, score):
    with pytest.raises(FloatingPointError, match=r"pair 'sandbox-train-.*MetaRM's score is (nan|inf)"):
        paid(score, metarm_folder)


# -------------------------------------------------------------------------------------------------- the order of a step


def test_it_learns_from_this_batch_and_then_scores(metarm_folder):
    """The same step by hand: one AdamW step on the mean squared error over labelled, well-formed rollouts."""
    rollouts = rollouts_of()
    reward = make(metarm_folder, unlabelled_bonus="matched")
    bonuses, logged = call(reward, rollouts)

    metarm = MetaRM.load(ModelConfig(str(metarm_folder)))
    human = CritiqueReward(ExactScorer())(rollouts, lambda *_: None)
    rows = [i for i, r in enumerate(rollouts) if r.pair.has_critique and r.well_formed]
    targets = torch.tensor([total_reward(rollouts[i], human[i], TARGETS) for i in rows])
    assert set(targets.tolist()) == {0.0, 1.0, 1.5}

    def encoded(indices):
        return metarm.encode([rollouts[i].pair for i in indices], [rollouts[i].verdict.critique for i in indices])

    optimizer = torch.optim.AdamW(metarm.model.parameters(), lr=1e-2, weight_decay=0.01)
    before = metarm.predict(encoded(rows))
    loss = ((before - targets) ** 2).mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(metarm.model.parameters(), 1.0)
    optimizer.step()
    after = torch.tensor(metarm.score_ids(encoded(rows)))
    unlabelled = [i for i, r in enumerate(rollouts) if not r.pair.has_critique and r.well_formed and r.correct]
    for i, score in zip(unlabelled, metarm.score_ids(encoded(unlabelled)), strict=True):
        assert bonuses[i] == pytest.approx(min(1, max(0, 2 * (score - 1))), abs=1e-4)
    assert logged["metarm/mse_before"] == pytest.approx(loss.item(), rel=1e-4)
    assert logged["metarm/mse_after"] == pytest.approx(((after - targets) ** 2).mean().item(), rel=1e-3)
    assert logged["metarm/mse_after"] != logged["metarm/mse_before"]
    assert logged["metarm/labelled"] == len(rows) == 12
    assert logged["metarm/wrong_label_rate"] == 0.5
    for name, value in metarm.model.state_dict().items():
        assert torch.allclose(value, weights(reward)[name], atol=2e-5), name


def test_a_text_that_several_rollouts_wrote_goes_through_the_model_once(metarm_folder, monkeypatch):
    """A right and a wrong verdict after one critique are one text with two targets: the step is that of both rows."""
    reward = make(metarm_folder)
    reward.prepare()
    rows, predict = [], reward.metarm.predict
    monkeypatch.setattr(reward.metarm, "predict", lambda ids: rows.extend(map(tuple, ids)) or predict(ids))
    _, logged = call(reward)
    assert logged["metarm/labelled"] == 12
    assert len(rows) == 6 + 6 + 6  # learned from, measured afterwards, and the unlabelled ones
    assert len(set(rows)) == 12


def test_every_weight_moves_and_the_error_falls(metarm_folder):
    """Down to its floor: each critique stands under both labels, half of them sound, so that the best score of a text
    is 0.75 or 0.5, and the error (0.75^2 + 0.5^2) / 2 = 0.40625."""
    reward = make(metarm_folder, learning_rate=1e-3)
    reward.prepare()
    before = weights(reward)
    errors = [call(reward)[1]["metarm/mse_after"] for _ in range(12)]
    assert errors[0] > 0.43
    assert errors[-1] == pytest.approx(0.40625, abs=0.015)
    assert not [name for name, value in weights(reward).items() if torch.equal(value, before[name])]
    assert reward.updates == 12


@pytest.mark.parametrize("setting", ["online: false", "evaluation", "nothing labelled"])
def test_when_nothing_is_learned(metarm_folder, setting):
    reward = make(metarm_folder, online=setting != "online: false")
    reward.prepare()
    reward.training = setting != "evaluation"
    before, state = weights(reward), reward.state_dict()
    rollouts = rollouts_of()
    if setting == "nothing labelled":
        rollouts = [r for r in rollouts if not r.pair.has_critique]
    bonuses, logged = call(reward, rollouts)
    assert_equal(weights(reward), before)
    assert reward.updates == 0
    assert logged["metarm/scored"] == 6
    assert any(b is not None for b in bonuses)
    if setting == "nothing labelled":
        assert logged["metarm/labelled"] == 0
        assert "metarm/mse_before" not in logged
    else:
        assert logged["metarm/mse_before"] == logged["metarm/mse_after"]
    if setting != "online: false":
        assert reward.state_dict()["window"] == state["window"] == []


def test_a_failure_of_the_scorer_teaches_nothing(metarm_folder):
    class Broken(CritiqueScorer):
        name = "broken"

        def score(self, critiques, pairs):
            return [CritiqueMatch(0.0, 0.0, 0.0, failure="busy") for _ in critiques]

    reward = MetaReward(model=str(metarm_folder), scorer=Broken())
    bonuses, logged = call(reward)
    assert logged["process/scorer_failures"] == 6
    assert logged["metarm/labelled"] == 6  # the wrong labels, which need no scorer
    assert logged["metarm/wrong_label_rate"] == 1.0
    assert [b for b, r in zip(bonuses, rollouts_of(), strict=True) if r.pair.has_critique] == [0.0] * 18


# ------------------------------------------------------------------------------------------------------------- the gate


def test_the_gate_opens_when_enough_was_measured_and_well(metarm_folder):
    reward = make(metarm_folder, online=False, gate_auc=0.8, gate_rows=6, window=10)
    reward.metarm = Says(1.5)
    bonuses, logged = call(reward)  # six right labelled rollouts, all scored the same: AUC 0.5
    assert logged["metarm/gate_open"] == 0.0
    assert logged["metarm/auc"] == 0.5
    assert [b for b, r in zip(bonuses, rollouts_of(), strict=True) if not r.pair.has_critique] == [None] * 18
    reward._window.clear()
    reward._window.extend([(1.0, True), (0.5, False), (0.4, False)])
    assert not reward._gate_is_open()  # good, but only three were measured
    reward._window.extend([(1.0, True), (0.5, False), (0.4, False)])
    assert reward._gate_is_open()
    reward._window.extend([(0.1, True)] * 4)  # ten in the window: (2 x 4 + 4 x 0) / (6 x 4)
    assert reward._window_auc() == pytest.approx(8 / 24)
    assert not reward._gate_is_open()


def test_the_window_holds_scores_from_before_the_update(metarm_folder):
    """Measured after learning, the AUC would flatter MetaRM."""
    reward, fresh = make(metarm_folder), make(metarm_folder, online=False)
    call(reward), call(fresh)
    assert [s for s, _ in reward._window] == pytest.approx([s for s, _ in fresh._window], abs=1e-5)
    right = [r for r in rollouts_of() if r.pair.has_critique and r.correct]
    assert len(reward._window) == len(right) == 6


# ---------------------------------------------------------------------------------------------------------------- state


def test_state_is_restored_exactly(metarm_folder, tmp_path):
    whole, first, second = (make(metarm_folder, window=8, gate_rows=2) for _ in range(3))
    results = [call(whole) for _ in range(5)]
    for _ in range(2):
        call(first)
    torch.save(first.state_dict(), tmp_path / "state.pt")
    second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert [call(second) for _ in range(3)] == results[2:]
    assert_equal(weights(second), weights(whole))
    assert second.updates == whole.updates == 5
    assert second._window == whole._window


def test_lora_learns_adapters_and_head_only(metarm_folder, tmp_path):
    whole, second = (make(metarm_folder, lora={"rank": 2, "alpha": 4}) for _ in range(2))
    torch.manual_seed(0)
    whole.prepare()
    start = weights(whole)
    call(whole)
    moved = {name for name, value in weights(whole).items() if not torch.equal(value, start[name])}
    assert moved
    assert all("lora_" in name or "modules_to_save" in name for name in moved)
    torch.save(whole.state_dict(), tmp_path / "state.pt")
    second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert call(second) == call(whole)


def test_chance_is_not_touched(metarm_folder):
    """Otherwise the judge's rollouts would depend on how often MetaRM learns."""
    reward = make(metarm_folder)
    reward.prepare()
    before = torch.random.get_rng_state()
    call(reward)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_it_keeps_the_contract_of_a_learning_reward(metarm_folder):
    assert isinstance(make(metarm_folder), LearningReward)
    assert not isinstance(CritiqueReward(ExactScorer()), LearningReward)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"unlabelled_bonus": "papers"}, "unlabelled_bonus must be one of paper, matched"),
        ({"learning_rate": 0}, "learning_rate and max_grad_norm must be positive"),
        ({"gate_auc": 1.5}, r"gate_auc must lie in \[0.5, 1\)"),
        ({"gate_rows": 9, "window": 8}, "the gate would never open"),
        ({"batch_size": 0}, "batch_size and gate_rows must be at least 1"),
        ({"model": "no/such/folder"}, "no/such/folder does not exist"),
    ],
)
def test_settings_that_cannot_work_are_refused(metarm_folder, options, message):
    with pytest.raises(UserError, match=message):
        MetaReward(**{"model": str(metarm_folder), "scorer": ExactScorer(), **options})


# ---------------------------------------------------------------------------------------------------- several processes

CASES = ("both", "one without", "one row", "three rows", "none")
WORKER = """
import sys, torch
from accelerate import PartialState
from tests.metarm.test_online import found, shares

rank = PartialState(cpu=True).process_index
folder, out = sys.argv[1:]
torch.save({case: found(folder, split[rank]) for case, split in shares().items()}, f"{out}/{rank}.pt")
torch.distributed.destroy_process_group()
"""


def found(folder, rollouts) -> dict:
    """State and results of three steps; unclipped, for clipped gradients hide what the loss was divided by."""
    reward = make(folder, learning_rate=1e-3, batch_size=4, max_grad_norm=1e6)
    results = [call(reward, rollouts) for _ in range(3)]
    return {"state": reward.state_dict(), "results": results}


def shares() -> dict[str, list[list[Rollout]]]:
    """What each of two processes sees."""
    rollouts = rollouts_of()
    labelled = [r for r in rollouts if r.pair.has_critique]
    others = [r for r in rollouts if not r.pair.has_critique]
    split = (
        [rollouts[:20], rollouts[20:]],
        [others, labelled],
        [others + labelled[:1], others],
        [others + labelled[:2], others + labelled[3:4]],
        [others[:9], others[9:]],
    )
    return dict(zip(CASES, split, strict=True))


@pytest.fixture(scope="module")
def processes(metarm_folder, tmp_path_factory):
    """What each of two processes found in each case."""
    out = tmp_path_factory.mktemp("processes")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    local = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(metarm_folder), str(out)],
            env=os.environ | rendezvous | local | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            cwd=ROOT,
        )
        for rank in range(2)
    ]
    try:
        assert [worker.wait(timeout=240) for worker in workers] == [0, 0]
    finally:
        for worker in workers:
            worker.kill()
    return [torch.load(out / f"{rank}.pt") for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_two_processes_take_the_step_of_one(processes, metarm_folder, case):
    """Equal weights on both, and those of one process with all rollouts, also where a process has nothing labelled."""
    left, right = (process[case] for process in processes)
    first, second = shares()[case]
    alone = found(metarm_folder, first + second)
    assert_equal(left["state"]["model"], right["state"]["model"])
    moments = [x["state"]["optimizer"]["state"] for x in (left, right, alone)]
    for key in moments[0]:
        assert_equal(moments[0][key], moments[1][key])
        ours, whole = (m[key]["exp_avg"] for m in (moments[0], moments[2]))
        assert (ours - whole).norm() <= 1e-2 * whole.norm()  # AdamW itself does not see a wrong divisor, but for this
    assert left["state"]["window"] == right["state"]["window"]
    updates = 0 if case == "none" else 3
    assert [x["state"]["updates"] for x in (left, right, alone)] == [updates] * 3
    for name, value in alone["state"]["model"].items():
        assert torch.allclose(value, left["state"]["model"][name], atol=2e-5), name
    for step in range(3):
        (bonus_l, log_l), (bonus_r, log_r), (bonus, log) = (x["results"][step] for x in (left, right, alone))
        assert [b or 0.0 for b in bonus_l + bonus_r] == pytest.approx([b or 0.0 for b in bonus], abs=1e-3)
        for key in log:
            if key.startswith("metarm/mse"):
                assert log_l[key] == log_r[key] == pytest.approx(log[key], rel=1e-3)
