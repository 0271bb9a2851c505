"""Compile a model for every structure that growth may give it, before training begins.

`torch.compile` makes a graph for each structure: for the seeds that live in the slots, and for one newborn among them,
which does not learn in its first decision yet. So a rehearsal lets fresh seeds live in the slots, structure by
structure, and makes the passes that training makes; then all of it once more, when nothing may be compiled any more.
Both show in the slots: they are made part of a graph, or run without one.

All graphs that torch has made before are dropped first: it takes one that was made of a model of the same class without
slots for good, since it does not look for hooks, and would ignore whatever grows.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from esper.config.arguments import describe_value
from esper.errors import ConfigError
from esper.grower.network import GrowingNetwork
from esper.growth.blueprints.registry import get
from esper.growth.model import GrowingModel
from esper.growth.positions import find_output_tensor
from esper.growth.probe import call_host, fit_example
from esper.growth.seed import Seed
from esper.growth.side_pass import keep_modes, side_pass
from esper.lifecycle.actions import Blend, Op
from esper.lifecycle.rules import Rules
from esper.lifecycle.table import NO_BLUEPRINT, SeedTable
from esper.lifecycle.transitions import add_fossils
from esper.numerics.arrays import Ints

Pass = Callable[[], object]
"""Calls the compiled model as training or evaluation does."""


@dataclass(frozen=True)
class Structure:
    """What lives in the slots of a model."""

    seeds: tuple[tuple[int, str, Blend], ...]
    """Of the slots that are free now: slot, blueprint and blend."""
    newborn: int | None
    """The slot of the seed that does not learn yet; None: all do."""

    def __str__(self) -> str:
        return ", ".join(f"{name} in slot {place}" for place, name, _ in self.seeds) or "no seed"


def list_structures(network: GrowingNetwork, rules: Rules) -> Iterator[Structure]:
    """All that growth may come to from here on, under the rules and within the budget: the present one first."""
    shape = network.table.stage.shape
    blends = [blend for blend in Blend if blend in rules.blends]
    free = [place for place in range(shape[1]) if not network.table.owning[0, place]]
    if Op.GERMINATE not in rules.operations:
        free = []

    def extend(chosen: Ints, joins: Ints, places: Sequence[int]) -> Iterator[tuple[Ints, Ints]]:
        if not places:
            yield chosen, joins
            return
        yield from extend(chosen, joins, places[1:])
        table = add_fossils(SeedTable.dormant(*shape), chosen, joins, np.ones_like(network.specs.compatible))[0]
        allowed = (network.specs.compatible & network.affordable(table))[0, places[0]]
        for kind in np.flatnonzero(allowed):
            for blend in blends:
                there, how = chosen.copy(), joins.copy()
                there[0, places[0]], how[0, places[0]] = kind, blend
                yield from extend(there, how, places[1:])

    resident = np.where(network.table.owning, network.table.blueprint, NO_BLUEPRINT).astype(np.int64)
    for chosen, joins in extend(resident, network.table.blend.astype(np.int64), free):
        seeds = tuple(
            (place, network.blueprints[int(chosen[0, place])], Blend(int(joins[0, place])))
            for place in free
            if chosen[0, place] != NO_BLUEPRINT
        )
        yield Structure(seeds, None)
        yield from (Structure(seeds, place) for place, _, _ in seeds)


def rehearse(
    model: GrowingModel, optimizer: torch.optim.Optimizer, structures: Iterator[Structure], passes: Sequence[Pass]
) -> int:
    """Make the passes with all structures, twice; returns how many there are.

    Nothing remains of it but graphs: neither gradients, nor values of buffers, nor random numbers drawn. Without
    ``passes`` the model itself is called with its example input, to learn and to evaluate.

    Raises:
        ConfigError: nothing is compiled, not all that is needed, or anew every time; or a pass steps the ``optimizer``
            or cannot be called.
    """
    for one in passes:
        if not callable(one):
            raise ConfigError(
                f"a pass is {describe_value(one)}: give functions, such as lambda: loss_of(compiled).backward()"
            )
    passes = passes or (partial(_learn, model), partial(_evaluate, model))
    torch.compiler.reset()
    hook = optimizer.register_step_pre_hook(_refuse_step)
    try:
        with keep_modes(model), side_pass(model, ()), _without_gradients(model):
            return _make_graphs(model, structures, passes)
    finally:
        hook.remove()


def _make_graphs(model: GrowingModel, structures: Iterator[Structure], passes: Sequence[Pass]) -> int:
    seen: list[Structure] = []
    counts = model.compilations
    for structure in structures:
        seen.append(structure)
        traced, uncompiled = counts.traced, counts.uncompiled
        _perform(model, structure, passes)
        if counts.uncompiled == uncompiled and counts.traced > traced:
            continue
        if len(seen) == 1:
            raise ConfigError(
                "the passes of a rehearsal call a model that is not compiled: compile it in place by "
                "model.compile(), or give passes that call what torch.compile(model) returned"
            )
        raise ConfigError(
            f"torch compiles no more graphs at structure {len(seen)} ({structure}): there are {counts.traced} by "
            "now; raise its limit, as by torch.compile(..., recompile_limit=64), or offer fewer blueprints in "
            "fewer slots"
        )
    before = counts.traced, counts.uncompiled
    for structure in seen:
        _perform(model, structure, passes)
    if (counts.traced, counts.uncompiled) != before:
        raise ConfigError(
            "the passes of a rehearsal are compiled anew each time, so that nothing is gained by it: let them call the "
            "model with tensors of the same shapes and types every time"
        )
    return len(seen)


def _refuse_step(*_: Any) -> None:
    """As a hook before an optimizer's step.

    Raises:
        ConfigError: always.
    """
    raise ConfigError("a pass of a rehearsal makes a step of the optimizer: leave that to training")


def _learn(model: GrowingModel) -> None:
    """Forward and backward on the example input, in training mode."""
    model.train()
    output = find_output_tensor(call_host(model, _example_of(model)))
    if output is not None:
        output.float().square().mean().backward()


@torch.no_grad()
def _evaluate(model: GrowingModel) -> None:
    """Forward on the example input, in evaluation mode."""
    model.eval()
    call_host(model, _example_of(model))


def _example_of(model: GrowingModel) -> Any:
    if model.example.arguments is None:
        raise ConfigError("a growing model that was pickled has no example input: give rehearse() the passes to make")
    return fit_example(model.host, model.example.arguments, model.slots.values()[0].anchor)


def _perform(model: GrowingModel, structure: Structure, passes: Sequence[Pass]) -> None:
    slots = model.slots.values()
    with ExitStack() as stack:
        for place, name, blend in structure.seeds:
            slot = slots[place]
            seed = Seed(get(name)(slot.site, torch.Generator().manual_seed(0)), slot.site, blend)
            stack.enter_context(slot.temporary_seed(seed.requires_grad_(place != structure.newborn)))
        for one in passes:
            one()


@contextmanager
def _without_gradients(model: GrowingModel) -> Generator[None]:
    """Afterwards parameters have the gradients that they had before."""
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
