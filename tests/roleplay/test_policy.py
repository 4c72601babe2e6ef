"""A role-play policy: what it learns, what its judge sees of it, and what a run records."""

import json
from pathlib import Path

import pytest
import yaml

from nlhf.cli import main, make_parser
from nlhf.cold_start import cold_start
from nlhf.comparer import Comparer
from nlhf.errors import UserError
from nlhf.files import read_jsonl
from nlhf.formats import get_format
from nlhf.judge import Judge, Reply
from nlhf.judging import PairJudge
from nlhf.models import model_hash
from nlhf.pairs import Turn
from nlhf.policy_reward import PolicyReward, PolicyRewardConfig
from nlhf.policy_validation import PolicyWatch
from nlhf.roleplay.conversations import ConversationConfig
from nlhf.suite import Stage
from nlhf.train_policy import PromptConfig, train_policy

ROOT = Path(__file__).resolve().parents[2]
EXPERIMENTS = ROOT / "experiments/policy/roleplay"
START = "random:qwen3-tiny"


def turn(speech: str, plan: str = "He may be short.", who: str = "Tom") -> str:
    return f"<system_thinking>{plan}</system_thinking>\n\n{who}: <role_action>nods</role_action> {speech}"


# ----------------------------------------------------------------------------------------------------------- the reward


class Longer:
    """A judge's model: the longer reply is better; it keeps what it was shown."""

    def __init__(self):
        self.prompts: list[str] = []

    def generate(self, prompts, samples=1, progress=None):
        self.prompts += [prompt[0]["content"] for prompt in prompts]
        return [[self.reply(prompt[0]["content"])] for prompt in prompts]

    def reply(self, text: str) -> Reply:
        first, second = text.split("1: ")[1].split("\n2: ")
        return Reply(f'{{"better_response": "{"cand_1" if len(first) > len(second) else "cand_2"}"}}', False, 9)


@pytest.fixture
def judge(tmp_path) -> Longer:
    return Longer()


def rewarded(judge: Longer, tmp_path, completions, references, **config):
    prompt = tmp_path / "prompt.jinja"
    prompt.write_text("{{ context }}\n1: {{ response_a }}\n2: {{ response_b }}", encoding="utf-8")
    comparer = Comparer(PairJudge(Judge(get_format("her_rm", str(prompt)), judge)))
    found: dict[str, float] = {}
    rewards = PolicyReward(comparer, PolicyRewardConfig(**config))(
        prompts=["You are Tom, and want this: the secret."] * len(completions),
        completions=completions,
        reference=references,
        scenes=[(Turn("system", "A house."), Turn("Ada(user)", "Well?"))] * len(completions),
        characters=["Tom"] * len(completions),
        log_metric=found.__setitem__,
    )
    return rewards, found


MALFORMED = [
    "Tom: No plan.",
    turn("Another speaks.", who="Ada"),
    "<system_thinking>Cut off",
    "Hm.",
    "<system_thinking>A plan.</system_thinking> Tom: <role_thinking>silent</role_thinking>",
]


def test_the_judge_sees_its_own_view_and_no_plan(judge, tmp_path):
    rewards, _ = rewarded(judge, tmp_path, [turn("I am here, Ada.")], [turn("Yes.")])
    assert rewards == [1.0]
    assert sorted(judge.prompts)[0] == (
        "id:1, system(system): A house.\nid:2, Ada(user): Well?\n"
        "1: Tom: <role_action>nods</role_action> I am here, Ada.\n2: Tom: <role_action>nods</role_action> Yes."
    )
    assert len(judge.prompts) == 2  # both orders
    assert "short" not in "".join(judge.prompts)


@pytest.mark.parametrize("text", MALFORMED, ids=["no plan", "another speaks", "cut off", "no turn", "silent"])
def test_a_malformed_turn_loses_without_being_shown(judge, tmp_path, text):
    whole = turn("Yes.")
    rewards, found = rewarded(judge, tmp_path, [text, whole, text, whole], [whole, text, text, whole])
    assert rewards == [-1.0, 1.0, 0.0, 0.0]  # antisymmetric; two malformed ones are a tie
    assert judge.prompts == []
    assert found["response/format_rate"] == 0.5
    assert found["response/characters"] == len("Tom: <role_action>nods</role_action> Yes.")


def test_a_batch_of_malformed_turns_is_a_batch_of_ties(judge, tmp_path):
    rewards, found = rewarded(judge, tmp_path, MALFORMED, MALFORMED[::-1])
    assert rewards == [0.0] * len(MALFORMED)
    assert found["response/format_rate"] == 0
    assert "response/characters" not in found


def test_in_a_tournament_malformed_turns_come_last(judge, tmp_path):
    texts = [turn("Yes."), "Hm.", turn("Yes, I am here, Ada."), "Tom: No plan.", turn("Yes, Ada.")]
    rewards, _ = rewarded(judge, tmp_path, texts, None, kind="tournament")
    assert rewards[1] == rewards[3] == 0.0
    assert rewards[2] == 1.0
    assert not [prompt for prompt in judge.prompts if "Hm." in prompt or "No plan" in prompt]


def test_two_plans_and_one_turn_are_equal(judge, tmp_path):
    rewards, found = rewarded(judge, tmp_path, [turn("Yes.", "One plan.")], [turn("Yes.", "Another.")])
    assert (rewards, judge.prompts) == ([0.0], [])
    assert found["judge/tie_rate"] == 1


# ------------------------------------------------------------------------------------------------------------- warnings


def test_warnings_speak_of_a_policy(caplog):
    class State:
        is_world_process_zero, global_step = True, 1

    watch = PolicyWatch()
    watch.on_log(None, State, None, {"completions/clipped_ratio": 0.5, "frac_reward_zero_std": 0.9})
    watch.on_log(None, State, None, {"response/format_rate": 0.9})
    watch.on_log(None, State, None, {"response/format_rate": 0.1})
    said = caplog.text
    assert "50% of the replies hit the token limit and are judged as far as they go; raise grpo.max_comp" in said
    assert "use harder prompts" in said
    assert "only 10% of the replies are well-formed, down from 90%" in said
    assert "verdict" not in said
    assert "pairs" not in said


# ----------------------------------------------------------------------------------------------------------- end to end

SFT = {"max_steps": 2, "per_device_train_batch_size": 4, "max_length": 4000, "learning_rate": 1e-3}


def run(verb: str, config: dict, out: Path, *options: str) -> int:
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    return main([verb, "--config", str(out.with_suffix(".yaml")), "--out", str(out), *options])


@pytest.fixture(scope="module")
def writer(tmp_path_factory) -> Path:
    """A cold start on conversations."""
    out = tmp_path_factory.mktemp("writer") / "run"
    config = {"model": {"name": START}, "conversations": {"n": 24}, "sft": SFT}
    assert run("cold-start", config, out) == 0
    return out


def policy_config(writer: Path) -> dict:
    conversations = {"n": 24}
    return {
        "model": {"name": str(writer / "final")},
        "prompts": {"conversations": conversations, "limit": 3},
        "judge": {
            "model": {"name": "random:qwen3-tiny:1"},
            "format": "her_rm",
            "prompt_file": str(EXPERIMENTS / "judge.jinja"),
            "mode": "probability",
            "sampling": {"max_new_tokens": 8},
        },
        "grpo": {
            "max_steps": 2,
            "per_device_train_batch_size": 4,
            "num_generations": 4,
            "max_prompt_length": 2000,
            "max_completion_length": 8,
            "save_steps": 1,
        },
        "validation": {"prompts": {"conversations": {**conversations, "split": "held_out"}, "limit": 4}, "every": 2},
    }


@pytest.fixture(scope="module")
def policy(writer, tmp_path_factory) -> Path:
    """Two steps of reinforcement of that cold start, which is its own reference."""
    out = tmp_path_factory.mktemp("policy") / "run"
    assert run("train-policy", policy_config(writer), out) == 0
    return out


def test_the_cold_start_says_what_it_learned_from(writer):
    manifest = json.loads((writer / "manifest.json").read_text())
    found = ConversationConfig(n=24).load()
    assert manifest["rows"] == len(found) == manifest["conversations"]["conversations"] == 14
    assert manifest["conversations"]["groups"] == sorted({c.group for c in found})
    assert (manifest["data"], manifest["too_long"]) == ([], 0)


def test_the_cold_start_is_the_reference_and_its_hash_is_recorded(writer, policy):
    manifest = json.loads((policy / "manifest.json").read_text())
    assert manifest["reference"] == {
        "model": str(writer / "final"),
        "weights": model_hash(str(writer / "final")),
    }


def test_held_out_responses_are_kept_with_their_scenario(policy):
    found = [row for _, row in read_jsonl(policy / "held_out.jsonl")]
    held_out = {c.group for c in ConversationConfig(split="held_out", n=24).load()}
    assert [row["step"] for row in found] == [0] * 4 + [2] * 4
    assert {row["group"] for row in found} <= held_out
    references = {row["response"] for _, row in read_jsonl(policy / "references.jsonl") if row["greedy"]}
    for row in found:
        assert row["reference"] in references
        assert row["shown"] is None  # a random model writes no turn
        assert row["margin"] == 0
    assert [row["response"] for row in found[:4]] == [row["reference"] for row in found[:4]]


def test_the_form_is_a_figure_of_a_role_play_policy(policy):
    rows = [row for _, row in read_jsonl(policy / "metrics.jsonl")]
    assert [row["validation/format_rate"] for row in rows if "validation/score" in row] == [0, 0]
    assert [row["response/format_rate"] for row in rows if "reward" in row] == [0, 0]
    keys = {key for row in rows for key in row if key.startswith("rewards/")}
    assert keys == {"rewards/policy_reward/mean", "rewards/policy_reward/std"}
    text = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    assert "`response/format_rate`" in text


def test_resuming_may_change_how_long_a_server_is_waited_for(writer, policy, capsys):
    config = policy_config(writer)
    config["judge"]["backend"] = {"timeout": 7, "retries": 9, "concurrency": 3}
    assert run("train-policy", config, policy, "--resume", "true") == 0
    config["judge"]["mode"] = "generate"
    assert run("train-policy", config, policy, "--resume", "true") == 2
    assert "judge.mode" in capsys.readouterr().err


def test_a_scenario_that_is_trained_on_cannot_be_held_out(writer, tmp_path, capsys):
    config = policy_config(writer)
    config["validation"]["prompts"]["conversations"]["split"] = "train"
    config["validation"]["prompts"] |= {"skip": 7}  # other conversations of the same scenarios
    assert run("train-policy", config, tmp_path / "run") == 2
    assert "belong to a group that is" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": [{"source": "sandbox"}]}, "set either data (pairs, for a judge) or conversations"),
        ({"conversations": None}, "set either data (pairs, for a judge) or conversations"),
        ({"validation": {"data": {"source": "sandbox"}}}, "validation judges pairs, which a policy does not"),
        ({"conversations": {"path": "nowhere.jsonl"}}, "nowhere.jsonl"),
    ],
    ids=["both", "neither", "validation", "no file"],
)
def test_a_cold_start_that_cannot_be(tmp_path, capsys, change, message):
    config = {"model": {"name": START}, "conversations": {}, "sft": SFT, **change}
    assert run("cold-start", {k: v for k, v in config.items() if v is not None}, tmp_path / "run") == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("sources", [{}, {"file": "a", "conversations": ConversationConfig()}], ids=["none", "two"])
def test_prompts_have_one_source(sources):
    with pytest.raises(UserError, match="either file, data or conversations"):
        PromptConfig(**sources)


# ---------------------------------------------------------------------------------------------------------- experiments


def read(name: str, function, **change):
    values = yaml.safe_load((EXPERIMENTS / name).read_text(encoding="utf-8"))
    parser = make_parser(function, "nlhf")
    return parser.instantiate(parser.parse_object({**values, "out": "run", **change}))


@pytest.mark.parametrize("name", ["writer.yaml", "judge.yaml"])
def test_the_cold_starts_are_accepted_as_written(monkeypatch, name):
    monkeypatch.chdir(ROOT)
    read(name, cold_start)


@pytest.mark.parametrize("name", ["policy.yaml", "her_32b.yaml"])
def test_the_reinforcements_are_accepted_as_written(monkeypatch, name):
    monkeypatch.chdir(ROOT)
    values = yaml.safe_load((EXPERIMENTS / name).read_text(encoding="utf-8"))
    if "model" in values["judge"]:  # both models are made by the experiment's first commands
        values["judge"]["model"]["name"] = START
    settings = read(name, train_policy, model={"name": START}, judge=values["judge"])
    if name == "policy.yaml":
        training, held_out = settings.prompts.load(), settings.validation.prompts.load()
        assert not {prompt.group for prompt in training} & {prompt.group for prompt in held_out}
        learned = {c.group for c in read("writer.yaml", cold_start).conversations.load()}
        assert learned == {prompt.group for prompt in training}


def test_a_suite_knows_the_verb():
    assert Stage(str(EXPERIMENTS / "policy.yaml"), "train-policy").prog == "nlhf train-policy"


def test_the_suite_is_accepted_as_written(monkeypatch):
    """Every stage is read with its options, as it is before anything is trained."""
    from nlhf.suite import _check, suite

    monkeypatch.chdir(ROOT)
    s = read("suite.yaml", suite)
    _check(s.seeds, s.start, s.prepare, s.arms, s.tests, s.baseline, s.metrics, s.workers, s.threads)


def test_a_policy_is_no_arm_of_a_suite(monkeypatch):
    from nlhf.suite import _check_stage

    with pytest.raises(UserError, match="train-policy is for a step of prepare"):
        _check_stage("arm 'x'", Stage(str(EXPERIMENTS / "policy.yaml"), "train-policy"), [])


def test_a_resumed_run_forgets_what_it_will_repeat(tmp_path):
    """A held-out response belongs to the step it comes after, as a row of metrics does."""
    from nlhf.files import write_jsonl
    from nlhf.training import forget_after

    write_jsonl(tmp_path / "held_out.jsonl", [{"step": step} for step in (0, 0, 2, 3)])
    forget_after(tmp_path, 2)
    assert [row["step"] for _, row in read_jsonl(tmp_path / "held_out.jsonl")] == [0, 0, 2]


@pytest.mark.slow
def test_the_suite_goes_from_nothing_to_a_policy(tmp_path, monkeypatch):
    """As written, but with tiny models and a few steps: judge, writer, policy, and the judge on held-out scenarios."""
    from nlhf.files import read_yaml

    monkeypatch.chdir(ROOT)
    small = {
        "judge": {"model.name": START, "sft.max_steps": 1, "sft.max_length": 4000, "data.0.options.n": 16},
        "writer": {"model.name": START, "sft.max_steps": 1, "sft.max_length": 4000, "conversations.n": 24},
        "policy": {
            **{"grpo.max_steps": 1, "grpo.max_prompt_length": 3000, "grpo.max_completion_length": 8},
            **{"prompts.limit": 3, "validation.prompts.limit": 5},
        },
        "evaluate": {"data.options.n": 8},
    }
    values = read_yaml(str(EXPERIMENTS / "suite.yaml"))
    stages = [values["start"], *(step["stage"] for step in values["prepare"]), values["tests"][0]["evaluate"]]
    for stage in stages:
        stage["options"] = stage.get("options", {}) | small[Path(stage["config"]).stem]
    (tmp_path / "suite.yaml").write_text(yaml.safe_dump({**values, "out": str(tmp_path / "suite"), "ledger": None}))
    assert main(["suite", "--config", str(tmp_path / "suite.yaml")]) == 0
    seed = tmp_path / "suite/seed-0"
    manifest = json.loads((seed / "policy/train/manifest.json").read_text())
    assert manifest["judge"]["weights"] == model_hash(str(seed / "start/train/final"))
    assert manifest["reference"]["weights"] == model_hash(str(seed / "writer/train/final"))
    assert (seed / "judge/test-held-out-scenarios/report.md").is_file()
    assert (seed / "policy/train/held_out.jsonl").is_file()
