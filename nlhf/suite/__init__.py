"""Experiments as arms x seeds: every arm from the same start, judged on the same pairs, compared in one table.

Beside the path of a pair: a suite runs `cold-start`, `train` and `evaluate` for every arm and seed, some at a time,
each in a process of its own, and can be interrupted: what is done is not done again. The unit of its intervals is the
training run, so they say how sure a result is for the method, not for one set of weights.
"""

import itertools
import os
import re
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from nlhf.errors import UserError, nearest
from nlhf.files import check_appendable, read_yaml
from nlhf.runs import check_seed, holds_run, open_run
from nlhf.suite.board import Board

VERBS = {
    "cold-start": "nlhf.cold_start:cold_start",
    "train": "nlhf.train:train",
    "train-policy": "nlhf.train_policy:train_policy",
    "evaluate": "nlhf.evaluate:evaluate",
}
START = "start"
_LONGEST_NAME = 200  # file systems end at 255 bytes, and a log or a test adds to it
_ANY_MODEL = "package:nlhf"  # stands for the one that is not trained yet, while a configuration is checked
# Settings that change how a suite is run or shown, not what its runs compute.
_MAY_DIFFER = ("out", "workers", "threads", "ledger", "metrics", "baseline")


@dataclass
class Stage:
    """One verb with its YAML."""

    config: str
    """YAML file of the verb."""

    verb: str = "train"
    """cold-start, train or evaluate, and in a step of prepare train-policy; or a verb of a package that builds on this
    one, after its name: metarm train."""

    options: dict[str, Any] = field(default_factory=dict)
    """Values that replace the YAML's, by dotted key; a number picks from a list: {data.0.labelled_fraction: 0.25}. In a
    text, {start} and the name of a step of prepare, in braces too, stand for its folder with the same seed."""

    def __post_init__(self):
        _ = self.target
        if not Path(self.config).is_file():
            raise UserError(f"{self.config}: no such file (paths are relative to the folder you start from)")

    @property
    def target(self) -> str:
        """The verb's function, as module:name."""
        if self.verb in VERBS:
            return VERBS[self.verb]
        package, _, verb = self.verb.partition(" ")
        try:
            verbs = import_module(f"{package}.__main__").VERBS if verb else {}
        except (ImportError, AttributeError, TypeError, ValueError):  # a name like "..a" is no package
            verbs = {}
        if verb not in verbs:
            raise UserError(
                f"unknown verb {self.verb!r} in a suite, which trains judges and measures them; known: "
                f"{', '.join(VERBS)}, metarm train, ..."
            )
        return verbs[verb][0]

    @property
    def prog(self) -> str:
        """The command that it stands for."""
        return f"nlhf {self.verb}" if self.verb in VERBS else self.verb


@dataclass
class Step:
    """What is made once for each seed, from its start, for several arms to use."""

    name: str
    """Its name in the options of stages, in braces."""

    stage: Stage
    """How it is made."""


@dataclass
class Arm:
    """One way of training."""

    name: str
    """Name in tables."""

    train: Stage | None = None
    """How it is trained, from the start; null judges the start itself."""

    model: Literal["final", "best"] = "final"
    """Which model is judged: final (after the last step) or best (by validation)."""


@dataclass
class Test:
    """One data set to judge."""

    name: str
    """Name in tables."""

    evaluate: Stage
    """How it is judged."""


@dataclass
class Job:
    """What one worker process does: a common start, a step of prepare, or an arm (train it, judge it), for one seed."""

    seed: int
    name: str
    folder: Path
    stage: Stage | None = None
    arm: Arm | None = None
    done: bool = False

    @property
    def log(self) -> Path:
        """What the job prints."""
        return self.folder.parent / f"{self.folder.name}.log"


def suite(
    name: str,
    out: str,
    seeds: list[int],
    start: Stage,
    arms: list[Arm],
    tests: list[Test],
    baseline: str,
    prepare: list[Step] | None = None,
    workers: int = 2,
    threads: int = 1,
    ledger: str | None = "runs/ledger.jsonl",
    metrics: list[str] | None = None,
) -> Path:
    """Run every arm with every seed from a common start, judge all on the same pairs, and compare them.

    A suite that was interrupted is continued by the same command.

    Args:
        name: Name of the experiment in reports and in the ledger.
        out: Folder of the suite; one folder for each seed and arm is made in it.
        seeds: Seeds; each trains its own start, draws its own data and test pairs.
        start: How the common start of a seed is made.
        arms: What is compared.
        tests: Data sets that every arm is judged on.
        baseline: Name of the arm that the others are compared with, seed by seed.
        prepare: What is made from each start, in this order, before the arms: a MetaRM, say.
        workers: Runs at a time.
        threads: Threads of each run; on a laptop, one run a core is the best use of the cores.
        ledger: JSON-lines file that receives a row for each evaluation; null for none.
        metrics: Figures in the table; null for accuracy, critique_f1, wrong_critique_rate, position_consistency.
    """
    config = dict(locals())
    prepare = prepare or []
    _check(seeds, start, prepare, arms, tests, baseline, metrics, workers, threads)
    if ledger:
        check_appendable(ledger)
    # With the YAMLs themselves: a suite whose runs are half from one version of a file would compare nothing.
    stages = [start, *(s.stage for s in prepare), *(a.train for a in arms if a.train), *(t.evaluate for t in tests)]
    config["files"] = {stage.config: read_yaml(stage.config) for stage in stages}
    folder = open_run(out, config, resume=holds_run(out), may_differ=_MAY_DIFFER)
    jobs = [Job(s, arm.name, folder / f"seed-{s}" / slug(arm.name), arm.train, arm) for arm in arms for s in seeds]
    before = [
        [Job(seed, step.name, folder / f"seed-{seed}" / slug(step.name), step.stage) for seed in seeds]
        for step in (Step(START, start), *prepare)
    ]
    began = time.perf_counter()
    os.environ["OMP_NUM_THREADS"] = str(threads)  # read when a worker imports torch
    with _pool(workers) as pool, Board(jobs) as board:
        for batch in (*before, jobs):
            _run_all(pool, batch, (tests, name, ledger), board)
    from nlhf.suite.report import write_suite_report

    report = write_suite_report(folder, name, seeds, arms, tests, baseline, metrics, time.perf_counter() - began)
    print(f"\nReport: {report.resolve()}")
    return folder


def _check(
    seeds: Sequence[int],
    start: Stage,
    prepare: Sequence[Step],
    arms: Sequence[Arm],
    tests: Sequence[Test],
    baseline: str,
    metrics: Sequence[str] | None,
    workers: int,
    threads: int,
) -> None:
    for seed in seeds:
        check_seed(seed)
    names = [arm.name for arm in arms]
    for what, values in (
        ("seeds", [str(s) for s in seeds]),
        ("arms", [slug(n) for n in [*names, *(step.name for step in prepare)]]),
        ("tests", [slug(t.name) for t in tests]),
    ):
        if not values:
            raise UserError(f"{what}: name at least one")
        if len(set(values)) < len(values) or "" in values:
            raise UserError(f"{what}: each needs a folder name of its own, got {', '.join(map(repr, values))}")
        if longest := next((v for v in values if len(v.encode()) > _LONGEST_NAME), None):
            raise UserError(f"{what}: {longest!r} is too long for the name of a folder; at most {_LONGEST_NAME} bytes")
    if START in map(slug, [*names, *(step.name for step in prepare)]):
        raise UserError(f"{START!r} is the name of the common start; name the arm or step otherwise")
    if baseline not in names:
        raise UserError(f"baseline {baseline!r} is not an arm; arms: {', '.join(names)}.{nearest(baseline, names)}")
    known = [START]
    _check_stage("start", start, [])
    for step in prepare:
        _check_stage(f"step {step.name!r}", step.stage, known)
        known.append(step.name)
    for arm in arms:
        if arm.train:
            _check_stage(f"arm {arm.name!r}", arm.train, known, _ANY_MODEL)
    for test in tests:
        _check_stage(f"test {test.name!r}", test.evaluate, known, _ANY_MODEL, judges=True)
    if metrics is not None:
        from nlhf.evaluation.metrics import definitions

        for name in metrics:
            if name not in definitions():
                raise UserError(f"metrics: there is no figure {name!r}.{nearest(name, definitions())}")
            if not definitions()[name].rate:
                raise UserError(f"metrics: {name!r} is not a share, and the table is in percent; leave it out")
    for name, value in (("workers", workers), ("threads", threads)):
        if value < 1:
            raise UserError(f"{name} must be at least 1, got {value}")


def _check_stage(
    where: str, stage: Stage, known: Sequence[str], model: str | None = None, judges: bool = False
) -> None:
    """Read a stage's configuration now: its mistakes would else come up when the start is trained, hours later."""
    from nlhf.cli import read

    if (stage.verb == "evaluate") != judges:
        needed = "evaluate" if judges else "one that trains: cold-start, train, metarm train, ..."
        raise UserError(f"{where}: verb is {stage.verb!r}, but it must be {needed}")
    if stage.verb == "train-policy" and not where.startswith("step "):
        raise UserError(
            f"{where}: {stage.verb} is for a step of prepare; a suite, which trains judges and measures them, judges "
            "no pair with a policy"
        )
    try:
        values = _values(stage, {"model.name": model} if model else {}, {name: slug(name) for name in known})
        read(stage.target, stage.prog, {**values, "out": "out", "seed": 0, "resume": False})
    except UserError as error:
        raise UserError(f"{where} ({stage.config}): {error}") from None


def _pool(workers: int) -> ProcessPoolExecutor:
    """Worker processes that have imported the trainers once; each job runs in a fork of its own."""
    import multiprocessing

    method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    context = multiprocessing.get_context(method)
    if method == "forkserver":
        context.set_forkserver_preload(["nlhf.suite.worker"])
    return ProcessPoolExecutor(workers, mp_context=context, max_tasks_per_child=1)


def _run_all(pool: ProcessPoolExecutor, batch: Sequence[Job], arguments: tuple, board: Board) -> None:
    for job in batch:
        job.done = is_done(job)
    futures = {pool.submit(run_job, job, *arguments): job for job in batch if not job.done}
    pending = set(futures)
    while pending:
        finished, pending = wait(pending, timeout=1.0, return_when=FIRST_COMPLETED)
        for future in finished:
            job = futures[future]
            if future.exception():
                if under_way := sum(not other.cancel() for other in pending):
                    board.say(f"{job.name}, seed {job.seed} failed (log: {job.log}); waiting for {under_way} under way")
                raise UserError(f"{job.name}, seed {job.seed}: {future.exception()} (log: {job.log})")
            job.done = True
        board.show()


def is_done(job: Job) -> bool:
    """True when nothing is left to do for a job."""
    return (job.folder / "done").is_file()


def run_job(job: Job, tests: Sequence[Test], suite_name: str, ledger: str | None) -> None:
    """Train (and judge) one arm with one seed; runs in a worker process, with its output in a log file."""
    from filelock import FileLock

    job.folder.mkdir(parents=True, exist_ok=True)
    # A suite that was killed may have left a worker that still finishes this very job: wait for it.
    with (
        FileLock(job.folder / ".lock"),
        job.log.open("a", encoding="utf-8") as file,
        redirect_stdout(file),
        redirect_stderr(file),
    ):
        if is_done(job):
            return
        try:
            _train_and_judge(job, tests, suite_name, ledger)
        except BaseException:
            traceback.print_exc()
            raise
        (job.folder / "done").touch()


def _train_and_judge(job: Job, tests: Sequence[Test], suite_name: str, ledger: str | None) -> None:
    model = origin = job.folder.parent / START / "train" / "final"
    if job.stage:
        _run(job.stage, job, "train", {"model.name": str(origin)} if job.arm else {})
    if not job.arm:
        return
    if job.stage:
        model = job.folder / "train" / job.arm.model
    for test in tests:
        options = {
            "model.name": str(model),
            "ledger": ledger,
            "run_name": f"{suite_name}/{job.name}/{test.name}/{job.seed}",
        }
        _run(test.evaluate, job, f"test-{slug(test.name)}", options)


def _run(stage: Stage, job: Job, name: str, options: dict[str, Any]) -> None:
    from nlhf.cli import call

    out = job.folder / name
    # Every folder beside the job's own is one that a stage may name: a step whose name it does not is not there.
    folders = {other.name: str(other / "train") for other in job.folder.parent.iterdir() if other.is_dir()}
    values = _values(stage, options, folders)
    call(stage.target, stage.prog, {**values, "out": str(out), "seed": job.seed, "resume": holds_run(out)})


def _values(stage: Stage, options: dict[str, Any], folders: Mapping[str, str]) -> dict[str, Any]:
    values = read_yaml(stage.config)
    for key, value in {**{k: _filled(v, folders) for k, v in stage.options.items()}, **options}.items():
        set_key(values, key, value, stage.config)
    return values


def _filled(value: Any, folders: Mapping[str, str]) -> Any:
    """A value whose texts, however deep, have the folders of the steps that they name in braces."""
    if isinstance(value, dict):
        return {key: _filled(item, folders) for key, item in value.items()}
    if isinstance(value, list):
        return [_filled(item, folders) for item in value]
    if not isinstance(value, str):
        return value

    def folder(found: re.Match) -> str:
        if slug(found[1]) not in map(slug, folders):
            raise UserError(f"{value!r}: no step {found[1]!r} comes before; known: {', '.join(folders) or 'none'}")
        return {slug(name): path for name, path in folders.items()}[slug(found[1])]

    return re.sub(r"\{([^{}]+)\}", folder, value)


def set_key(values: dict[str, Any], key: str, value: Any, where: str) -> None:
    """Set a dotted key in nested dicts and lists.

    Raises:
        UserError: the key leads through something that is neither.
    """
    node: Any = values
    try:
        *parents, last = key.split(".")
        for part in parents:
            node = node[_index(part)] if isinstance(node, list) else node.setdefault(part, {})
        node[_index(last) if isinstance(node, list) else last] = value
    except (IndexError, TypeError, AttributeError, ValueError):
        raise UserError(f"{where}: there is no place for the option {key!r}") from None


def _index(part: str) -> int:
    if not part.isdecimal():  # int() would also take -1 and 1_000
        raise ValueError(part)
    return int(part)


def slug(name: str) -> str:
    """A name as a folder's name."""
    return "".join(c if c.isalnum() else "-" for c in name.lower()).strip("-")


def runs(
    folder: Path, arms: Sequence[Arm], tests: Sequence[Test], seeds: Sequence[int]
) -> Iterator[tuple[str, str, int, Path]]:
    """Every evaluation of a suite as (arm, test, seed, folder)."""
    for arm, test, seed in itertools.product(arms, tests, seeds):
        yield arm.name, test.name, seed, folder / f"seed-{seed}" / slug(arm.name) / f"test-{slug(test.name)}"
