"""The terms that reward modes are made of: pure functions of a step, all ``[E]``, in units of the score."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from esper.lifecycle.stages import Stage
from esper.rl.rewards.facts import Standing, Step
from esper.rl.rewards.weights import Weights

Floats = NDArray[np.float64]

PROGRESS: dict[Stage, float] = {
    Stage.GERMINATED: 0.25,
    Stage.TRAINING: 0.5,
    Stage.BLENDING: 0.75,
    Stage.HOLDING: 1.0,
    Stage.FOSSILIZED: 1.0,
}
"""How far a slot has come; 0 in all other stages."""

_PROGRESS = np.array([PROGRESS.get(stage, 0.0) for stage in Stage])


def objective(standing: Standing) -> Floats:
    """J: ``score - rent`` of the whole network."""
    return standing.score - standing.rent


def advance(before: Floats, after: Floats, step: Step) -> Floats:
    """``after - before``, where ``after`` is 0 at the end: whatever was advanced has been taken back by then.

    Potential-based shaping with discount 1 (Ng, Harada and Russell 1999): over an episode it adds up to 0, so it
    changes no order of returns.
    """
    return np.where(step.finished, 0.0, after) - before


def progress(step: Step) -> Floats:
    """Shaping by how far *all* slots have come, the sum of `PROGRESS`."""
    before, after = (_PROGRESS[standing.stage].sum(axis=1) for standing in (step.before, step.after))
    return advance(before, after, step)


def attribution(step: Step) -> Floats:
    """Shaping by the sum of the seeds' contributions."""
    return advance(step.before.contribution.sum(axis=1), step.after.contribution.sum(axis=1), step)


def intervention(step: Step) -> Floats:
    """1 for every operation but wait."""
    return step.acted.astype(np.float64)


def shock(step: Step) -> Floats:
    """The sum over slots of the squared change of alpha: 1 for a jump from nothing, 1/3 for a ramp of three steps."""
    return np.square(step.after.alpha - step.before.alpha).sum(axis=1)


def early_prune(step: Step, weights: Weights) -> Floats:
    """1 for pruning a seed before its time."""
    return ((step.pruned_age >= 0) & (step.pruned_age <= weights.early_age)).astype(np.float64)
