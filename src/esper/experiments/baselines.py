"""The controllers that a policy is compared with, tuned for each suite."""

from __future__ import annotations

from esper.control.controller import Controller
from esper.control.rules.heuristic import Heuristic, HeuristicSettings
from esper.control.rules.periodic import Periodic, PeriodicSettings
from esper.control.rules.schedule import Planting, Schedule
from esper.control.rules.simple import Never, Uniform
from esper.tasks.suite import Suite


def baselines(suite: Suite) -> list[Controller]:
    """All of them: none, random, all_at_start, periodic, heuristic."""
    slots, kinds = range(len(suite.sites)), suite.blueprints
    first = [Planting(slot, slot, slot % len(kinds)) for slot in slots]
    pairs = tuple((slot, kind) for kind in range(len(kinds)) for slot in slots)
    return [
        Never(),
        Uniform(),
        Schedule(first, suite.steps, "all_at_start"),
        Periodic(PeriodicSettings(plantings=pairs), suite.steps),
        Heuristic(HeuristicSettings(preferences=pairs), suite.steps),
    ]
