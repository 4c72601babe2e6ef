"""Given-circumstance acting, simulated and judged: the verb ``nlhf roleplay coser``.

Station of the path: source -> simulation -> judge -> **metrics -> report**, for a role-play policy instead of a judge.
The protocol is that of CoSER (arXiv 2502.09082); `docs/coser.md` says what is upstream's, what HER's fork does
otherwise and what is ours. `nlhf.roleplay.coser_scenes` reads the scenes, `nlhf.roleplay.simulation` acts them,
`nlhf.roleplay.flaws` judges them, `nlhf.roleplay.coser_summary` counts.
"""

import copy
import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from nlhf.errors import UserError
from nlhf.evaluation.intervals import RESAMPLES, check_resamples
from nlhf.evaluation.metrics import Metric
from nlhf.files import (
    append_jsonl,
    check_appendable,
    check_fields,
    read_jsonl,
    to_json,
    write_json,
    write_jsonl,
    write_text,
)
from nlhf.generation import SamplingConfig
from nlhf.generation.backends import PATIENCE, BackendConfig, GenerationFailed, make_generator, report_usage
from nlhf.judge import Generator, prompt_hash
from nlhf.ledger import LedgerRow, append
from nlhf.logs import setup_logging
from nlhf.models import ModelConfig
from nlhf.roleplay.coser_scenes import SUBSETS, Scene, Tag, load_scenes
from nlhf.roleplay.coser_summary import markdown, summarise
from nlhf.roleplay.flaws import DIMENSIONS, FlawList, judge_prompt, list_flaws, retrying
from nlhf.roleplay.prompts import FOLDER
from nlhf.roleplay.simulation import Simulation, SimulationConfig, read_turn, simulate, speakers
from nlhf.runs import alone, check_run, keep_manifest, open_run, plain


@dataclass
class PartConfig:
    """A model with a part in the evaluation, beside the one that is evaluated."""

    model: ModelConfig
    """Which model."""

    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    """How its replies are drawn."""

    backend: BackendConfig = field(default_factory=BackendConfig)
    """What runs it."""

    def identity(self) -> dict[str, Any]:
        """What a run's manifest says of it: whose replies they are."""
        weights = self.backend.weights_hash(self.model)
        return {"model": self.model.name, "weights": weights, "backend": self.backend.identity(self.model)}


_SAMPLING = SamplingConfig()
_BACKEND = BackendConfig()
_SIMULATION = SimulationConfig()
_PARTS = ("", "judge.", "director.")
_HOW_FAST = [part + name for part in _PARTS for name in ("sampling.batch_size", *PATIENCE)]
_MAY_DIFFER = ("out", "resume", "ledger", "parallel", *_HOW_FAST)  # none of them changes a figure


def coser(
    model: ModelConfig,
    judge: PartConfig,
    out: str,
    scenes: str | None = None,
    tag: Tag | None = None,
    limit: int | None = None,
    sampling: SamplingConfig = _SAMPLING,
    backend: BackendConfig = _BACKEND,
    simulation: SimulationConfig = _SIMULATION,
    director: PartConfig | None = None,
    show_thoughts: bool = False,
    retries: int = 5,
    parallel: int = 8,
    resamples: int = RESAMPLES,
    seed: int = 0,
    ledger: str | None = "runs/ledger.jsonl",
    run_name: str | None = None,
    resume: bool = False,
) -> dict[str, Any]:
    """Let a model act scenes with several characters, have a judge list the flaws, and score them as CoSER does.

    Writes to ``out``: config.yaml, environment.json, manifest.json (scenes and models), simulations.jsonl (one line a
    conversation), judgements.jsonl (one line a conversation and dimension), summary.json and summary.md; with a server
    also usage.jsonl. While scenes are acted, turns.jsonl holds the turns so far.

    Args:
        model: The actor: the model that is evaluated. It speaks for all characters.
        judge: Lists the flaws.
        out: Folder of the run; it must not hold a run yet, unless resume is set.
        scenes: File in the schema of CoSER's test set; the scenes on board where it is left out.
        tag: Only scenes in-domain (id) or out-of-domain (ood).
        limit: The first so many scenes.
        sampling: How the actor's turns are drawn.
        backend: What runs the actor: transformers, vLLM, or a server.
        simulation: How scenes are acted.
        director: Speaks for the environment and names the next speaker; the judge's model where it is left out.
        show_thoughts: Let the judge read what characters think, as HER's fork does; upstream hides it.
        retries: How often the judge is asked again after a reply that cannot be read; what remains is a failure, left
            out and counted.
        parallel: Conversations that are acted side by side; a kill costs them a round at most, or their judgements.
        resamples: Bootstrap resamples of the intervals.
        seed: Of the bootstrap and of the coin that chooses a speaker where the director names none.
        ledger: JSON-lines file that receives a row of figures; null for none.
        run_name: Name in the ledger; the folder's name by default.
        resume: Continue an interrupted run in out; its configuration must be equal.

    Raises:
        UserError: bad configuration or scenes, or a folder in use.
        GenerationFailed: a server left prompts without a reply; all others are kept, and resume continues.
    """
    config = {**locals(), "run_name": run_name or Path(out).name}
    setup_logging()
    _check(limit, retries, parallel)
    check_resamples(resamples)
    # What can fail fails before there is a folder, which would be in the way of the next try.
    check_run(out, config, resume, _MAY_DIFFER)
    if ledger:
        check_appendable(ledger)
    acted = load_scenes(scenes, tag, limit)
    for scene in acted:
        speakers(scene, simulation)
    parts = {"actor": PartConfig(model, sampling, backend), "judge": judge}
    if director is not None and simulation.directed:
        parts["director"] = director
    manifest = _manifest(scenes, acted, parts)
    generators = _load(parts)

    folder = open_run(out, config, resume, _MAY_DIFFER)
    finished = (folder / "summary.json").is_file()
    with alone(folder):
        keep_manifest(folder, manifest, {name: f"its {name}" for name in manifest})
        try:
            director_or_judge = generators.get("director", generators["judge"])
            played = _simulate_into(folder, acted, generators["actor"], director_or_judge, simulation, seed, parallel)
            judged = _judge_into(folder, played, generators["judge"], retries, show_thoughts, parallel)
        finally:
            for name, generator in generators.items():
                report_usage(generator, parts[name].backend, folder)
        summary = summarise(played, judged, simulation, show_thoughts, resamples, seed)
        if ledger and not finished:
            append(ledger, _ledger_row(plain(config), manifest, judged, summary))
        write_text(folder / "summary.md", markdown(summary))
        write_json(folder / "summary.json", plain(summary))
    print(markdown(summary), end="")
    return summary


def _check(limit: int | None, retries: int, parallel: int) -> None:
    least = {"limit": (1 if limit is None else limit, 1), "retries": (retries, 0), "parallel": (parallel, 1)}
    problems = [f"{name} must be at least {low}, got {value}" for name, (value, low) in least.items() if value < low]
    if problems:
        raise UserError("; ".join(problems))


def _load(parts: dict[str, PartConfig]) -> dict[str, Generator]:
    """The generator of each part; a model that has several parts in this process is loaded once."""
    generators: dict[str, Generator] = {}
    for name, part in parts.items():
        twin = next((n for n in generators if (parts[n].model, parts[n].backend) == (part.model, part.backend)), None)
        if twin is None or part.backend.kind == "openai":
            generators[name] = make_generator(part.model, part.sampling, part.backend)
        else:
            generators[name] = copy.copy(generators[twin])
            generators[name].config = part.sampling
    return generators


def _manifest(path: str | None, scenes: Sequence[Scene], parts: dict[str, PartConfig]) -> dict[str, Any]:
    content = to_json([scene.to_dict() for scene in scenes]).encode("utf-8", "surrogatepass")
    tags = Counter(scene.tag for scene in scenes)
    return {
        "scenes": {
            "path": path,
            "conversations": len(scenes),
            "tags": {tag: tags[tag] for tag in SUBSETS},
            "data_hash": hashlib.sha256(content).hexdigest()[:16],
        },
        "models": {name: part.identity() for name, part in parts.items()},
        "prompts": {
            path.stem: hashlib.sha256(path.read_bytes()).hexdigest()[:12]
            for path in sorted((FOLDER / "coser").glob("*.jinja"))
        },
    }


# --------------------------------------------------------------------------------------------------- acting, judging


def _simulate_into(
    folder: Path,
    scenes: Sequence[Scene],
    actor: Generator,
    director: Generator,
    config: SimulationConfig,
    seed: int,
    parallel: int,
) -> list[Simulation]:
    """Act the scenes, where every turn is in a file as soon as it is spoken, and those there are not spoken again."""
    whole, begun = folder / "simulations.jsonl", folder / "turns.jsonl"
    played = _read_simulations(whole, begun, scenes, config)
    owed = [s for s in played if not s.finished(config)]

    def keep(simulation: Simulation) -> None:
        row = {"scene": simulation.scene.id, "round": len(simulation.turns), **vars(simulation.turns[-1])}
        append_jsonl(begun, row)
        bar.update()
        if simulation.finished(config):
            append_jsonl(whole, simulation.to_dict())

    with tqdm(desc="acting", unit="turn", disable=None) as bar:  # None: silent without a terminal
        _in_chunks(owed, parallel, lambda chunk: simulate(chunk, actor, director, config, seed, keep))
    # Written anew: in the order of the scenes, without a torn line. It now holds all that the other file does.
    write_jsonl(whole, (s.to_dict() for s in played))
    begun.unlink(missing_ok=True)
    return played


def _in_chunks(
    simulations: Sequence[Simulation], size: int, work: Callable[[Sequence[Simulation]], list[GenerationFailed]]
) -> None:
    """Work through conversations, past those that a server fails, and raise what failed in the end."""
    failures: list[GenerationFailed] = []
    for start in range(0, len(simulations), size):
        failures += work(simulations[start : start + size])
        if any(failure.lost for failure in failures):
            break
    if failures:
        raise GenerationFailed.of(failures)


def _read_simulations(whole: Path, begun: Path, scenes: Sequence[Scene], config: SimulationConfig) -> list[Simulation]:
    """The conversations as far as an interrupted run got."""
    played = {scene.id: Simulation(scene) for scene in scenes}
    for where, row in _kept(whole):
        check_fields(row, {"scene": str, "turns": list[dict]}, where)
        simulation = _of(played, row, where)
        simulation.turns = []
        for turn in row["turns"]:
            simulation.take_up(read_turn(turn, where), config, where)
    done = {name for name, simulation in played.items() if simulation.turns}
    for where, row in _kept(begun):
        check_fields(row, {"scene": str, "round": int}, where)
        simulation = _of(played, row, where)
        if row["scene"] in done:
            continue
        if row["round"] != len(simulation.turns) + 1:
            raise UserError(f"{where}: round {row['round']} follows on {len(simulation.turns)}; was the file edited?")
        turn = read_turn({k: v for k, v in row.items() if k not in ("scene", "round")}, where)
        simulation.take_up(turn, config, where)
    return list(played.values())


def _kept(path: Path) -> Iterable[tuple[str, Any]]:
    if path.is_file():
        yield from ((f"{path}:{number}", row) for number, row in read_jsonl(path, skip_torn=True))


def _of(played: dict[str, Simulation], row: dict[str, Any], where: str) -> Simulation:
    if row["scene"] not in played:
        raise UserError(f"{where}: no scene has the id {row['scene']!r}; was the file edited?")
    return played[row["scene"]]


def _judge_into(
    folder: Path, played: Sequence[Simulation], judge: Generator, retries: int, show_thoughts: bool, parallel: int
) -> list[FlawList]:
    """Judge the conversations, where every judgement is in a file as soon as its chunk is judged."""
    path = folder / "judgements.jsonl"
    judged = _read_judgements(path, played, show_thoughts)
    # A conversation that lacks one judgement is judged anew in all dimensions, and keeps those that it has.
    owed = [s for s in played if any((s.scene.id, dimension) not in judged for dimension in DIMENSIONS)]
    again = retrying(judge) if retries else None

    def work(chunk: Sequence[Simulation]) -> list[GenerationFailed]:
        found, failures = list_flaws(chunk, judge, retries, show_thoughts, again)
        for judgement in found:
            if judgement.key not in judged:
                append_jsonl(path, judgement.to_dict())
                judged[judgement.key] = judgement
        bar.update(len(found))
        return failures

    with tqdm(total=len(owed) * len(DIMENSIONS), desc="judging", unit="prompt", disable=None) as bar:
        _in_chunks(owed, parallel, work)
    ordered = [judged[s.scene.id, dimension] for s in played for dimension in DIMENSIONS]
    write_jsonl(path, (j.to_dict() for j in ordered))
    return ordered


def _read_judgements(path: Path, played: Sequence[Simulation], show_thoughts: bool) -> dict[tuple[str, str], FlawList]:
    """The judgements that an interrupted run has kept, which must be on these conversations."""
    by_scene = {simulation.scene.id: simulation for simulation in played}
    judged: dict[tuple[str, str], FlawList] = {}
    for where, row in _kept(path):
        judgement = FlawList.from_dict(row, where)
        simulation = _of(by_scene, row, where)
        prompt = judge_prompt(simulation, judgement.dimension, show_thoughts)
        if judgement.prompt_hash != ("" if simulation.broke_off else prompt_hash(prompt)):
            raise UserError(f"{where}: a judgement on another conversation than simulations.jsonl has; was it edited?")
        judged[judgement.key] = judgement
    return judged


def _ledger_row(
    config: dict[str, Any], manifest: dict[str, Any], judged: Sequence[FlawList], summary: dict[str, Any]
) -> LedgerRow:
    scores: dict[str, Metric] = summary["scores"]["all"]["excluded"]
    return LedgerRow(
        run_name=config["run_name"],
        out=config["out"],
        source="coser",
        split=config["tag"] or "all",
        data_n=manifest["scenes"]["conversations"],
        data_hash=manifest["scenes"]["data_hash"],
        model=config["model"]["name"],
        model_hash=manifest["models"]["actor"]["weights"],
        format="coser",
        prompt_hash=manifest["prompts"]["judge"],
        seed=config["seed"],
        orders=[],
        samples=1,
        sampling=config["sampling"],
        scorer={"judge": manifest["models"]["judge"], "judge_reads_thoughts": config["show_thoughts"]},
        n=len(judged),
        metrics={f"coser/{name}": metric for name, metric in scores.items()},
    )
