"""Suites whose families are tables of hidden variants. A variant fixes an instance's problem and its host's widths."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from esper.errors import TaskError
from esper.tasks.instance import Instance
from esper.tasks.registry import find_by_name
from esper.tasks.suite import Suite, draw_log_uniform


@dataclass(frozen=True)
class Families:
    """All variants of a suite, by family, and the settings of instances that do not depend on the variant.

    A variant has ``widths`` of the host, ``train_sizes`` to draw from, ``label_noise``, a ``sampler`` of examples, and
    the one that replaces it at the drift step, ``after_drift``, or None.
    """

    kind: str
    """The word for a family in error messages, such as ``token family``."""
    variants: Mapping[str, Mapping[str, Any]]
    """Variants by family and name, including families that are only for evaluation."""
    rent: float
    learning_rates: tuple[float, float]
    """Bounds of the instances' learning rates, which are drawn log-uniformly."""
    drift_steps: range
    """Decision steps at which an instance's data may drift, if they do."""

    def find(self, family: str, variant: str) -> Any:
        """A family's variant; raises TaskError for unknown names."""
        variants = find_by_name(self.kind, family, self.variants)
        return find_by_name(f"variant of {self.kind} '{family}'", variant, variants)

    def find_sampler(self, instance: Instance, phase: int) -> Any:
        """The sampler of an instance before its drift (phase 0) or after it (phase 1)."""
        variant = self.find(instance.family, instance.variant)
        sampler = {0: variant.sampler, 1: variant.after_drift}.get(phase)
        if sampler is None:
            raise TaskError(f"instance {instance.name} has no phase {phase}: only instances that drift have a phase 1")
        return sampler


class VariantSuite(Suite):
    """A suite whose families and variants come from a table."""

    table: Families

    def variants(self, family: str) -> tuple[str, ...]:
        return tuple(find_by_name(self.table.kind, family, self.table.variants))

    def draw(self, family: str, variant: str, seed: int, rng: np.random.Generator) -> Instance:
        table, hidden = self.table, self.table.find(family, variant)
        train_sizes: tuple[int, ...] = hidden.train_sizes
        return Instance(
            suite=self.name,
            family=family,
            variant=variant,
            seed=seed,
            widths=hidden.widths,
            learning_rate=draw_log_uniform(*table.learning_rates, rng),
            train_size=int(rng.choice(train_sizes)),
            rent=table.rent,
            label_noise=hidden.label_noise,
            drift_step=int(rng.choice(table.drift_steps)) if hidden.after_drift else None,
        )
