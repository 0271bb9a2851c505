"""Compile a model for every structure that growth may give it, before training begins.

`torch.compile` makes a graph for each structure: for the modules in the slots, and for one newborn among them, which
does not learn before its second decision. A rehearsal puts temporary modules into the slots, structure by structure,
and makes the passes that training makes. Then it does so again, and nothing may be compiled any more. Slots count how
often they were traced into a graph, and how often they ran without one.

All graphs of torch are dropped first. Torch reuses a graph of another model of the same class without slots, since it
does not look for hooks; that graph would ignore whatever grows.
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
from esper.growth.example_input import call_host, fit_example
from esper.growth.model import GrowingModel
from esper.growth.positions import find_output_tensor
from esper.growth.seed import Seed
from esper.growth.side_pass import side_pass
from esper.lifecycle.actions import Blend, Op
from esper.lifecycle.rules import Rules
from esper.lifecycle.table import NO_BLUEPRINT, SeedTable
from esper.lifecycle.transitions import add_fossils
from esper.numerics.arrays import Ints
from esper.numerics.module_state import keep_modes

Pass = Callable[[], object]
"""Calls the compiled model as training or evaluation does."""


@dataclass(frozen=True)
class Structure:
    """Modules that growth may add to a model."""

    seeds: tuple[tuple[int, str, Blend], ...]
    """Slot index, blueprint and blend of each new module."""
    newborn: int | None
    """Slot index of the module that does not learn yet; None: all learn."""

    def __str__(self) -> str:
        return ", ".join(f"{name} in slot {slot}" for slot, name, _ in self.seeds) or "no seed"


def list_structures(network: GrowingNetwork, rules: Rules) -> Iterator[Structure]:
    """All structures that the network may come to, under the rules and within the budget: the present one first."""
    shape = network.table.stage.shape
    allowed_blends = [blend for blend in Blend if blend in rules.blends]
    free = [slot for slot in range(shape[1]) if not network.table.owning[0, slot]]
    if Op.GERMINATE not in rules.operations:
        free = []

    def extend(kinds: Ints, blends: Ints, slots: Sequence[int]) -> Iterator[tuple[Ints, Ints]]:
        """Blueprints and blends ``[1, S]`` with all choices for ``slots``."""
        if not slots:
            yield kinds, blends
            return
        slot = slots[0]
        yield from extend(kinds, blends, slots[1:])
        table = add_fossils(SeedTable.dormant(*shape), kinds, blends, np.ones_like(network.specs.compatible))[0]
        allowed = (network.specs.compatible & network.affordable(table))[0, slot]
        for kind in np.flatnonzero(allowed):
            for blend in allowed_blends:
                more_kinds, more_blends = kinds.copy(), blends.copy()
                more_kinds[0, slot], more_blends[0, slot] = kind, blend
                yield from extend(more_kinds, more_blends, slots[1:])

    residents = np.where(network.table.owning, network.table.blueprint, NO_BLUEPRINT).astype(np.int64)
    for kinds, blends in extend(residents, network.table.blend.astype(np.int64), free):
        seeds = tuple(
            (slot, network.blueprints[int(kinds[0, slot])], Blend(int(blends[0, slot])))
            for slot in free
            if kinds[0, slot] != NO_BLUEPRINT
        )
        yield Structure(seeds, None)
        yield from (Structure(seeds, slot) for slot, _, _ in seeds)


def rehearse(
    model: GrowingModel, optimizer: torch.optim.Optimizer, structures: Iterator[Structure], passes: Sequence[Pass]
) -> int:
    """Make the passes with all structures, twice; returns the number of structures.

    Only graphs remain: gradients, buffers, modes and random numbers are as before. Without ``passes`` the model is
    called with its example input, with a backward pass in training mode, and in evaluation mode.

    Raises:
        ConfigError: the passes call nothing that is compiled, torch compiles too few graphs, or compiles them anew
            every time; or a pass steps the ``optimizer`` or cannot be called.
    """
    for rehearsed in passes:
        if not callable(rehearsed):
            raise ConfigError(
                f"a pass is {describe_value(rehearsed)}: give functions, such as lambda: loss_of(compiled).backward()"
            )
    passes = passes or (partial(_learn, model), partial(_evaluate, model))
    counts, compiled = model.compilations, list[Structure]()
    torch.compiler.reset()
    hook = optimizer.register_step_pre_hook(_refuse_step)
    try:
        with keep_modes(model), side_pass(model, ()), _restore_gradients(model):
            # Compile: each structure must run in graphs only, and needs new ones.
            for structure in structures:
                compiled.append(structure)
                traced, uncompiled = counts.traced, counts.uncompiled
                _run_passes(model, structure, passes)
                if counts.uncompiled == uncompiled and counts.traced > traced:
                    continue
                if len(compiled) == 1:
                    raise ConfigError(
                        "the passes of a rehearsal call a model that is not compiled: compile it in place by "
                        "model.compile(), or give passes that call what torch.compile(model) returned"
                    )
                raise ConfigError(
                    f"torch compiles no more graphs at structure {len(compiled)} ({structure}): there are "
                    f"{counts.traced} by now; raise its limit, as by torch.compile(..., recompile_limit=64), or offer "
                    "fewer blueprints in fewer slots"
                )
            # Check: nothing is compiled any more.
            before = counts.traced, counts.uncompiled
            for structure in compiled:
                _run_passes(model, structure, passes)
            if (counts.traced, counts.uncompiled) != before:
                raise ConfigError(
                    "the passes of the rehearsal are recompiled each time, so it has no effect: call the model with "
                    "tensors of the same shapes and types every time"
                )
    finally:
        hook.remove()
    return len(compiled)


def _refuse_step(*_: Any) -> None:
    """Hook before an optimizer's step, which must not happen in a rehearsal.

    Raises:
        ConfigError: always.
    """
    raise ConfigError("a pass of a rehearsal makes a step of the optimizer: leave that to training")


def _learn(model: GrowingModel) -> None:
    """Forward and backward pass on the example input, in training mode."""
    model.train()
    output = find_output_tensor(call_host(model, _fit_example(model)))
    if output is not None:
        output.float().square().mean().backward()


@torch.no_grad()
def _evaluate(model: GrowingModel) -> None:
    """Forward pass on the example input, in evaluation mode."""
    model.eval()
    call_host(model, _fit_example(model))


def _fit_example(model: GrowingModel) -> Any:
    """The example input on the model's device."""
    if model.example.arguments is None:
        raise ConfigError("a growing model that was pickled has no example input: give rehearse() the passes to make")
    return fit_example(model.host, model.example.arguments, model.slots.values()[0].anchor)


def _run_passes(model: GrowingModel, structure: Structure, passes: Sequence[Pass]) -> None:
    """Make the passes with the modules of the structure in the slots."""
    slots = model.slots.values()
    with ExitStack() as stack:
        for index, name, blend in structure.seeds:
            slot = slots[index]
            seed = Seed(get(name)(slot.site, torch.Generator().manual_seed(0)), slot.site, blend)
            stack.enter_context(slot.temporary_seed(seed.requires_grad_(index != structure.newborn)))
        for run_pass in passes:
            run_pass()


@contextmanager
def _restore_gradients(model: GrowingModel) -> Generator[None]:
    """Within the block parameters have no gradients at first; afterwards they have those from before."""
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
