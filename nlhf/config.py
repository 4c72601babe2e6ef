"""Configuration shared by the verbs: optimisation settings, and classes named in a YAML by their path."""

import importlib
import inspect
from dataclasses import dataclass, field
from typing import Any, Literal, get_type_hints

from nlhf.errors import UserError, nearest
from nlhf.files import fits, in_words

# Short names for what this package offers, so that a YAML need not spell out the path.
ALIASES = {
    "critique": "nlhf.rewards.CritiqueReward",
    "exact": "nlhf.critique.scorers.ExactScorer",
    "lexical": "nlhf.critique.scorers.LexicalScorer",
    "embedding": "nlhf.critique.scorers.EmbeddingScorer",
    "learned": "nlhf.critique.learned.LearnedScorer",
    "llm": "nlhf.critique.llm.LLMScorer",
}


@dataclass
class ClassSpec:
    """A class and its arguments, named in a YAML; built when it is needed, so that nothing heavy is imported early."""

    class_path: str
    """Import path of the class, or a short name: critique, exact, lexical, embedding, learned, llm."""

    init_args: dict[str, Any] = field(default_factory=dict)
    """Arguments by name; an argument may itself be a class_path with init_args."""

    @classmethod
    def from_dict(cls, value: Any) -> "ClassSpec":
        """Read what a YAML says: ``{class_path, init_args}``, or the class path alone.

        Raises:
            ValueError: it is neither.
        """
        if isinstance(value, cls):
            return value
        if isinstance(value, str):
            return cls(value)
        if not isinstance(value, dict) or "class_path" not in value or not set(value) <= {"class_path", "init_args"}:
            raise ValueError("expected a class_path, alone or with init_args (on the command line in quotes)")
        path, arguments = value["class_path"], value.get("init_args") or {}
        if not isinstance(path, str) or not isinstance(arguments, dict):
            raise ValueError("class_path must be a text and init_args fields with values")
        return cls(path, dict(arguments))

    def to_dict(self) -> dict[str, Any]:
        """The inverse of `from_dict`."""
        return {"class_path": self.class_path, "init_args": self.init_args}

    def build(self) -> Any:
        """Import the class and call it.

        Raises:
            UserError: the class does not exist or does not take these arguments.
        """
        cls = self._import()
        arguments = {name: _built(value) for name, value in self.init_args.items()}
        try:
            parameters = inspect.signature(cls).parameters
        except ValueError:  # a few of Python's own classes have none
            raise UserError(f"class_path {self.class_path!r} does not say which arguments it takes") from None
        named = [p for p in parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        for name in arguments:
            if name not in parameters and not open_ended:
                raise UserError(
                    f"{self.class_path} takes no argument {name!r}; it takes {list(parameters)}."
                    f"{nearest(name, parameters)}"
                )
        missing = [p.name for p in named if p.default is p.empty and p.name not in arguments]
        if missing:
            raise UserError(f"{self.class_path} needs init_args.{missing[0]}")
        return cls(**arguments)

    def _import(self) -> type:
        path = ALIASES.get(self.class_path, self.class_path)
        module_name, _, name = path.rpartition(".")
        if not module_name or not all(part.isidentifier() for part in path.split(".")):
            raise UserError(
                f"class_path {self.class_path!r} is neither an import path nor one of {sorted(ALIASES)}."
                f"{nearest(path, ALIASES)}"
            )
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            raise UserError(f"class_path {self.class_path!r}: {error}") from None
        if not hasattr(module, name):
            raise UserError(
                f"class_path {self.class_path!r}: {module_name} has no {name!r}.{nearest(name, vars(module))}"
            )
        found = getattr(module, name)
        if not inspect.isclass(found) and not inspect.isroutine(found):
            raise UserError(f"class_path {self.class_path!r} is no class but a {type(found).__name__}")
        return found


def _built(value: Any) -> Any:
    if isinstance(value, ClassSpec):
        return value.build()
    if isinstance(value, dict) and "class_path" in value:
        return ClassSpec.from_dict(value).build()
    return value


_MOST_STEPS = 2**31  # what torch's counters hold
_BY_RUN = "is set by the run itself (options out and seed)"
_OWN_VALIDATION = "has no use: the trainer has no data to evaluate on, and the run itself keeps the best model in best/"
_NOT_IN_EXTRA = {
    "output_dir": _BY_RUN,
    "seed": _BY_RUN,
    "save_only_model": "would leave out of a checkpoint what resuming needs; the models to keep are best/ and final/, "
    "and save_total_limit says how many checkpoints stay beside them",
    "eval_strategy": _OWN_VALIDATION,
    "load_best_model_at_end": _OWN_VALIDATION,
}


@dataclass
class OptimizationConfig:
    """How weights are updated; names are those of transformers.TrainingArguments."""

    learning_rate: float = 1e-6
    """Peak learning rate of AdamW."""

    max_steps: int = -1
    """Optimiser steps; -1 to go by num_train_epochs."""

    num_train_epochs: float = 1.0
    """Passes over the data, when max_steps is not set."""

    per_device_train_batch_size: int = 8
    """Sequences that go through the model at once, on each device."""

    gradient_accumulation_steps: int = 1
    """Such batches in one optimiser step."""

    lr_scheduler_type: str = "constant"
    """Schedule of the learning rate: constant, constant_with_warmup, linear, cosine, ... (transformers' names)."""

    warmup_steps: int = 0
    """Steps in which the learning rate rises from 0; the schedule constant has none."""

    weight_decay: float = 0.01
    """AdamW weight decay."""

    max_grad_norm: float = 1.0
    """Gradients are clipped to this norm."""

    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""

    logging_steps: int = 1
    """Steps between rows of metrics.jsonl."""

    save_steps: int = 100
    """Steps between checkpoints to resume from."""

    save_total_limit: int = 2
    """Checkpoints kept; the best model is kept beside them."""

    extra: dict[str, Any] = field(default_factory=dict)
    """Any other argument of the trainer by its own name, such as fsdp, deepspeed or use_vllm."""

    def __post_init__(self):
        problems = []
        if not 0 < self.learning_rate < float("inf"):  # neither is NaN
            problems.append(f"learning_rate must be positive, got {self.learning_rate}")
        if not 1 <= self.max_steps < _MOST_STEPS and self.max_steps != -1:
            problems.append(f"max_steps must be at least 1, or -1 to go by num_train_epochs, got {self.max_steps}")
        for name in ("warmup_steps", "weight_decay", "max_grad_norm"):
            if not 0 <= getattr(self, name) < float("inf"):
                problems.append(f"{name} must not be negative, got {getattr(self, name)}")
        if self.max_steps == -1 and not 0 < self.num_train_epochs < float("inf"):
            problems.append("set max_steps or num_train_epochs to a positive number")
        for name in ("per_device_train_batch_size", "gradient_accumulation_steps", "logging_steps", "save_steps"):
            if not 1 <= getattr(self, name) < _MOST_STEPS:
                problems.append(f"{name} must be at least 1, and below {_MOST_STEPS:,}, got {getattr(self, name)}")
        if self.lr_scheduler_type == "constant" and self.warmup_steps > 0:
            problems.append(
                f"warmup_steps is {self.warmup_steps}, but lr_scheduler_type constant has no warm-up; set it to "
                "constant_with_warmup, or leave out warmup_steps"
            )
        if problems:
            raise UserError("; ".join(problems))

    def arguments(self) -> dict[str, Any]:
        """These settings and those of ``extra`` as keyword arguments of the trainer's own configuration class."""
        values = {name: value for name, value in vars(self).items() if name != "extra"}
        values["activation_checkpointing"] = values.pop("gradient_checkpointing")  # its name in transformers 5
        return values | self.extra

    def check_extra(self, config_class: type, where: str) -> None:
        """Make sure that ``extra`` has only arguments of the trainer's configuration class that have no place of ours.

        Args:
            config_class: transformers.TrainingArguments or a class derived from it.
            where: Name of these settings in the YAML.

        Raises:
            UserError: a key is unknown (the nearest name is offered), is set elsewhere, has no place in a run of ours,
                or its value is of another type.
        """
        known, hints = inspect.signature(config_class).parameters, get_type_hints(config_class)
        for name in self.extra:
            if name in vars(self) or name == "activation_checkpointing":
                own = "gradient_checkpointing" if name == "activation_checkpointing" else name
                raise UserError(f"{where}.extra: set {where}.{own} instead of {name!r} in extra")
            if name in _NOT_IN_EXTRA:
                raise UserError(f"{where}.extra: {name!r} {_NOT_IN_EXTRA[name]}")
            if name not in known:
                message = f"{where}.extra: {config_class.__name__} has no argument {name!r}."
                raise UserError(message + nearest(name, known))
            if not fits(self.extra[name], hints.get(name, object)):
                shown = in_words(hints[name])
                raise UserError(f"{where}.extra: {name!r} must be {shown}, got {self.extra[name]!r}")


def check_optimizer(arguments: Any) -> None:
    """Make the optimiser and the schedule for one weight: what is wrong with them would show when training begins.

    Args:
        arguments: A transformers.TrainingArguments.

    Raises:
        ValueError: a setting does not fit the optimiser or the schedule.
        TypeError: they take no such setting, or lack one.
        ImportError: a package is missing.
    """
    import torch
    from transformers import Trainer, get_scheduler

    model = torch.nn.Linear(1, 1)
    optimizer: Any = torch.optim.SGD(model.parameters())
    if not arguments.optim_target_modules:  # those are names of layers that this model lacks
        made_by, options = Trainer.get_optimizer_cls_and_kwargs(arguments, model)
        # Some make their own groups of weights, or need matrices.
        if isinstance(made_by, type) and issubclass(made_by, torch.optim.Optimizer) and "params" not in options:
            optimizer = made_by(model.parameters(), **options)
    steps = max(arguments.max_steps, 100)
    get_scheduler(
        arguments.lr_scheduler_type,
        optimizer,
        num_warmup_steps=arguments.get_warmup_steps(steps),
        num_training_steps=steps,
        scheduler_specific_kwargs=arguments.lr_scheduler_kwargs,
    )


Presentation = Literal["random", "both", "given"]
"""How training shows a pair: A and B exchanged by a seeded coin, both orders, or as in the data."""
