"""A compiled model is compiled anew when it grows; torch stops to, unless what it has compiled before is dropped."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from esper.growth.attach import attach
from esper.growth.model import GrowingModel

SLOTS = 6
INPUTS = torch.ones(4, 8)
WARNING = "the growing model was compiled 8 times for the structures that it had"


def growing() -> GrowingModel:
    return attach(nn.Sequential(*[nn.Linear(8, 8) for _ in range(SLOTS)]), {"re:.": ["mlp"]}, INPUTS)


@pytest.fixture(autouse=True)
def _as_before() -> Generator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("dropping", [False, True])
def test_six_slots_run_compiled_to_the_end_if_former_graphs_are_dropped(
    dropping: bool, recwarn: pytest.WarningsRecorder
) -> None:
    model = growing()
    ran: list[int] = []
    graphs: list[int] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(len(graphs))
        number = graphs[-1]

        def run(*inputs: Any) -> Any:
            ran.append(number)
            return graph(*inputs)

        return run

    compiled = torch.compile(model, backend=backend)
    for slot in [None, *model.slots.values()]:
        if slot is not None:
            slot.germinate("mlp", alpha=1.0)
            if dropping:
                torch.compiler.reset()
        for _ in range(2):
            ran.clear()
            model.train()
            compiled(INPUTS).sum().backward()
            model.eval()
            with torch.no_grad():
                compiled(INPUTS)
    if dropping:
        assert len(graphs) == 2 * (SLOTS + 1)  # to learn and to evaluate, for each structure once
        assert ran == graphs[-2:]
    else:
        assert len(graphs) < 2 * (SLOTS + 1)
        assert ran == []  # neither is compiled any more
    assert sum(WARNING in str(one.message) for one in recwarn) == (not dropping)


def seed_that_is_warned_of(model: GrowingModel, called: Callable[[Tensor], Tensor], dropped_before: int = 0) -> int:
    """Learn and evaluate with ``called`` before each seed comes; the number of the one with the warning, or 0."""
    for number, slot in enumerate(model.slots.values(), start=1):
        called(INPUTS).sum().backward()
        with torch.no_grad():
            called(INPUTS)
        if number == dropped_before:
            torch.compiler.reset()
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            slot.germinate("mlp", alpha=1.0)
        if any(WARNING in str(one.message) for one in found):
            return number
    return 0


def test_the_warning_comes_with_the_first_seed_that_is_too_many_of_what_is_compiled() -> None:
    model, uncompiled, dropped = growing(), growing(), growing()
    copied = copy.deepcopy(model)
    assert seed_that_is_warned_of(uncompiled, uncompiled) == 0
    assert seed_that_is_warned_of(model, torch.compile(model, backend="eager")) == 4
    assert seed_that_is_warned_of(dropped, torch.compile(dropped, backend="eager"), 2) == 6
    assert seed_that_is_warned_of(copied, copied) == 0
