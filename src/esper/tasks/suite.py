"""A suite: a distribution of learning problems that share one host architecture and one optimizer.

`Suite` is what every suite has, `SampledSuite` one with standardised inputs, `VariantSuite` one by tables.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from pydantic import Field
from torch import nn

from esper.config.settings import Settings
from esper.errors import TaskError, did_you_mean
from esper.numerics.flops import count_flops
from esper.tasks.instance import Data, Instance, LabelledArrays, Part, Scale, standardise


@dataclass(frozen=True)
class Source:
    """Where the data of a suite come from."""

    description: str
    """How the data are obtained, as the end of a sentence that starts with "it is"."""
    path: Path | None = None
    """The file that is read; None if the data are computed."""

    @property
    def exists(self) -> bool:
        """Whether the data can be used: they are computed, or their file exists."""
        return self.path is None or self.path.is_file()


COMPUTED = Source("computed from its recipe")
Value = TypeVar("Value")

Objective = Literal["accuracy", "loss"]
"""What growth is scored by on a suite."""


class OptimizerSettings(Settings):
    """The optimizer of a suite's hosts; the learning rate belongs to the instance."""

    name: Literal["adamw", "sgd"] = "adamw"
    """``adamw`` uses ``betas``, ``sgd`` uses ``momentum``."""
    betas: tuple[float, float] = (0.9, 0.98)
    """Decay rates of AdamW's first and second moments."""
    momentum: float = Field(default=0.9, ge=0, lt=1)
    """Momentum of SGD."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled for AdamW, added to the gradient for SGD."""
    clip_norm: float | None = Field(default=None, gt=0)
    """Largest gradient norm of a network, over its host and all seeds, including isolated ones; None: no clipping."""


Split = Literal["train", "heldout", "transfer"]
"""``train`` and ``heldout`` share families but no seeds; ``transfer`` has families that no controller trains on."""

_SEEDS_PER_SPLIT = 2**30
_FIRST_SEED: dict[Split, int] = {"train": 0, "heldout": _SEEDS_PER_SPLIT, "transfer": 2 * _SEEDS_PER_SPLIT}


class Suite(ABC):
    """A distribution of learning problems, the hosts for them, and the settings for training and scoring hosts.

    All hosts have one architecture at different widths. Padding their parameters and buffers with zeros, at the end of
    every axis, to the shapes of ``template()`` changes no output, and the gradient of every padded entry is exactly
    zero: any mix of instances can be stacked into one program.

    Hosts return logits ``[B, *label_shape, classes]``. The loss is the mean over examples and labelled positions.
    """

    name: str
    classes: int
    input_shape: tuple[int, ...]
    """Shape of one example, without the batch axis."""
    label_shape: tuple[int, ...] = ()
    """Shape of one example's labels: ``()`` for one label, ``(T,)`` for one label at each of T positions."""
    sites: tuple[str | tuple[str, ...], ...]
    """Names of the host's submodules that get a slot, first to last.

    A tuple, such as ``("layer0.0", "layer0.1", "layer1.0")``, is a slot after the last of these modules where hidden
    units may grow, too: the first layer computes them, the last takes them as input.
    """
    blueprints: tuple[str, ...]
    """Registry names of the available blueprints."""
    steps: int
    """Number of decisions per episode."""
    batches_per_step: int
    batch_size: int
    validation_size: int
    test_size: int
    optimizer: OptimizerSettings
    families: tuple[str, ...]
    """Families of the splits ``train`` and ``heldout``."""
    transfer_families: tuple[str, ...]
    source: Source = COMPUTED
    """Where the data come from."""
    parameter_cap: int | None = None
    """Largest number of parameters that growth may add to a host, whatever `GrowthConfig.budget` allows."""
    objective: Objective = "accuracy"
    """What scores, contributions and tolerances are measured in; with ``loss``, in the relative improvement over the
    loss of guessing, from -1 to 1."""

    @abstractmethod
    def variants(self, family: str) -> tuple[str, ...]:
        """Names of a family's hidden variants; raises TaskError for an unknown family."""

    @abstractmethod
    def draw(self, family: str, variant: str, seed: int, rng: np.random.Generator) -> Instance:
        """Draw an instance of a variant, with its other settings from ``rng``."""

    @abstractmethod
    def template(self) -> nn.Module:
        """A host at the largest width; only its shapes matter."""

    @abstractmethod
    def host(self, instance: Instance) -> nn.Module:
        """The host of an instance, with its widths, initialised from its random seed."""

    @abstractmethod
    def data(self, instance: Instance, part: Part, phase: int = 0) -> Data:
        """A part of an instance's data; phase 1 is after the drift. Raises TaskError if there is no such phase."""

    def sample(self, count: int, split: Split, generator: np.random.Generator) -> list[Instance]:
        """Draw instances so that every prefix of the list is balanced over families and variants."""
        families = _shuffle_names(self.transfer_families if split == "transfer" else self.families, generator)
        if count and not families:
            raise TaskError(f"suite {self.name!r} has no families for the split {split!r}: choose another split")
        orders = {family: _shuffle_names(self.variants(family), generator) for family in families}
        instances: list[Instance] = []
        for index in range(count):
            cycle, turn = divmod(index, len(families))
            family = families[turn]
            variant = orders[family][cycle % len(orders[family])]
            seed = _FIRST_SEED[split] + int(generator.integers(_SEEDS_PER_SPLIT))
            instances.append(self.draw(family, variant, seed, generator))
        return instances

    def count_examples(self, instance: Instance, part: Part) -> int:
        """The number of examples of a part of an instance's data."""
        return {"train": instance.train_size, "validation": self.validation_size, "test": self.test_size}[part]

    def parameters(self, instance: Instance) -> int:
        """Number of parameters of an instance's host before any growth."""
        return sum(parameter.numel() for parameter in self.host(instance).parameters())

    def flops(self, instance: Instance) -> int:
        """FLOPs of a forward pass of an instance's host per example; a multiply-add counts as two."""
        host, inputs = self.host(instance), torch.zeros(2, *self.input_shape)  # batch norm needs two examples
        counted = count_flops(host, lambda: host(inputs))
        if counted.uncounted:
            raise TaskError(
                f"the FLOPs of the hosts of suite {self.name!r} are unknown, since torch cannot count "
                f"{counted.uncounted}: give it a formula with torch.utils.flop_counter.register_flop_formula"
            )
        return counted.total // len(inputs)

    @property
    def chance_loss(self) -> float:
        """The loss of guessing, in nats."""
        return math.log(self.classes)

    @property
    def chance_score(self) -> float:
        """The score of guessing, in the ``objective``."""
        return 1 / self.classes if self.objective == "accuracy" else 0.0

    @property
    def slot_names(self) -> tuple[str, ...]:
        """Names of the submodules that slots follow."""
        return tuple(site if isinstance(site, str) else site[-1] for site in self.sites)

    def check(self, instance: Instance, phase: int = 0) -> None:
        """Raise TaskError unless the instance belongs to this suite and its data have this phase."""
        if instance.suite != self.name:
            raise TaskError(f"instance {instance.name} belongs to suite '{instance.suite}', not to '{self.name}'")
        if phase not in ((0,) if instance.drift_step is None else (0, 1)):
            raise TaskError(f"instance {instance.name} has no phase {phase}: only instances that drift have a phase 1")


def _shuffle_names(names: tuple[str, ...], generator: np.random.Generator) -> list[str]:
    return [names[index] for index in generator.permutation(len(names))]


def draw_log_uniform(low: float, high: float, rng: np.random.Generator) -> float:
    """A log-uniform number between ``low`` and ``high``."""
    return math.exp(rng.uniform(math.log(low), math.log(high)))


def find_by_name(kind: str, name: str, table: Mapping[str, Value]) -> Value:
    """``table[name]``; raises TaskError with close matches or all choices."""
    if name in table:
        return table[name]
    hint = did_you_mean(name, table) or f"; choose from {', '.join(table)}"
    raise TaskError(f"no {kind} is called {name!r}{hint}")


class SampledSuite(Suite):
    """A suite whose parts are sampled as arrays, and standardised by the training part of the same phase."""

    @abstractmethod
    def sample_part(self, instance: Instance, part: Part, phase: int) -> LabelledArrays:
        """The part's examples ``[N, *input_shape]``, not standardised, with label noise in the training part."""

    def data(self, instance: Instance, part: Part, phase: int = 0) -> Data:
        """Standardised inputs ``[N, *input_shape]``, and labels."""
        self.check(instance, phase)
        examples, key = self.sample_part(instance, part, phase), (self, instance, phase)
        if part == "train" or key not in _scales:
            if len(_scales) >= _MOST_SCALES:
                _scales.clear()
            training = examples if part == "train" else self.sample_part(instance, "train", phase)
            _scales[key] = Scale.of(training.inputs)
        return standardise(*examples, _scales[key])


_MOST_SCALES = 1024
_scales: dict[tuple[SampledSuite, Instance, int], Scale] = {}
"""Scales of training parts, which are asked for first, by suite, instance and phase."""


@dataclass(frozen=True)
class Variant:
    """A hidden setting of a family."""

    sampler: Callable[..., Any]
    """Samples examples; its arguments are those that the suite gives."""
    widths: tuple[int, ...] = ()
    """Widths of its hosts; empty: those of the suite."""
    host: Any = None
    """What else the suite needs to know to make a host."""
    train_sizes: tuple[int, ...] = ()
    """Numbers of training examples to draw from; empty: those of the suite."""
    label_noise: float = 0.0
    after_drift: Callable[..., Any] | None = None
    """Replaces ``sampler`` at the instance's drift step."""


Families = Mapping[str, Mapping[str, Variant]]
"""Variants by family and name."""


class VariantSuite(Suite):
    """A suite whose families are tables of hidden variants."""

    kind: str
    """The word for a family in error messages, such as ``token family``."""
    table: Families
    """Variants by family and name, also of the transfer families."""
    widths: tuple[int, ...]
    train_sizes: tuple[int, ...]
    rent: float
    learning_rates: tuple[float, float]
    """Bounds of the learning rates, which are drawn log-uniformly."""
    drift_steps: range
    """Decision steps at which data may drift."""

    def find_variant(self, family: str, variant: str) -> Variant:
        """A family's variant; raises TaskError for unknown names."""
        return find_by_name(f"variant of {self.kind} '{family}'", variant, find_by_name(self.kind, family, self.table))

    def find_sampler(self, instance: Instance, phase: int) -> Any:
        """The sampler of an instance before its drift (phase 0) or after it (phase 1)."""
        variant = self.find_variant(instance.family, instance.variant)
        sampler = variant.after_drift if phase else variant.sampler
        if sampler is None:
            raise TaskError(f"instance {instance.name} has no phase 1: its variant never drifts")
        return sampler

    def variants(self, family: str) -> tuple[str, ...]:
        return tuple(find_by_name(self.kind, family, self.table))

    def draw(self, family: str, variant: str, seed: int, rng: np.random.Generator) -> Instance:
        hidden = self.find_variant(family, variant)
        return Instance(
            suite=self.name,
            family=family,
            variant=variant,
            seed=seed,
            widths=hidden.widths or self.widths,
            learning_rate=draw_log_uniform(*self.learning_rates, rng),
            train_size=int(rng.choice(hidden.train_sizes or self.train_sizes)),
            rent=self.rent,
            label_noise=hidden.label_noise,
            drift_step=int(rng.choice(self.drift_steps)) if hidden.after_drift else None,
        )
