"""What a learned policy meets in a model that it never met where it learned."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import numpy as np
import torch

from esper.control.loading import PolicyOrigin
from esper.grower.timing import Timing
from esper.growth.model import GrowingModel
from esper.growth.probe import probe
from esper.tasks.registry import get_suite
from esper.tasks.suite import Suite

_DRAWN = 256
"""Instances that show which rents a suite has."""


def warn_of_the_unknown(
    origin: PolicyOrigin | None, model: GrowingModel, timing: Timing, rent: float, classes: int
) -> None:
    """Say once what ``model`` and its circumstances have that the suite of a policy's training had not.

    Nothing that a policy learned tells it what to do there. It may plant and prune for ever, and keep nothing.
    """
    if origin is None:
        return
    suite = get_suite(origin.suite)
    slots = model.slots.values()
    rents = _rents(suite)
    foreign = [
        *_strangers("blueprints", {name for slot in slots for name in slot.blueprints}, suite.blueprints),
        *_strangers("layouts", {slot.site.layout.value for slot in slots}, _layouts(suite)),
    ]
    if timing.horizon != suite.steps:
        foreign.append(f"a horizon of {timing.horizon} (it knows {suite.steps})")
    if not min(rents) <= rent <= max(rents):
        known = " to ".join(f"{one:g}" for one in sorted({min(rents), max(rents)}))
        foreign.append(f"rent {rent:g} (it knows {known})")
    if classes != suite.classes:
        foreign.append(f"{classes} classes (it knows {suite.classes})")
    if foreign:
        warnings.warn(
            f"the policy was trained on suite {suite.name} and never met {'; '.join(foreign)}: it may plant and prune "
            "without keeping anything; compare it with controller 'heuristic', or train one on problems like yours",
            stacklevel=4,
        )


def _strangers(what: str, here: Iterable[str], known: Iterable[str]) -> list[str]:
    strange = sorted(set(here) - set(known))
    return [f"{what} {', '.join(strange)} (it knows {', '.join(known)})"] if strange else []


def _layouts(suite: Suite) -> list[str]:
    """Of the sites at which the suite's hosts grow."""
    sites = probe(suite.template(), suite.sites, torch.zeros(2, *suite.input_shape)).sites.values()
    return sorted({site.layout.value for site in sites})


def _rents(suite: Suite) -> list[float]:
    return [instance.rent for instance in suite.sample(_DRAWN, "train", np.random.default_rng(0))]
