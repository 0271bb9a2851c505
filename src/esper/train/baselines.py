"""The controllers that a policy is compared with, tuned for each suite.

Tuned settings lie in `tuned/SUITE.yaml`, whose comments name the commands that found them.
"""

from __future__ import annotations

from pathlib import Path

from esper.config.loading import load_settings
from esper.config.settings import Settings
from esper.control.controller import Controller
from esper.control.learned import LearnedController, PolicyOrigin, restore_controller
from esper.control.rules.heuristic import Heuristic, HeuristicSettings
from esper.control.rules.look import LookRule, LookSettings
from esper.control.rules.schedule import Periodic, PeriodicSettings, Planting, Schedule
from esper.control.rules.simple import Never, Uniform
from esper.control.shipped import ESPER, open_policy
from esper.tasks.suite import Suite

_TUNED = Path(__file__).parent / "tuned"

Places = tuple[tuple[int, int], ...]
"""Slot and blueprint indices."""


class BaselineSettings(Settings):
    """What the tunable baselines do on one suite."""

    all_at_start: Places
    """One planting per slot."""
    schedule: Places
    """The best fixed schedule found, planted as early as can be."""
    periodic: PeriodicSettings
    heuristic: HeuristicSettings
    look: LookSettings = LookSettings()
    """As everywhere: nothing in it is of one suite."""
    environment_steps: dict[str, int] = {}
    """Decisions of single networks that the search for each controller took; who is not named was not searched for."""


def baseline_settings(suite: Suite) -> BaselineSettings:
    """The suite's tuned settings, or untuned ones that try everything in turn."""
    path = _TUNED / f"{suite.name}.yaml"
    if path.exists():
        return load_settings(BaselineSettings, path, ())
    slots, kinds = range(len(suite.sites)), range(len(suite.blueprints))
    one_each = tuple((slot, slot % len(kinds)) for slot in slots)
    every = tuple((slot, kind) for kind in kinds for slot in slots)
    return BaselineSettings(
        all_at_start=one_each,
        schedule=one_each[:1],
        periodic=PeriodicSettings(plantings=every),
        heuristic=HeuristicSettings(preferences=every),
    )


def baselines(suite: Suite) -> list[Controller]:
    """All of them: none, random, all_at_start, schedule, periodic, heuristic, look, and the shipped esper."""
    settings = baseline_settings(suite)
    return [
        Never(),
        Uniform(),
        Schedule(_at_once(settings.all_at_start), suite.steps, "all_at_start"),
        Schedule(_at_once(settings.schedule), suite.steps, "schedule"),
        Periodic(settings.periodic, suite.steps),
        Heuristic(settings.heuristic, suite.steps),
        LookRule(settings.look, suite.steps),
        load_shipped(suite),
    ]


def load_shipped(suite: Suite) -> LearnedController:
    """The policy that comes with Esper, for a suite that it need not have seen."""
    run = open_policy(ESPER)
    origin = load_settings(PolicyOrigin, run.config)
    return restore_controller(run, origin, lambda rule: LookRule(rule, suite.steps), ESPER)


def _at_once(places: Places) -> list[Planting]:
    return [Planting(0, slot, blueprint) for slot, blueprint in places]
