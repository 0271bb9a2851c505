"""Reward modes, by name. J is score less rent of the whole network; at the end, of what was committed.

Scores are in accuracy, or, where a mode allows the family `loss`, in the relative decrease of the loss. All modes but
`escrow` pay J over an episode, less costs for what a controller does; they differ in when they pay it.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from esper.errors import ConfigError
from esper.rl.rewards import terms
from esper.rl.rewards.facts import Step
from esper.rl.rewards.weights import Weights

Floats = NDArray[np.float64]
Terms = dict[str, Floats]
"""What a reward is the sum of, by name; ``[E]`` each."""
Pay = Callable[[Step, Weights], Terms]
"""Rewards of a step."""


@dataclass(frozen=True)
class Mode:
    """A way to pay, the families of scores it can pay in, and the weights that it reads."""

    pay: Pay
    families: tuple[str, ...]
    weights: tuple[str, ...]


MODES: dict[str, Mode] = {}


_INTERVENTION = ("intervention", "intervention_after")
_EARLY_PRUNE = ("early_prune", "early_age")


def _register(*families: str, weights: tuple[str, ...] = ()) -> Callable[[Pay], Pay]:
    def registered(pay: Pay) -> Pay:
        MODES[pay.__name__] = Mode(pay, families, weights)
        return pay

    return registered


def look_up(name: str) -> Mode:
    """The mode of that name; raises ConfigError naming the known ones."""
    if name not in MODES:
        near = difflib.get_close_matches(name, MODES, n=1)
        hint = f", did you mean '{near[0]}'?" if near else ""
        raise ConfigError(f"unknown reward mode '{name}'{hint} (known: {', '.join(MODES)})")
    return MODES[name]


@_register("accuracy", "loss")
def outcome(step: Step, _weights: Weights) -> Terms:
    """``J' - J``: telescopes to J of the committed network, exactly.

    Known failure: noise of single evaluations enters every step's reward, though not their sum. In loss, a controller
    that moves alpha to and fro is not told apart from an honest one (docs/rewards.md).
    """
    return {"objective": terms.objective(step.after) - terms.objective(step.before)}


@_register("accuracy")
def sparse(step: Step, _weights: Weights) -> Terms:
    """J of the committed network at the last step, 0 before.

    Known failure: gives no hint which of the episode's decisions mattered.
    """
    return {"objective": np.where(step.finished, terms.objective(step.after), 0.0)}


@_register("accuracy", weights=_EARLY_PRUNE)
def minimal(step: Step, weights: Weights) -> Terms:
    """`sparse` less the cost of pruning before its time.

    Known failure: that of `sparse`; and a seed that measurably harms is kept up to `early_age` all the same.
    """
    return {**sparse(step, weights), "early_prune": -weights.early_prune * terms.early_prune(step, weights)}


@_register("accuracy", weights=("progress", *_INTERVENTION))
def simplified(step: Step, weights: Weights) -> Terms:
    """`sparse`, plus shaping by the progress of all slots, less the cost of interventions.

    Known failure: progress says that a seed is there, not that it is any good; what it advances is pure noise to learn
    from where most seeds are pruned. The cost of interventions can teach never to act before anything else is learned.
    """
    return {
        **sparse(step, weights),
        "progress": weights.progress * terms.progress(step),
        "intervention": -weights.intervention * terms.intervention(step),
    }


@_register("accuracy", "loss", weights=("attribution", "progress", *_INTERVENTION, "shock", *_EARLY_PRUNE))
def shaped(step: Step, weights: Weights) -> Terms:
    """`outcome`, plus shaping by attribution and progress, less costs of interventions, alpha shocks, early pruning.

    Known failure: every ramp of alpha costs, so growth that gains less than its shock (a third of the weight for three
    steps) does not pay; and six terms with weights are six ways to be wrong.
    """
    return {
        **outcome(step, weights),
        "attribution": weights.attribution * terms.attribution(step),
        "progress": weights.progress * terms.progress(step),
        "intervention": -weights.intervention * terms.intervention(step),
        "shock": -weights.shock * terms.shock(step),
        "early_prune": -weights.early_prune * terms.early_prune(step, weights),
    }


@_register("accuracy", "loss")
def escrow(step: Step, _weights: Weights) -> Terms:
    """The change of what seeds contribute, less the change of rent.

    Contributions are paid as they come and clawed back as they go; what is not fossilized by the end is taken back
    whole. Adds up to the fossils' contributions less rent, and never pays for what the host learns by itself.

    Known failure: contributions are not J. Of two seeds that do the same job neither contributes, so neither is paid;
    two that only work together are both paid for all of it, which makes complements worth twice their gain.
    """
    before, after = step.before, step.after
    return {
        "contribution": after.contribution.sum(axis=1) - before.contribution.sum(axis=1),
        "rent": before.rent - after.rent,
    }
