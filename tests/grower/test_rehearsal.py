"""After a rehearsal nothing is compiled any more, whatever grows; counted by a backend of torch.compile's."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import esper
import tiny_transformers
from esper.errors import ConfigError
from esper.grower.grower import Grower
from esper.grower.rehearsal import list_structures
from esper.growth.model import GrowingModel
from esper.lifecycle.actions import Blend
from esper.lifecycle.rules import Rules
from grower.training_loop import Loop

pytestmark = pytest.mark.landing

INPUTS = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def _as_before() -> Generator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Backend:
    """Counts the graphs that it is given, and runs of them."""

    def __init__(self) -> None:
        self.graphs = self.runs = 0

    def __call__(self, graph: Any, _: Any) -> Callable[..., Any]:
        self.graphs += 1

        def run(*inputs: Any) -> Any:
            self.runs += 1
            return graph(*inputs)

        return run


def grower_of(*slots: str, **options: Any) -> Grower:
    torch.manual_seed(0)
    host = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.2), nn.Linear(6, 3))
    model = esper.attach(host, {slot: ["mlp"] for slot in slots}, INPUTS)
    optimizer = torch.optim.AdamW(model.parameter_groups(lr=0.01))
    return Grower(model, optimizer, controller="all_at_start", evaluate=validate, horizon=12, **options)


@torch.no_grad()
def validate(model: Callable[[Tensor], Tensor]) -> float:
    if isinstance(model, nn.Module):
        model.eval()
    return float(model(INPUTS).square().mean())


def train(model: nn.Module, compiled: Callable[[Tensor], Tensor]) -> Tensor:
    model.train()
    loss = compiled(INPUTS).square().mean()
    loss.backward()
    return loss.detach()


def grow(grower: Grower, compiled: Callable[[Tensor], Tensor]) -> int:
    """Train and decide; seeds that came."""
    came = 0
    for _ in range(10):
        grower.optimizer.zero_grad()
        loss = train(grower.model, compiled)
        grower.optimizer.step()
        grower.model.eval()
        with torch.no_grad():
            compiled(INPUTS)
        came += sum(change.after.name == "GERMINATED" for change in grower.step(train_loss=loss).changes)
    return came


def test_nothing_is_compiled_afterwards() -> None:
    grower, backend = grower_of("0"), Backend()
    compiled = torch.compile(grower.model, backend=backend)

    def evaluate() -> None:
        grower.model.eval()
        with torch.no_grad():
            compiled(INPUTS)

    assert grower.rehearse(lambda: train(grower.model, compiled), evaluate) == 3
    made, ran = backend.graphs, backend.runs
    assert made == 6
    assert grow(grower, compiled) == 1
    assert backend.graphs == made
    assert backend.runs == ran + 2 * 10


def test_a_model_that_is_compiled_in_place_needs_no_passes() -> None:
    grower, backend = grower_of("0"), Backend()
    grower.model.compile(backend=backend)
    assert grower.rehearse() == 3
    made = backend.graphs
    assert grow(grower, grower.model) == 1
    assert backend.graphs == made == 6


def test_nothing_remains_of_it() -> None:
    grower = grower_of("0")
    model: GrowingModel = grower.model
    model.compile(backend="eager")
    model.host[3].eval()
    model(INPUTS).sum().backward()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    drawn, modes = torch.get_rng_state(), [module.training for module in model.modules()]
    grower.rehearse()
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(map(torch.equal, [parameter.grad for parameter in model.parameters()], gradients))
    assert torch.equal(torch.get_rng_state(), drawn)
    assert [module.training for module in model.modules()] == modes
    assert not model.seeds


def test_more_structures_than_torch_keeps_graphs_are_refused() -> None:
    grower = grower_of("0", "2")
    grower.model.compile(backend="eager")
    with pytest.raises(ConfigError, match="torch compiles no more graphs at structure 5 .*recompile_limit"):
        grower.rehearse()


def test_what_is_not_compiled_is_not_rehearsed() -> None:
    with pytest.raises(ConfigError, match=r"not compiled: compile it in place by model\.compile\(\)"):
        grower_of("0").rehearse()


def test_passes_that_learn_or_are_compiled_every_time_are_refused() -> None:
    grower = grower_of("0")
    grower.model.compile(backend="eager", dynamic=False)
    with pytest.raises(ConfigError, match="makes a step of the optimizer"):
        grower.rehearse(lambda: train(grower.model, grower.model), grower.optimizer.step)
    sizes = iter(range(2, 100))
    torch.compiler.reset()
    with pytest.raises(ConfigError, match="recompiled each time|no more graphs"):
        grower.rehearse(lambda: grower.model(INPUTS.repeat(next(sizes), 1)))


def test_what_learns_apart_is_refused() -> None:
    rules = Rules(isolation="shadow", operations=["wait", "germinate", "advance", "fossilize", "prune"])
    grower = grower_of("0", rules=rules, loss=lambda: torch.zeros(()))
    with pytest.raises(ConfigError, match="isolation and forks run passes that a rehearsal does not cover"):
        grower.rehearse()


def test_structures_are_those_of_rules_and_budget() -> None:
    usual = list(list_structures(grower_of("0", "2").network, Rules()))
    assert len(usual) == 4 + 4
    assert len(set(usual)) == 8
    assert usual[0].seeds == ()
    two = list(list_structures(grower_of("0").network, Rules(blends=[Blend.ADD, Blend.GATE])))
    assert len(two) == 1 + 2 * 2
    one = grower_of("0", "2")
    cost = one.network.specs.kinds[0].parameters_at(one.model.slots["0"].site)
    tight = grower_of("0", "2", conduct=esper.EpisodeConfig(budget={"parameters": cost}))
    assert len(list(list_structures(tight.network, Rules()))) == 1 + 2 * 2
    assert len(list(list_structures(one.network, Rules(operations=["wait", "prune"])))) == 1


@pytest.mark.parametrize("twin", [False, True])
def test_a_language_model_grows_deeper_without_another_graph(twin: bool) -> None:
    """Also where torch has a graph of a model of its class without slots."""
    torch.manual_seed(0)
    tokens = torch.randint(11, (4, 6))
    host, bare = (tiny_transformers.gpt2(vocab_size=11, n_positions=6, n_layer=1, use_cache=False) for _ in range(2))
    if twin:
        torch.compile(bare, backend="eager")(input_ids=tokens, labels=tokens).loss.backward()
    model = esper.attach(host, {"transformer.h.0": ["block_zero"]}, tokens)
    optimizer = torch.optim.AdamW(model.parameter_groups(lr=0.01))
    backend = Backend()
    compiled = torch.compile(model, backend=backend)

    def learn() -> Tensor:
        model.train()
        loss = compiled(input_ids=tokens, labels=tokens).loss
        loss.backward()
        return loss.detach()

    @torch.no_grad()
    def evaluate(_: GrowingModel | None = None) -> float:
        model.eval()
        return float(compiled(input_ids=tokens, labels=tokens).loss)

    grower = Grower(model, optimizer, controller="all_at_start", evaluate=evaluate, horizon=8)
    assert grower.rehearse(learn, evaluate) == 3
    before = backend.graphs, model.compilations.uncompiled
    for _ in range(8):
        optimizer.zero_grad()
        loss = learn()
        optimizer.step()
        grower.step(train_loss=loss)
    model.slots["transformer.h.0"].fossilize()
    assert (backend.graphs, model.compilations.uncompiled) == before
    assert all(parameter.grad is not None for parameter in model.seeds["transformer.h.0"].parameters())
    assert model.finalize().config.n_layer == 2


def test_what_is_no_pass_is_refused() -> None:
    with pytest.raises(ConfigError, match="a pass is a number, 3: give functions|a pass is an int, 3: give functions"):
        Loop("none").grower.rehearse(3)  # pyright: ignore[reportArgumentType]
