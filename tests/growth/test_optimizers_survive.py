"""Optimizers and schedulers go on as if nothing had happened when a model grows and shrinks under them."""

import copy
import warnings
from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

import esper
from esper.errors import SlotError
from esper.growth.attach import attach
from esper.growth.blueprints import registry
from esper.growth.links import SLOT_KEY
from esper.growth.model import GrowingModel
from factories import Loop, attach_mlp, make_growing, make_host, mlp, numbers, outputs
from growth.blueprint_cases import Broken

Groups = list[dict[str, Any]]
OPTIMIZERS: dict[str, Callable[[Groups], torch.optim.Optimizer]] = {
    "sgd": lambda groups: torch.optim.SGD(groups, momentum=0.9, nesterov=True),
    "adamw": torch.optim.AdamW,
    "adafactor": torch.optim.Adafactor,
}
SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
    "one_cycle": lambda optimizer: lr_scheduler.OneCycleLR(
        optimizer, max_lr=0.02, total_steps=20, cycle_momentum=not isinstance(optimizer, torch.optim.Adafactor)
    ),
    "sequential": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3), lr_scheduler.ExponentialLR(optimizer, 0.9)],
        milestones=[3],
    ),
    "plateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
}
every_optimizer = pytest.mark.parametrize("kind", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())


def train(growing: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        outputs(growing, numbers(7)).square().mean().backward()
        optimizer.step()


def linked(kind: Callable[[Groups], torch.optim.Optimizer]) -> tuple[GrowingModel, torch.optim.Optimizer]:
    growing = attach_mlp()
    optimizer = kind(growing.parameter_groups(lr=0.01))
    growing.link(optimizer)
    return growing, optimizer


def equal(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, Tensor) else one == other


@every_optimizer
def test_moments_stay_and_go_with_their_parameters(kind: Callable[[Groups], torch.optim.Optimizer]) -> None:
    growing, optimizer = linked(kind)
    train(growing, optimizer)
    host = list(growing.host.parameters())
    before = {parameter: copy.deepcopy(optimizer.state[parameter]) for parameter in host}
    seed = growing.slots["2"].germinate("mlp", torch.Generator().manual_seed(0), alpha=1.0)
    assert set(optimizer.state) == set(host)  # newborns begin with none
    for parameter in host:
        state = optimizer.state[parameter]
        assert state.keys() == before[parameter].keys()
        assert all(equal(value, before[parameter][key]) for key, value in state.items())
    train(growing, optimizer)
    assert set(optimizer.state) == {*host, *seed.parameters()}
    growing.slots["2"].fossilize()
    assert set(optimizer.state) == {*host, *seed.parameters()}
    growing.slots["2"].remove()
    assert set(optimizer.state) == set(host)
    assert [len(group["params"]) for group in optimizer.param_groups] == [len(host), 0, 0]
    train(growing, optimizer)


@every_optimizer
def test_a_dormant_growing_model_learns_as_the_bare_one(kind: Callable[[Groups], torch.optim.Optimizer]) -> None:
    growing, optimizer = linked(kind)
    bare = copy.deepcopy(growing.host)
    train(bare, kind([{"params": list(bare.parameters()), "lr": 0.01}]), steps=4)
    train(growing, optimizer)
    growing.slots["0"].germinate("mlp", torch.Generator().manual_seed(0))
    growing.slots["0"].prune()
    train(growing, optimizer)
    for one, other in zip(bare.parameters(), growing.host.parameters(), strict=True):
        assert torch.equal(one, other)


@every_optimizer
@pytest.mark.parametrize("scheduler", SCHEDULERS.values(), ids=SCHEDULERS.keys())
def test_slots_follow_the_schedule(
    kind: Callable[[Groups], torch.optim.Optimizer], scheduler: Callable[[torch.optim.Optimizer], Any]
) -> None:
    growing, optimizer = linked(kind)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch's own, of the order of first steps in SequentialLR
        schedule = scheduler(optimizer)
    rates: list[float] = []
    for step in range(8):
        train(growing, optimizer, steps=1)
        schedule.step(*([1.0] if isinstance(schedule, lr_scheduler.ReduceLROnPlateau) else []))
        if step == 2:
            growing.slots["0"].germinate("mlp", torch.Generator().manual_seed(0), alpha=1.0)
        if step == 5:
            growing.slots["0"].prune()
        assert len({float(group["lr"]) for group in optimizer.param_groups}) == 1
        rates.append(float(optimizer.param_groups[1]["lr"]))
    assert len(set(rates)) > 3


def test_parameters_that_nothing_trains_are_named_once() -> None:
    growing = attach_mlp()
    groups = growing.parameter_groups(lr=0.01)
    groups[0]["params"] = groups[0]["params"][1:]
    optimizer = torch.optim.SGD(groups)
    growing.link(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(growing, optimizer, steps=10)
    with pytest.warns(UserWarning, match=r"1 trainable parameters belong to no group .* not learn: host\.0\.weight;"):
        train(growing, optimizer, steps=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(growing, optimizer, steps=20)


def test_own_groups_of_the_host_come_before_those_of_the_slots() -> None:
    growing = attach_mlp()
    weights = [one for one in growing.host.parameters() if one.dim() > 1]
    biases = [one for one in growing.host.parameters() if one.dim() == 1]
    base = [{"params": weights, "weight_decay": 0.1}, {"params": biases, "lr": 0.02}]
    optimizer = torch.optim.AdamW(growing.parameter_groups(base, lr=0.01, weight_decay=0.0))
    assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [
        (0.01, 0.1),
        (0.02, 0.0),
        (0.01, 0.0),
        (0.01, 0.0),
    ]
    growing.link(optimizer)
    growing.slots["0"].germinate("mlp", alpha=1.0)
    before = copy.deepcopy(list(growing.parameters()))
    train(growing, optimizer)
    assert not any(torch.equal(*pair) for pair in zip(before, growing.parameters(), strict=True) if pair[0].numel())
    with pytest.raises(SlotError, match=r"not of the host: make it from the parameters of model\.host"):
        growing.parameter_groups([{"params": list(attach_mlp().host.parameters())}], lr=0.01)


def without_matrices(growing: GrowingModel) -> Groups:
    return growing.parameter_groups([{"params": [one for one in growing.host.parameters() if one.dim() == 2]}], lr=0.01)


@pytest.mark.parametrize(
    ("convert", "make", "words"),
    [
        (
            nn.Module.half,
            lambda model: torch.optim.AdamW(model.parameter_groups(lr=0.01)),
            "eps 1e-08 .* is 0 in half precision",
        ),
        (
            nn.Module.float,
            lambda model: torch.optim.Muon(without_matrices(model)),
            "give an AdamW from model.parameter_g",
        ),
        (
            lambda model: model.to("meta"),
            lambda model: torch.optim.SGD(model.parameter_groups(lr=0.01)),
            "on the device meta, offloaded or not loaded: load the whole model",
        ),
    ],
)
def test_optimizers_that_could_not_train_seeds_are_refused(
    convert: Callable[[nn.Module], nn.Module], make: Callable[[GrowingModel], torch.optim.Optimizer], words: str
) -> None:
    growing = attach_mlp()
    convert(growing)
    optimizer = make(growing)
    with pytest.raises(SlotError, match=words):
        growing.link(optimizer)


def test_half_precision_with_a_larger_eps_learns() -> None:
    growing = attach_mlp()
    growing.half()
    growing.link(torch.optim.AdamW(growing.parameter_groups(lr=0.01, eps=1e-6)))


@every_optimizer
def test_a_state_of_an_optimizer_of_what_has_grown_is_refused_where_it_has_not(
    kind: Callable[[Groups], torch.optim.Optimizer],
) -> None:
    growing, optimizer = linked(kind)
    ungrown = copy.deepcopy(optimizer.state_dict())
    growing.slots["0"].germinate("mlp", alpha=1.0)
    train(growing, optimizer)
    grown = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(grown)
    _, other = linked(kind)
    other.load_state_dict(ungrown)
    with pytest.raises(SlotError, match="parameters for slot '0', and the model 0: load the model and the optimizer"):
        other.load_state_dict(grown)


def test_an_optimizer_with_two_groups_for_a_slot_is_refused() -> None:
    growing = attach_mlp()
    groups = growing.parameter_groups(lr=0.01)
    plain = [{**group, "params": [], "weight_decay": 0.0} for group in groups if "slot" in group]
    with pytest.raises(SlotError, match="2 parameter groups for slot '0'.*but needs exactly one"):
        growing.link(torch.optim.AdamW([*groups, *plain]))


def test_optimizers_without_groups_for_slots_are_refused() -> None:
    growing = attach_mlp()
    optimizer = torch.optim.SGD(growing.parameters(), lr=0.01)
    with pytest.raises(SlotError, match=r"no parameter group for slot '0'.*make it from model\.parameter_groups\(lr="):
        growing.link(optimizer)
    with pytest.raises(SlotError, match="no parameter group for slot '2'"):
        growing.link(
            torch.optim.SGD([group for group in growing.parameter_groups(lr=0.1) if group.get(SLOT_KEY) != "2"])
        )


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(registry._registry, Broken.name, Broken)
    return Broken.name


@every_optimizer
def test_a_blueprint_that_cannot_be_made_changes_nothing(
    kind: Callable[[Groups], torch.optim.Optimizer], broken: str
) -> None:
    growing = attach(mlp(), {"0": [broken, "mlp"]}, numbers(7))
    optimizer = kind(growing.parameter_groups(lr=0.01))
    growing.link(optimizer)
    train(growing, optimizer)
    before, state = copy.deepcopy(growing.state_dict()), copy.deepcopy(optimizer.state_dict())
    with pytest.raises(MemoryError):
        growing.slots["0"].germinate(broken)
    assert growing.seeds == {}
    assert growing.state_dict().keys() == before.keys()
    after = optimizer.state_dict()
    assert after["param_groups"] == state["param_groups"]
    assert after["state"].keys() == state["state"].keys()
    growing.slots["0"].germinate("mlp")


# A growing model may be compiled, in whole or in part: slots run uncompiled, and growth is the same.


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


@pytest.mark.parametrize("way", ["torch.compile", "Module.compile"])
def test_a_growing_model_that_is_compiled_warns_once(way: str, recwarn: pytest.WarningsRecorder) -> None:
    torch.compiler.reset()
    model = make_growing()
    if way == "torch.compile":
        handle = torch.compile(model, backend="eager")
    else:
        handle = model
        model.compile(backend="eager")
    for _ in range(2):
        handle(torch.ones(3, 4))
    assert [str(one.message) for one in recwarn if "compile" in str(one.message)] == [
        "a growing model runs uncompiled at its slots: compile what finalize() returns"
    ]


@pytest.mark.parametrize("part", ["model", "layer", "model in place", "layer in place"])
def test_a_compiled_model_is_refused(part: str) -> None:
    net = make_host()
    if part.endswith("in place"):
        (net if part == "model in place" else net[2]).compile(backend="eager")
    elif part == "layer":
        net[2] = torch.compile(net[2], backend="eager")
    else:
        net = torch.compile(net, backend="eager")
    with pytest.raises(SlotError, match=r"attach before torch\.compile"):
        esper.attach(net, ["0"], torch.zeros(2, 4))
