"""Count how much code a main path runs through: files, functions, and changes of file from one call to the next.

    python tools/trace_calls.py                  # the working tree
    PYTHONPATH=OTHER/src python tools/trace_calls.py    # another version, as far as it has these names

Prints a line for each path: a minibatch of a population, one `Grower.step` in which a module is measured, one event
from its emission to the dashboard's view, and one action to its reward. Only functions of ``esper`` count; those that
take the path for the first time are left out by running it once before.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from pkgutil import resolve_name
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import esper
from esper.lifecycle.actions import Op, make_action, make_wait_actions
from esper.lifecycle.rules import Rules
from esper.rl.episodes import Episodes
from esper.tasks.registry import get_suite

ROOT = str(Path(esper.__file__).parent)


class CallTrace:
    """Records calls of functions of ``esper`` within a block."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []

    def __enter__(self) -> CallTrace:
        sys.setprofile(self._record)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _record(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(ROOT) and not code.co_name.startswith("<"):
            self.calls.append((code.co_filename, f"{code.co_filename}:{code.co_firstlineno}"))

    def __str__(self) -> str:
        files = [file for file, _ in self.calls]
        changes = sum(one != other for one, other in pairwise(files))
        return f"{len(set(files)):>4} files {len(set(self.calls)):>5} functions {changes:>6} changes of file"


def trace_minibatch() -> CallTrace:
    """A minibatch of a population whose networks have seeds."""
    start_training = find("esper.population.learning:start_training", "esper.training.learning:start_training")
    episodes = make_episodes()
    batch = next(iter(vars(episodes)["_stream"].draw_batches(episodes.step_index, 1)))
    start_training(episodes.population, [batch]).fetch()
    with CallTrace() as trace:
        start_training(episodes.population, [batch]).fetch()
    return trace


def trace_reward() -> CallTrace:
    """One action of every network to its reward."""
    episodes = make_episodes()
    with CallTrace() as trace:
        episodes.step(make_wait_actions(episodes.size))
    return trace


def make_episodes() -> Episodes:
    """Four networks in the middle of an episode, with a seed each."""
    suite = get_suite("tokens")
    episodes = Episodes(suite, suite.sample(4, "train", np.random.default_rng(0)), Rules())
    episodes.step(np.stack([make_action(Op.GERMINATE, 1, 0)] * 4))
    for _ in range(4):
        episodes.step(make_wait_actions(4))
    return episodes


def trace_grower_step() -> CallTrace:
    """One `Grower.step` of the default rule, with a module on probation."""
    torch.manual_seed(0)
    inputs = torch.randn(128, 6)
    labels = (inputs[:, :3] * inputs[:, 3:]).sum(1).gt(0).long()
    model = esper.attach(
        nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2)),
        {"1": "auto", "3": "auto"},
        inputs[:2],
    )
    optimizer = torch.optim.AdamW(model.parameter_groups(lr=1e-2))
    validate = esper.Validation("classification", [(inputs[64:], labels[64:])])
    grower = esper.Grower(model, optimizer, controller="heuristic", evaluate=validate, horizon=20)
    trace = CallTrace()
    for _ in range(12):
        loss = F.cross_entropy(model(inputs[:64]), labels[:64])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        live = any(not seed.fossilized for seed in model.seeds.values())
        with CallTrace() as newest:
            grower.step(train_loss=loss.item())
        trace = newest if live else trace
    return trace


def trace_event() -> CallTrace:
    """One event from its emission into a store to what the dashboard sends to browsers."""
    events = "esper.runs.events", "esper.telemetry.events"
    event_type = find(*(f"{module}:LifecycleTransition" for module in events))
    store_type = find("esper.runs.store:RunStore", "esper.telemetry.store:RunStore")
    follower_type = find("esper.dash.stream:StoreFollower", "esper.telemetry.follower:StoreFollower")
    describe_event = find("esper.dash.pages:describe_event", "esper.ui.dash.answers:describe_event")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.db"
        store, follower = store_type.create(path), follower_type(path)
        event = event_type(
            iteration=1,
            episode=1,
            environment=0,
            step=0,
            slot=0,
            before="dormant",
            after="germinated",
            blueprint="mlp",
            cause="germinate",
            reason="no_gate",
            contribution=None,
        )
        trace = CallTrace()
        for _ in range(2):
            trace = CallTrace()
            with trace:
                store.emit(event)
                store.flush()
                [describe_event(record) for record in follower.poll([event.name]).records]
        store.close()
        return trace


def find(*addresses: str) -> Any:
    """The object at the first of these addresses that this version has."""
    for address in addresses:
        try:
            return resolve_name(address)
        except (AttributeError, ImportError):
            continue
    raise SystemExit(f"none of {', '.join(addresses)} is there")


PATHS: dict[str, Callable[[], CallTrace]] = {
    "a minibatch of a population": trace_minibatch,
    "one Grower.step": trace_grower_step,
    "an event to the dashboard": trace_event,
    "an action to its reward": trace_reward,
}


def main() -> None:
    """Print a line for each path."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    for name, run in PATHS.items():
        run()
        sys.stdout.write(f"{name:<32}{run()}\n")


if __name__ == "__main__":
    main()
