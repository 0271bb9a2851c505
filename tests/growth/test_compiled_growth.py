"""A compiled model is compiled anew when it grows; torch stops to, unless what it has compiled before is dropped."""

from __future__ import annotations

import copy
from collections.abc import Generator
from typing import Any

import pytest
import torch
from torch import nn

from esper.growth.attach import attach
from esper.growth.model import GrowingModel

pytestmark = pytest.mark.landing

SLOTS = 6
INPUTS = torch.ones(4, 8)


def growing() -> GrowingModel:
    return attach(nn.Sequential(*[nn.Linear(8, 8) for _ in range(SLOTS)]), {"re:.": ["mlp"]}, INPUTS)


@pytest.fixture(autouse=True)
def _as_before() -> Generator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("dropping", [False, True])
def test_six_slots_run_compiled_to_the_end_if_former_graphs_are_dropped(dropping: bool) -> None:
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
    assert model.compilations.compiled
    assert not copy.deepcopy(model).compilations.compiled
