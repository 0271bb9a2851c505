"""Makes a grower's controller, by name or from the run that trained it, and fits rules to the planned decisions."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from esper.control.controller import Controller, get_promise_settings
from esper.control.learned import PolicyOrigin, open_policy, restore_controller
from esper.control.own import is_in_file, load_controller
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
from esper.errors import ConfigError, plural
from esper.extras import require_extra
from esper.grower.network import ModelSpec
from esper.growth.promise import PromiseSettings
from esper.lifecycle.rules import Rules

HORIZON = 100
"""Decisions that controllers reckon with where the number is not planned."""
MAX_UNPLANNED_PROGRESS = 0.5
"""Most progress that controllers see where the number of decisions is not planned: until then every rule plants."""
TRIALS_PER_HORIZON = 4
"""A trial takes at most one part in so many of the horizon."""
MIN_LOOKS = 3
"""Looks while modules may be planted, if growth is long enough for as many."""
PLANTING_PART = 3
"""However short growth is, modules may germinate in the first of so many parts of it."""
_BEFORE_BLENDING = 1
"""Decisions from germination until a module begins to count."""
_BEFORE_END = 1
"""Decisions for which a module should have counted at the end, so that it has learned with the host."""


@dataclass(frozen=True)
class Timing:
    """The planned decisions, and the settings of rules that fit into them."""

    planned: int | None
    """Number of decisions; None: not planned."""
    rules: Rules

    @property
    def horizon(self) -> int:
        """Decisions that controllers reckon with."""
        return HORIZON if self.planned is None else self.planned

    def compute_progress(self, decision: int) -> float:
        """The share of growth that is over at that decision, from 1, as controllers see it."""
        return min(decision / self.horizon, MAX_UNPLANNED_PROGRESS if self.planned is None else 1.0)

    def require_growth(self) -> None:
        """Refuse a plan in which no module could germinate, count and learn."""
        needed = 1 + _BEFORE_BLENDING + _BEFORE_END
        if self.horizon < needed:
            raise ConfigError(
                f"{plural(self.horizon, 'decision')} is too few for anything to grow: a seed germinates, affects the "
                f"output from the next decision on, and must train until another decision; plan at least {needed}, or "
                "use controller 'none'"
            )

    def fit_trial(self, default: int) -> int:
        """Decisions for which a rule holds a module before it judges it: ``default``, or fewer in a short growth."""
        return min(default, max(self.horizon // TRIALS_PER_HORIZON, 1))

    def fit_stop_after(self, default: float, trial: int, at_a_time: int) -> float:
        """The share of growth after which a rule plants nothing: ``default``, or less in a short growth.

        Every module can then be judged after a trial before the end. In a very short growth the last ones are left
        unfinished, and `esper.Grower.finish` judges them.
        """
        needed = 1 + _BEFORE_BLENDING + min(self.rules.tempos) + trial + at_a_time
        latest = max(self.horizon - needed, self.horizon // PLANTING_PART)
        return min(default, latest / self.horizon)

    def fit_latest_start(self, default: float, modules: int) -> float:
        """The share of growth at which a rule must start to plant that many modules, one per decision.

        It is ``default``, or less in a short growth, so that all of them count fully at the end.
        """
        needed = _BEFORE_BLENDING + min(self.rules.tempos) + modules + _BEFORE_END
        return min(default, max(self.horizon - needed, 0) / self.horizon)

    def fit_promise(self, default: PromiseSettings, stop_after: float) -> PromiseSettings:
        """When a rule looks: by ``default``, or earlier and more often, to look a few times while it may plant."""
        latest = max(int(stop_after * self.horizon + ROUNDING), 1)
        first = min(default.first, latest)
        every = min(default.every, max((latest - first) // (MIN_LOOKS - 1), 1))
        return default.model_copy(update={"first": first, "every": every})

    def fit_early(self, default: float, first: int, slots: int) -> float:
        """The share of growth in which a rule plants decision after decision: ``default``, or more in a short growth.

        It is then long enough for every slot, one decision each from the ``first`` look on, but ends with the first
        third of growth.
        """
        needed = min(first + slots - 1, self.horizon // PLANTING_PART)
        return max(default, needed / self.horizon)


ALL_AT_START = "all_at_start"
ALL_AT_PLATEAU = "all_at_plateau"
PLATEAU_PATIENCE, PLATEAU_LATEST = 2, 0.5
"""`ALL_AT_PLATEAU` plants after so many decisions without progress, or past that share of growth."""

_RULES = (LookRule.name, Heuristic.name, Periodic.name, ALL_AT_START, ALL_AT_PLATEAU, Uniform.name, Never.name)


def choose_controller(
    controller: str | Path | Controller, spec: ModelSpec, horizon: int | None, rules: Rules | None
) -> tuple[Controller, Timing]:
    """The controller of that name, from that run, in that file as ``FILE.py:NAME``, or as it is; and its timing.

    Without ``rules``, a policy has those that it was trained with, and any other controller the default ones.
    """
    timing = Timing(horizon, rules or Rules())
    if not isinstance(controller, str | Path):
        return controller, timing
    name = str(controller)
    if name in _RULES:
        return _make_rule(name, spec, timing), timing
    if is_in_file(name):
        return load_controller(name, timing.horizon), timing
    # Not a rule: the directory of a run.
    run = open_policy(name, _RULES)
    require_extra("train", f"controller {name!r}, which is the run of a training,", "yaml")
    from esper.config.loading import load_settings  # noqa: PLC0415 (needs the extra)

    origin = load_settings(PolicyOrigin, run.config)
    timing = Timing(horizon, rules or origin.rules)
    timing.require_growth()
    return restore_controller(run, origin, partial(_make_look, timing, spec)), timing


def _make_rule(name: str, spec: ModelSpec, timing: Timing) -> Controller:
    if name == Never.name:
        return Never()
    timing.require_growth()
    if name == Uniform.name:
        return Uniform()
    if name == LookRule.name:
        return _make_look(timing, spec, LookSettings())
    parameters = spec.costs.parameters.blueprints[0]
    compatible = spec.compatible[0]

    if name in (ALL_AT_START, ALL_AT_PLATEAU):
        # In each slot the largest blueprint that it offers; of equal ones the first.
        largest = np.where(compatible, parameters, -1).argmax(axis=1)
        slots = np.flatnonzero(compatible.any(axis=1)).tolist()
        plantings = [Planting(0, slot, int(largest[slot])) for slot in slots]
        if name == ALL_AT_START:
            return Schedule(plantings, timing.horizon, ALL_AT_START)
        latest = timing.fit_latest_start(PLATEAU_LATEST, len(plantings))
        return Schedule(plantings, timing.horizon, ALL_AT_PLATEAU, patience=PLATEAU_PATIENCE, latest=latest)

    # Slot and blueprint in the order of trial: the smallest blueprint first, and each from the last slot to the first.
    slots, kinds = compatible.nonzero()
    pairs = zip(slots.tolist(), kinds.tolist(), strict=True)
    offers = tuple(sorted(pairs, key=lambda pair: (int(parameters[pair]), -pair[0])))
    defaults = HeuristicSettings()
    trial = timing.fit_trial(defaults.trial)
    stop_after = timing.fit_stop_after(defaults.stop_after, trial, defaults.at_a_time)
    if name == Periodic.name:
        return Periodic(PeriodicSettings(plantings=offers, trial=trial, stop_after=stop_after), timing.horizon)
    return Heuristic(HeuristicSettings(preferences=offers, trial=trial, stop_after=stop_after), timing.horizon)


def _make_look(timing: Timing, spec: ModelSpec, default: LookSettings) -> LookRule:
    trial = timing.fit_trial(default.trial)
    stop_after = timing.fit_stop_after(default.stop_after, trial, 1)
    promise = timing.fit_promise(default.promise, stop_after)
    early = timing.fit_early(default.early, promise.first, spec.compatible.shape[1])
    update = {"promise": promise, "early": early, "trial": trial, "stop_after": stop_after}
    return LookRule(default.model_copy(update=update), timing.horizon)


def require_time_to_plant(controller: Controller, plateau: int | None) -> None:
    """Refuse a ``plateau``, the decisions without progress that end growth, before the controller reacts to one."""
    if isinstance(controller, Schedule) and plateau is not None and plateau <= controller.patience:
        raise ConfigError(
            f"conduct.plateau {plateau} ends growth before controller {controller.name!r} plants, which is after "
            f"{controller.patience:g} decisions without progress: give a larger plateau, or omit it"
        )


def choose_promise_settings(controller: Controller, requested: PromiseSettings | None) -> PromiseSettings | None:
    """How promises are measured for the controller: as ``requested``, or by its own settings; None: they are not."""
    settings = get_promise_settings(controller)
    if requested is None:
        return settings
    if settings is None:
        raise ConfigError(
            f"controller {controller.name!r} does not use promises: omit conduct.promise, use controller "
            f"{LookRule.name!r}, or give your own controller an attribute `promise`"
        )
    if requested.shown != settings.shown:
        raise ConfigError(
            f"conduct.promise.shown is {requested.shown!r}, but controller {controller.name!r} needs {settings.shown!r}"
        )
    return requested
