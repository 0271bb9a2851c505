"""A run directory with planted events, and its screen when it is watched."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path

from textual.pilot import Pilot

from esper.dash.watch.app import Watch
from esper.runs.events import EpisodeEnded, EpisodeStarted, LifecycleTransition, RunStarted, StepTaken
from esper.runs.follower import StoreFollower
from esper.runs.run_directory import RunDirectory
from esper.runs.store import RunStore

METADATA = {
    "command": "train",
    "iterations": 5,
    "steps": 4,
    "slots": ["first", "second"],
    "baseline_levels": {"none": 0.51, "heuristic": 0.64},
}
DEADLINE = 30.0
"""Seconds after which something that is waited for will not come."""

Scenario = Callable[[Pilot[None]], Awaitable[None]]


def step(episode: int, environment: int, number: int, **fields: object) -> StepTaken:
    return StepTaken(
        iteration=episode,
        episode=episode,
        environment=environment,
        step=number,
        **{
            "op": "wait",
            "loss": 1.0,
            "metric": 0.5,
            "objective": 0.45,
            "added": 0.1,
            "stages": ("dormant", "dormant"),
            "blueprints": (None, None),
            "alphas": (0.0, 0.0),
            "contributions": (None, None),
            **fields,
        },
    )


def changed(episode: int, environment: int, number: int, before: str, after: str, **fields: object):
    return LifecycleTransition(
        iteration=episode,
        episode=episode,
        environment=environment,
        step=number,
        **{"slot": 0, "blueprint": "norm", "cause": "tick", "reason": "passed", **fields},
        before=before,
        after=after,
    )


def begin(episode: int, environment: int) -> EpisodeStarted:
    return EpisodeStarted(
        iteration=episode,
        episode=episode,
        environment=environment,
        step=0,
        instance=f"problem/{environment}",
        family="family",
        variant="variant",
        rent=0.08,
        learning_rate=0.01,
        train_size=500,
        widths=(10, 10),
        host_parameters=404,
    )


def end(episode: int, environment: int, number: int, **fields: float) -> EpisodeEnded:
    figures = {"objective": 0.71, "accuracy": 0.81, "added": 0.25, "paid": 0.7, **fields}
    return EpisodeEnded(
        iteration=episode, episode=episode, environment=environment, step=number, kept=("norm", None), **figures
    )


def plant(store: RunStore, environments: int = 3, episode: int = 1) -> None:
    """An episode of three decisions, in which every network germinates a seed in its first slot."""
    if episode == 1:
        store.set_metadata(METADATA)
        store.emit(RunStarted(iteration=0, esper_version="0.1.0", seed=3))
    for environment in range(environments):
        store.emit(begin(episode, environment))
    for environment in range(environments):
        grown = {"stages": ("germinated", "dormant"), "blueprints": ("norm", None)}
        store.emit(step(episode, environment, 0))
        store.emit(changed(episode, environment, 1, "dormant", "germinated", cause="germinate"))
        store.emit(step(episode, environment, 1, op="germinate", slot=0, blueprint="norm", **grown))
        store.emit(step(episode, environment, 2, metric=0.6 + environment / 100, **grown))
    store.flush()


def new_run(path: Path) -> RunDirectory:
    path.mkdir()
    return RunDirectory(path)


def watch(run: RunDirectory, scenario: Scenario, size: tuple[int, int] = (80, 24)) -> None:
    """Play a scenario with the run on screen."""

    async def played() -> None:
        with closing(StoreFollower(run.store)) as follower:
            async with Watch(run, follower).run_test(size=size) as pilot:
                await scenario(pilot)

    asyncio.run(played())


def screen(pilot: Pilot[None]) -> str:
    """The text on the screen."""
    strips = pilot.app.screen._compositor.render_strips()
    return "\n".join("".join(segment.text for segment in strip) for strip in strips)


async def until(pilot: Pilot[None], shown: Callable[[str], bool]) -> str:
    """The screen as soon as it is as expected."""
    deadline = time.monotonic() + DEADLINE
    while not shown(screen(pilot)):
        assert time.monotonic() < deadline, screen(pilot)
        await pilot.pause(0.02)
    return screen(pilot)


async def sees(pilot: Pilot[None], *texts: str) -> str:
    """The screen as soon as it has all of these texts."""
    return await until(pilot, lambda text: all(one in text for one in texts))
