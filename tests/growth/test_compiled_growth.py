"""A growing model may be compiled, in whole or in part: slots run uncompiled, and growth is the same."""

from collections.abc import Callable, Generator

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import esper
from esper.errors import SlotError
from factories import Loop, make_growing, make_host

WAYS: dict[str, Callable[[nn.Module], object]] = {
    "model": lambda model: model.compile(backend="eager"),
    "host": lambda model: model.host.compile(backend="eager"),
    "layer": lambda model: model.host[2].compile(backend="eager"),
}


@pytest.fixture(autouse=True)
def _drop_graphs() -> Generator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.landing
@pytest.mark.parametrize("way", WAYS)
def test_a_compiled_model_grows_and_is_counted_like_any_other(way: str) -> None:
    found: list[tuple[list[esper.Decision], float]] = []
    for compiles in (False, True):
        loop = Loop("look", make_growing(), horizon=8)
        if compiles:
            WAYS[way](loop.model)
        decisions = [loop.epoch() for _ in range(8)]
        assert loop.model.seeds
        found.append((decisions, loop.grower.spending.flops))
    assert found[0] == found[1]


@pytest.mark.landing
def test_a_handle_from_compile_trains_what_grows() -> None:
    model = make_growing()
    handle = torch.compile(model, backend="eager")
    inputs = torch.ones(3, 4)
    handle(inputs)
    seed = model.slots["0"].germinate("mlp", torch.Generator().manual_seed(0), alpha=0.5)
    F.cross_entropy(handle(inputs), torch.tensor([0, 1, 2])).backward()
    assert torch.equal(handle(inputs), model(inputs))
    assert any(parameter.grad is not None for parameter in seed.parameters())


@pytest.mark.parametrize("part", ["model", "layer"])
def test_a_compiled_model_is_refused(part: str) -> None:
    net = make_host()
    if part == "layer":
        net[2] = torch.compile(net[2], backend="eager")
    else:
        net = torch.compile(net, backend="eager")
    with pytest.raises(SlotError, match=r"attach before torch\.compile"):
        esper.attach(net, ["0"], torch.zeros(2, 4))
