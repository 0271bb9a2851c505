"""What all suites on a fixed data set share: instances differ in host, amount and quality of the data, and rent."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from esper.errors import TaskError
from esper.tasks.data import PARTS, Data, Floats, Part, Scale, standardised, with_label_noise
from esper.tasks.datasets.dataset import Dataset
from esper.tasks.datasets.distortions import Distortion, grainy, masked
from esper.tasks.instance import Instance
from esper.tasks.lookup import lookup
from esper.tasks.optimizer import OptimizerSettings
from esper.tasks.streams import stream
from esper.tasks.suite import Suite, log_uniform

LEARNING_RATES = (0.007, 0.02)
RENTS = (0.03, 0.08, 0.15)
NOISE = 0.3

_SPLIT, _LABELS, _FIXED, _FRESH = range(4)
"""Keys of an instance's random streams."""


@dataclass(frozen=True)
class Condition:
    """What a family does to the data."""

    scarce: bool = False
    label_noise: float = 0.0
    distortion: Distortion | None = None


_TRAINING: Mapping[str, Condition] = {
    "clean": Condition(),
    "scarce": Condition(scarce=True),
    "noisy": Condition(label_noise=NOISE),
}
_TRANSFER: Mapping[str, Condition] = {
    "masked": Condition(distortion=masked),
    "grainy": Condition(distortion=grainy),
}
_CONDITIONS = {**_TRAINING, **_TRANSFER}


class DatasetSuite(Suite):
    """The last ``test_size`` rows of a data set are for test; each instance splits the others by its own seed.

    A family is a condition of the data, a variant the widths of the host.
    """

    classes = 10
    steps = 30
    batches_per_step = 16
    batch_size = 64
    validation_size = 256
    optimizer = OptimizerSettings(name="adamw", betas=(0.9, 0.98), weight_decay=0.0)
    families = tuple(_TRAINING)
    transfer_families = tuple(_TRANSFER)

    train_sizes: tuple[int, ...]
    scarce_train_size: int
    host_widths: tuple[tuple[int, ...], ...]
    """Widths of the variants, the widest host first."""

    @abstractmethod
    def dataset(self) -> Dataset:
        """The data set, built once in a process."""

    def variants(self, family: str) -> tuple[str, ...]:
        """Every family has one variant for each shape of host; raises TaskError for an unknown family."""
        _condition(family)
        return tuple(self._widths())

    def draw(self, family: str, variant: str, seed: int, rng: np.random.Generator) -> Instance:
        """An instance with a random learning rate, train size and rent."""
        condition = _condition(family)
        return Instance(
            suite=self.name,
            family=family,
            variant=variant,
            seed=seed,
            widths=lookup(f"variant of suite '{self.name}'", variant, self._widths()),
            learning_rate=log_uniform(*LEARNING_RATES, rng),
            train_size=self.scarce_train_size if condition.scarce else int(rng.choice(self.train_sizes)),
            rent=float(rng.choice(RENTS)),
            label_noise=condition.label_noise,
        )

    def data(self, instance: Instance, part: Part, phase: int = 0) -> Data:
        """Inputs ``[N, *input_shape]``, standardised by the training part, and labels; nothing drifts here."""
        self.check(instance)
        if phase:
            raise TaskError(f"suite '{self.name}' has no phase {phase}: its data never drift")
        inputs = self._inputs(instance, part)
        labels = self.dataset().labels[self._rows(instance, part)]
        if part == "train" and instance.label_noise:
            labels = with_label_noise(labels, instance.label_noise, self.classes, stream(instance.seed, _LABELS))
        scale = Scale.of(inputs if part == "train" else self._inputs(instance, "train"))
        return standardised(inputs.reshape(-1, *self.input_shape), labels, scale)

    def _widths(self) -> dict[str, tuple[int, ...]]:
        return {"_".join(map(str, widths)): widths for widths in self.host_widths}

    def _inputs(self, instance: Instance, part: Part) -> Floats:
        inputs = self.dataset().inputs[self._rows(instance, part)]
        distortion = _condition(instance.family).distortion
        if distortion is None:
            return inputs
        fixed, fresh = stream(instance.seed, _FIXED), stream(instance.seed, _FRESH, PARTS.index(part))
        return distortion(inputs, fixed, fresh)

    def _rows(self, instance: Instance, part: Part) -> NDArray[np.int64]:
        """The rows ``[N]`` of the data set that make up a part of the instance."""
        total = len(self.dataset())
        pool = total - self.test_size
        if part == "test":
            return np.arange(pool, total)
        if instance.train_size + self.validation_size > pool:
            room = pool - self.validation_size
            raise TaskError(f"instance {instance.name} asks for {instance.train_size} training examples; {room} exist")
        rows = stream(instance.seed, _SPLIT).permutation(pool)
        if part == "validation":
            return rows[: self.validation_size]
        return rows[self.validation_size : self.validation_size + instance.train_size]


def _condition(family: str) -> Condition:
    return lookup("family of fixed data", family, _CONDITIONS)
