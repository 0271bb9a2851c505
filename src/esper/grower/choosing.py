"""Controllers by name, or from a run that trained one."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from esper.checkpoints import Checkpoints
from esper.config import load_settings
from esper.control.controller import Controller
from esper.control.loading import PolicyOrigin, restore_policy
from esper.control.rules.heuristic import Heuristic, HeuristicSettings
from esper.control.rules.schedule import Periodic, PeriodicSettings, Planting, Schedule
from esper.control.rules.simple import Never, Uniform
from esper.errors import ConfigError
from esper.grower.subject import Catalogue
from esper.grower.timing import Timing
from esper.growth.names import did_you_mean
from esper.lifecycle.rules import Rules
from esper.telemetry.run_directory import RunDirectory

ALL_AT_START = "all_at_start"
Offered = list[tuple[int, int]]
"""Slot and blueprint indices, in the order in which rules try them."""

_RULES = (Never.name, Uniform.name, ALL_AT_START, Periodic.name, Heuristic.name)


class Chosen(NamedTuple):
    """Who decides, and within which bounds."""

    controller: Controller
    timing: Timing
    origin: PolicyOrigin | None
    """The run that trained it; None for rules."""


def choose_controller(
    controller: str | Path | Controller, catalogue: Catalogue, horizon: int | None, rules: Rules | None
) -> Chosen:
    """The controller; without ``rules``, those it knows: that a policy was trained with, the default ones otherwise.

    Raises:
        ConfigError: no rule of that name and no such run, or nothing can grow within the horizon.
        RunError, CheckpointError: the run has no usable policy.
    """
    if not isinstance(controller, str | Path):
        return Chosen(controller, Timing(horizon, rules or Rules()), None)
    name = str(controller)
    if name in _RULES:
        timing = Timing(horizon, rules or Rules())
        return Chosen(_rule(name, _offered(catalogue), timing), timing, None)
    run, origin = _open_run(name)
    timing = Timing(horizon, rules or origin.rules)
    timing.require_growth()
    return Chosen(restore_policy(Checkpoints(run.checkpoints).latest().tensors, origin.policy), timing, origin)


def rules_of(name: str) -> Rules:
    """The rules that the controller of that name knows, as `choose_controller` tells them; raises what it raises."""
    return Rules() if name in _RULES else _open_run(name)[1].rules


def _open_run(name: str) -> tuple[RunDirectory, PolicyOrigin]:
    """The run with that directory, and what it says of its policy."""
    if not Path(name).exists():
        raise ConfigError(
            f"no controller {name!r}{did_you_mean(name, _RULES)}: give one of {', '.join(_RULES)}, "
            "or the directory of a run of `esper train`"
        )
    run = RunDirectory.open_own(Path(name))
    return run, load_settings(PolicyOrigin, run.config)


def _rule(name: str, offered: Offered, timing: Timing) -> Controller:
    if name == Never.name:
        return Never()
    timing.require_growth()
    if name == Uniform.name:
        return Uniform()
    if name == ALL_AT_START:
        return Schedule(_one_each(offered), timing.horizon, ALL_AT_START)
    trial, stop_after = timing.trial, timing.stop_after
    if name == Periodic.name:
        return Periodic(PeriodicSettings(plantings=tuple(offered), trial=trial, stop_after=stop_after), timing.horizon)
    return Heuristic(HeuristicSettings(preferences=tuple(offered), trial=trial, stop_after=stop_after), timing.horizon)


def _offered(catalogue: Catalogue) -> Offered:
    """Blueprint by blueprint, the cheapest first, and for each of them from the last slot to the first."""
    parameters = catalogue.costs.parameters.blueprints[0]
    slots, kinds = catalogue.compatible[0].nonzero()
    places = zip(slots.tolist(), kinds.tolist(), strict=True)
    return sorted(places, key=lambda place: (int(parameters[place]), -place[0]))


def _one_each(offered: Offered) -> list[Planting]:
    """In each slot the dearest that it offers."""
    return [Planting(0, slot, kind) for slot, kind in sorted(dict(offered).items())]
