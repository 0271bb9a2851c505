"""Who decides, and when: controllers by name or from a run that trained one, timed for a planned growth."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from esper.config.loading import load_settings
from esper.control.controller import Controller, get_promise_settings
from esper.control.learned import PolicyOrigin, restore_controller
from esper.control.rules import (
    ROUNDING,
    Heuristic,
    HeuristicSettings,
    LookRule,
    LookSettings,
    Never,
    Periodic,
    PeriodicSettings,
    Planting,
    Schedule,
    Uniform,
)
from esper.control.shipped import open_policy
from esper.engine.promises import PromiseSettings
from esper.errors import ConfigError
from esper.grower.network import ModelSpec
from esper.growth.model import GrowingModel
from esper.growth.probe import probe
from esper.lifecycle.rules import Isolation, Rules
from esper.tasks.registry import GENERATED, get_suite
from esper.tasks.suite import Suite

HORIZON = 100
"""Decisions in which controllers see times as shares, where nobody said how many there will be."""
MOST_PROGRESS = 0.5
"""Controllers are never told that more of these is over: until then every rule still plants."""
LONGEST_TRIAL = 4
"""A trial takes at most one part in so many of the horizon."""
FEWEST_LOOKS = 3
"""A growth is looked at as many times while seeds may be planted, if it is long enough."""
LATEST_PLANTING = 3
"""In a short growth, seeds may germinate in one part in so many of it, whatever becomes of them by its end."""
_BEFORE_BLENDING = 1
"""Decisions after its germination at which a seed that nothing isolates begins to count."""
_BEFORE_END = 1
"""Decisions for which a seed should have counted at the end, so that it has learned with the host."""


@dataclass(frozen=True)
class Timing:
    """What controllers are told of time, and how their rules go by it.

    Args:
        planned: Decisions, or None: until somebody stops.
        rules: What may happen to seeds, and how fast.
    """

    planned: int | None
    rules: Rules

    @property
    def horizon(self) -> int:
        """Decisions of which controllers see shares."""
        return HORIZON if self.planned is None else self.planned

    def progress(self, decision: int) -> float:
        """The share of the growth that is over at the decision of that number, from 1, as controllers are told."""
        return min(decision / self.horizon, MOST_PROGRESS if self.planned is None else 1.0)

    @property
    def isolated(self) -> int:
        """Decisions for which a seed learns apart at least."""
        return 0 if self.rules.isolation is Isolation.NONE else self.rules.min_training_steps

    def require_growth(self) -> None:
        """Refuse a plan in which no seed could be planted, count and learn.

        Raises:
            ConfigError: it is one.
        """
        needed = 1 + self.isolated + _BEFORE_BLENDING + _BEFORE_END
        if self.horizon < needed:
            apart = f", after {self.isolated} in isolation {self.rules.isolation}" if self.isolated else ""
            raise ConfigError(
                f"{self.horizon} decisions are too few for anything to grow: a seed germinates, counts from the next "
                f"decision on{apart}, and must learn until another; plan at least {needed}, or choose controller 'none'"
            )

    def trial(self, default: int) -> int:
        """Decisions for which a rule holds a seed before it judges it, if it may choose so for ``default`` ones."""
        return min(default, max(self.horizon // LONGEST_TRIAL, 1))

    def stop_after(self, default: float, trial: int, at_a_time: int) -> float:
        """The share of the growth after which a rule plants nothing any more, ``default`` where it is long enough.

        Where there is time, every seed is judged after a full trial before the end. In a short growth the last ones
        are unfinished then, which `esper.Grower.finish` judges.
        """
        needed = 1 + self.isolated + _BEFORE_BLENDING + min(self.rules.tempos) + trial + at_a_time
        latest = max(self.horizon - needed, (self.horizon - self.isolated) // LATEST_PLANTING)
        return min(default, latest / self.horizon)

    def latest_start(self, default: float, seeds: int) -> float:
        """The share of the growth at which so many seeds, one per decision, must begin to count wholly by its end;
        ``default`` where there is time for that later."""
        needed = self.isolated + _BEFORE_BLENDING + min(self.rules.tempos) + seeds + _BEFORE_END
        return min(default, max(self.horizon - needed, 0) / self.horizon)

    def promise(self, default: PromiseSettings, stop_after: float) -> PromiseSettings:
        """When a rule looks: a few times while it may plant, however short the growth."""
        latest = max(int(stop_after * self.horizon + ROUNDING), 1)
        first = min(default.first, latest)
        every = min(default.every, max((latest - first) // (FEWEST_LOOKS - 1), 1))
        return default.model_copy(update={"first": first, "every": every})


ALL_AT_START = "all_at_start"
ALL_AT_PLATEAU = "all_at_plateau"
PLATEAU_PATIENCE, PLATEAU_LATEST = 2, 0.5
"""`ALL_AT_PLATEAU` plants after so many decisions without progress, or past that share of the growth."""

_RULES = (LookRule.name, Heuristic.name, Periodic.name, ALL_AT_START, ALL_AT_PLATEAU, Uniform.name, Never.name)


class ControllerChoice(NamedTuple):
    """The controller that decides, and its bounds."""

    controller: Controller
    timing: Timing
    origin: PolicyOrigin | None
    """The run that trained it; None for rules."""


def choose_controller(
    controller: str | Path | Controller, spec: ModelSpec, horizon: int | None, rules: Rules | None
) -> ControllerChoice:
    """The controller; without ``rules``, those it knows: that a policy was trained with, the default ones otherwise.

    Raises:
        ConfigError: no rule of that name and no such run, or nothing can grow within the horizon.
        RunError, CheckpointError: the run has no usable policy.
    """
    if not isinstance(controller, str | Path):
        return ControllerChoice(controller, Timing(horizon, rules or Rules()), None)
    name = str(controller)
    if name in _RULES:
        timing = Timing(horizon, rules or Rules())
        return ControllerChoice(_make_rule(name, spec, timing), timing, None)
    run = open_policy(name, _RULES)
    origin = load_settings(PolicyOrigin, run.config)
    timing = Timing(horizon, rules or origin.rules)
    timing.require_growth()
    return ControllerChoice(restore_controller(run, origin, partial(_make_look, timing)), timing, origin)


def _make_rule(name: str, spec: ModelSpec, timing: Timing) -> Controller:
    if name == Never.name:
        return Never()
    timing.require_growth()
    if name == Uniform.name:
        return Uniform()
    if name == ALL_AT_START:
        return Schedule(_plant_one_each(spec), timing.horizon, ALL_AT_START)
    if name == ALL_AT_PLATEAU:
        plantings = _plant_one_each(spec)
        latest = timing.latest_start(PLATEAU_LATEST, len(plantings))
        return Schedule(plantings, timing.horizon, ALL_AT_PLATEAU, patience=PLATEAU_PATIENCE, latest=latest)
    if name == LookRule.name:
        return _make_look(timing, LookSettings())
    defaults, offered = HeuristicSettings(), tuple(_list_offers(spec))
    trial = timing.fit_trial(defaults.trial)
    stop_after = timing.fit_stop_after(defaults.stop_after, trial, defaults.at_a_time)
    if name == Periodic.name:
        return Periodic(PeriodicSettings(plantings=offered, trial=trial, stop_after=stop_after), timing.horizon)
    return Heuristic(HeuristicSettings(preferences=offered, trial=trial, stop_after=stop_after), timing.horizon)


def _make_look(timing: Timing, default: LookSettings) -> LookRule:
    trial = timing.fit_trial(default.trial)
    stop_after = timing.fit_stop_after(default.stop_after, trial, 1)
    changed = {"promise": timing.promise(default.promise, stop_after), "trial": trial, "stop_after": stop_after}
    return LookRule(default.model_copy(update=changed), timing.horizon)


def require_time_to_plant(controller: Controller, plateau: int | None) -> None:
    """Raise ConfigError if growth is over after ``plateau`` decisions, before the controller has seen that plateau."""
    if isinstance(controller, Schedule) and plateau is not None and plateau <= controller.patience:
        raise ConfigError(
            f"conduct.plateau {plateau} ends growth before controller {controller.name!r} plants, which is after "
            f"{controller.patience:g} decisions without progress: give more, or leave it out"
        )


def require_promise(controller: Controller, given: PromiseSettings | None) -> PromiseSettings | None:
    """How what blueprints promise is measured for the controller: as is ``given``, or as it wishes; None: it is not.

    Raises:
        ConfigError: it was given to a controller that does not go by it, or shows what it does not know.
    """
    settings = get_promise_settings(controller)
    if given is None:
        return settings
    if settings is None:
        raise ConfigError(
            f"controller {controller.name!r} does not go by what blueprints promise: leave conduct.promise out, take "
            f"controller {LookRule.name!r}, or give one of your own an attribute `promise`"
        )
    if given.shown != settings.shown:
        raise ConfigError(
            f"conduct.promise.shown is {given.shown!r}, but controller {controller.name!r} goes by {settings.shown!r}"
        )
    return given


def _list_offers(spec: ModelSpec) -> list[tuple[int, int]]:
    """Slot and blueprint indices in the order in which rules try them.

    Blueprint by blueprint, the cheapest first, and for each of them from the last slot to the first.
    """
    parameters = spec.costs.parameters.blueprints[0]
    slots, kinds = spec.compatible[0].nonzero()
    places = zip(slots.tolist(), kinds.tolist(), strict=True)
    return sorted(places, key=lambda place: (int(parameters[place]), -place[0]))


def _plant_one_each(spec: ModelSpec) -> list[Planting]:
    """In each slot the dearest that it offers; of equals the one that was named first."""
    offers = spec.compatible[0]
    dearest = np.where(offers, spec.costs.parameters.blueprints[0], -1).argmax(axis=1)
    return [Planting(0, slot, int(dearest[slot])) for slot in np.flatnonzero(offers.any(axis=1)).tolist()]


_DRAWN = 256
"""Instances that show which rents the suites of a training have."""
_GENERATED = 32
"""Generated suites that stand for all of them."""


def warn_of_unfamiliar(
    origin: PolicyOrigin | None, model: GrowingModel, timing: Timing, rent: float, classes: int
) -> None:
    """Say once what ``model`` and its circumstances have that no suite of a policy's training had.

    Nothing that a policy learned tells it what to do there. It may plant and prune for ever, and keep nothing.
    """
    if origin is None:
        return
    kinds, slots = tuple(dict.fromkeys((origin.suite, *origin.mix))), model.slots.values()
    experience = _learn_known(kinds)
    foreign = [
        *_list_unknown("blueprints", {name for slot in slots for name in slot.blueprints}, experience.blueprints),
        *_list_unknown("layouts", {slot.site.layout.value for slot in slots}, experience.layouts),
        *_describe_outside("a horizon of {:g}", timing.horizon, experience.horizons),
        *_describe_outside("rent {:g}", rent, experience.rents),
        *_describe_outside("{:g} classes", classes, experience.classes),
    ]
    if foreign:
        warnings.warn(
            f"the policy was trained on {', '.join(kinds)} and never met {'; '.join(foreign)}: it may plant and prune "
            "without keeping anything; compare it with controller 'look', or train one on problems like yours",
            stacklevel=5,  # at the call of `Grower`, which has two decorators
        )


class _Known(NamedTuple):
    """What suites have."""

    blueprints: tuple[str, ...]
    layouts: tuple[str, ...]
    horizons: tuple[float, ...]
    rents: tuple[float, ...]
    classes: tuple[float, ...]


@cache
def _learn_known(names: tuple[str, ...]) -> _Known:
    """Of the suites of these names, some of the generated ones standing for all."""
    numbers = range(_GENERATED if GENERATED in names else 0)
    own = [get_suite(name) for name in names if name != GENERATED]
    suites = [*own, *(get_suite(f"{GENERATED}:{number}") for number in numbers)]
    return _Known(
        tuple(dict.fromkeys(name for suite in suites for name in suite.blueprints)),
        _find_layouts(suites),
        tuple(suite.steps for suite in suites),
        _draw_rents(suites),
        tuple(suite.classes for suite in suites),
    )


def _list_unknown(what: str, here: Iterable[str], known: Iterable[str]) -> list[str]:
    strange = sorted(set(here) - set(known))
    return [f"{what} {', '.join(strange)} (it knows {', '.join(known)})"] if strange else []


def _describe_outside(what: str, here: float, known: Sequence[float]) -> list[str]:
    """What is ``here``, if it is less or more than everything that is known."""
    low, high = min(known), max(known)
    if low <= here <= high:
        return []
    return [f"{what.format(here)} (it knows {' to '.join(f'{one:g}' for one in sorted({low, high}))})"]


def _find_layouts(suites: Sequence[Suite]) -> tuple[str, ...]:
    """Layouts of the sites at which the suites' hosts grow; those with the same problems have hosts of one kind."""
    alike = {(type(suite), suite.families): suite for suite in suites}
    probed = [probe(one.template(), one.sites, torch.zeros(2, *one.input_shape)).sites for one in alike.values()]
    return tuple(sorted({site.layout.value for sites in probed for site in sites.values()}))


def _draw_rents(suites: Sequence[Suite]) -> tuple[float, ...]:
    """Rents of instances drawn evenly from the suites."""
    rng, each = np.random.default_rng(0), -(-_DRAWN // len(suites))
    return tuple(instance.rent for suite in suites for instance in suite.sample(each, "train", rng))
