"""Policies that plant, for tests of what follows from a policy: a short training learns to do nothing."""

from collections.abc import Sequence

import numpy as np

from esper.control.learned import POLICY
from esper.control.rules import Planting, Schedule
from esper.lifecycle.rules import Rules
from esper.tasks.instance import Instance
from esper.tasks.registry import get_suite
from esper.train.evaluation import EvaluationConfig, EvaluationResult, evaluate_controllers
from esper.train.workers import LocalWorkers

TERMS = EvaluationConfig("short", Rules())


def instances(count: int, stream: int = 0) -> list[Instance]:
    return get_suite("short").sample(count, "heldout", np.random.default_rng(stream))


def planter() -> Schedule:
    """In slot 0 at once, in slot 2 as soon as it may."""
    return Schedule([Planting(0, 0, 3), Planting(1, 2, 6)], get_suite("short").steps, POLICY)


def planted(chosen: Sequence[Instance]) -> EvaluationResult:
    with LocalWorkers(1) as workers:
        return evaluate_controllers(workers, [planter()], TERMS, chosen)[0]
