"""Controllers by name, or from a run that trained one."""

from __future__ import annotations

from pathlib import Path

from esper.config import load_settings
from esper.control.controller import Controller
from esper.control.rules.heuristic import Heuristic, HeuristicSettings
from esper.control.rules.periodic import Periodic, PeriodicSettings
from esper.control.rules.schedule import Planting, Schedule
from esper.control.rules.simple import Never, Uniform
from esper.errors import ConfigError
from esper.experiments.evaluate import load_policy
from esper.experiments.run_directory import RunDirectory
from esper.experiments.settings import TrainSettings
from esper.grower.subject import Catalogue
from esper.growth.names import did_you_mean
from esper.lifecycle.rules import Rules

ALL_AT_START = "all_at_start"
SHORTEST_TRIALS = 4
"""A trial takes at most this part of the horizon."""
_BEFORE_TRIAL = 2 + max(Rules().tempos)
"""Decisions from a seed's germination to its trial."""

Offered = list[tuple[int, int]]
"""Slot and blueprint indices, in the order in which rules try them."""

_RULES = (Never.name, Uniform.name, ALL_AT_START, Periodic.name, Heuristic.name)


def chosen(controller: str | Path | Controller, catalogue: Catalogue, horizon: int) -> tuple[Controller, Rules]:
    """The controller, and the rules it knows: those a policy was trained with, the default ones otherwise.

    Raises:
        ConfigError: no rule of that name, and no such run.
        RunError, CheckpointError: the run has no usable policy.
    """
    if not isinstance(controller, str | Path):
        return controller, Rules()
    name = str(controller)
    if name in _RULES:
        return _rule(name, _offered(catalogue), horizon), Rules()
    run, settings = _trained(name)
    return load_policy(run, settings).controller, settings.rules


def rules_of(name: str) -> Rules:
    """The rules that the controller of that name knows, as `chosen` tells them; raises what it raises."""
    return Rules() if name in _RULES else _trained(name)[1].rules


def _trained(name: str) -> tuple[RunDirectory, TrainSettings]:
    """The run with that directory, and its settings."""
    if not Path(name).exists():
        raise ConfigError(
            f"no controller {name!r}{did_you_mean(name, _RULES)}: give one of {', '.join(_RULES)}, "
            "or the directory of a run of `esper train`"
        )
    run = RunDirectory.open_own(Path(name))
    return run, load_settings(TrainSettings, run.config)


def _rule(name: str, offered: Offered, horizon: int) -> Controller:
    if name == Never.name:
        return Never()
    if name == Uniform.name:
        return Uniform()
    if name == ALL_AT_START:
        return Schedule(_one_each(offered), horizon, ALL_AT_START)
    trial, stop_after = _in_time(horizon)
    if name == Periodic.name:
        return Periodic(PeriodicSettings(plantings=tuple(offered), trial=trial, stop_after=stop_after), horizon)
    return Heuristic(HeuristicSettings(preferences=tuple(offered), trial=trial, stop_after=stop_after), horizon)


def _in_time(horizon: int) -> tuple[int, float]:
    """A seed's trial in decisions, and the share of the horizon after which nothing may germinate any more.

    Every seed is judged before the end: one that is still unfinished then is dropped, and the host, which has learned
    to live with it, does worse than if it had never grown.
    """
    usual = HeuristicSettings()
    trial = min(usual.trial, max(horizon // SHORTEST_TRIALS, 1))
    needed = _BEFORE_TRIAL + trial + usual.at_a_time
    return trial, min(usual.stop_after, max(1 - needed / horizon, 0.0))


def _offered(catalogue: Catalogue) -> Offered:
    """Blueprint by blueprint, the cheapest first, and for each of them from the last slot to the first."""
    parameters = catalogue.costs.parameters.blueprints[0]
    slots, kinds = catalogue.compatible[0].nonzero()
    places = zip(slots.tolist(), kinds.tolist(), strict=True)
    return sorted(places, key=lambda place: (int(parameters[place]), -place[0]))


def _one_each(offered: Offered) -> list[Planting]:
    """In each slot the dearest that it offers."""
    return [Planting(0, slot, kind) for slot, kind in sorted(dict(offered).items())]
