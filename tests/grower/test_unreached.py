"""A seed that no gradient reaches although the optimizer steps is warned of and not kept; no other seed is."""

import contextlib
import re
import warnings
from collections.abc import Callable, Generator, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import esper
from esper.errors import SlotError
from esper.grower.gradients import GradientRecorder
from esper.growth.blueprints.registry import for_site, names
from esper.growth.persist import GrowthInStateDict
from esper.lifecycle.table import Stage
from factories import HELD, HOSTS, Host, every_host, loss, make_data, make_host, validate

UNREACHED = "no gradient has reached it"
DECISIONS = 10


@contextlib.contextmanager
def silent() -> Generator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", f".*{UNREACHED}")
        yield


def warned(record: list[warnings.WarningMessage]) -> list[str]:
    return [str(warning.message) for warning in record if UNREACHED in str(warning.message)]


class Loop:
    """Training that reaches seeds or not; two steps per decision."""

    def __init__(self, cause: str = "", *, steps: int = 2, **options: Any) -> None:
        net = make_host()
        self.inputs, self.labels = make_data()
        self.handle = torch.compile(net, backend="eager") if cause == "compiled" else None
        if self.handle is not None:
            self.handle(self.inputs)  # compiled before anything grows
        self.model = esper.attach(net, {"0": ["mlp"], "2": ["lowrank"]}, self.inputs[:2])
        self.optimizer = torch.optim.AdamW(self.model.parameter_groups(lr=1e-2))
        settings: dict[str, Any] = {"controller": "all_at_start", "horizon": DECISIONS, "evaluate": validate, **options}
        self.grower = esper.Grower(self.model, self.optimizer, **settings)
        self.cause, self.steps = cause, steps

    def compute(self) -> Tensor:
        network: Callable[[Tensor], Tensor] = self.model if self.handle is None else self.handle
        if self.cause == "frozen":
            self.model.slots.requires_grad_(False)
        if self.cause == "no_grad":  # of what the slots are in
            with torch.no_grad():
                hidden = self.model.host[:4](self.inputs)
            return self.model.host[4](hidden)
        if self.cause == "not_called":  # the layers without the hooks on them
            network = nn.Sequential(*(nn.Sequential() if part is None else part for part in self._bare()))
        return network(self.inputs)

    def _bare(self) -> Iterator[nn.Module]:
        for layer in self.model.host:
            bare = nn.Linear(1, 1) if isinstance(layer, nn.Linear) else nn.ReLU()
            if isinstance(layer, nn.Linear):
                bare.weight, bare.bias = layer.weight, layer.bias
            yield bare

    def train(self, backward: Callable[[Tensor], object] = Tensor.backward, *, set_to_none: bool = True) -> float:
        self.model.train()
        for _ in range(self.steps):
            self.optimizer.zero_grad(set_to_none)
            value = F.cross_entropy(self.compute(), self.labels)
            backward(value)
            self.optimizer.step()
        return value.item()


@pytest.mark.parametrize(
    ("cause", "advice"),
    [
        pytest.param("compiled", "torch.compile", marks=pytest.mark.landing),
        ("not_called", "without this slot"),
        ("no_grad", "no_grad"),
        ("frozen", "freeze"),
    ],
)
def test_a_seed_that_learns_nothing_is_warned_of_at_its_first_decision_and_not_kept(cause: str, advice: str) -> None:
    loop = Loop(cause)
    first: dict[str, int] = {}
    for decision in range(DECISIONS):
        learning = {name for name, seed in loop.model.seeds.items() if seed.alpha > 0}
        value = loop.train()
        with warnings.catch_warnings(record=True) as record:
            warnings.simplefilter("always")
            loop.grower.step(train_loss=value)
        named = {re.findall("slot '([^']*)'", text)[0] for text in warned(record)}
        assert named == learning - first.keys(), "each once"
        assert all(advice in text for text in warned(record))
        first |= dict.fromkeys(named, decision)
    assert set(first) == {"0", "2"}
    assert not any(seed.fossilized for seed in loop.model.seeds.values())
    ending = loop.grower.finish()
    assert {change.after for change in ending.changes} == {Stage.PRUNED}
    assert not loop.model.seeds


def test_what_learns_after_all_is_kept() -> None:
    loop = Loop("frozen")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(5):
            loop.grower.step(train_loss=loop.train())
    loop.cause = ""
    with silent():
        for _ in range(DECISIONS - 5):
            loop.grower.step(train_loss=loop.train())
    assert any(seed.fossilized for seed in loop.model.seeds.values())


CHAIN = ("0", "1", "2")
"""Two layers of a host, and what lies between."""


def can_grow(host: Host, slot: str, blueprint: str) -> bool:
    """Whether the blueprint may be named there: where there is a mask, nothing mixes positions."""
    with contextlib.suppress(SlotError):
        esper.attach(host.network(), {slot: [blueprint]}, host.arguments())
        return True
    return False


def find_places(host: Host) -> dict[str, str | tuple[str, ...]]:
    """By blueprint, a slot of the host that can have it, or the modules that it grows between."""
    probed = esper.attach(host.network(), host.places, host.arguments())
    places: dict[str, str | tuple[str, ...]] = {
        kind.name: name
        for name in host.slots
        for kind in for_site(probed.slots[name].site)
        if not kind.mixes_positions or can_grow(host, name, kind.name)
    }
    # It is offered only on request, as attaching takes longer then.
    places |= [("block_zero", slot) for slot in host.slots if can_grow(host, slot, "block_zero")]
    with contextlib.suppress(SlotError):
        esper.attach(host.network(), {CHAIN: ["units"]}, host.arguments())
        places["units"] = CHAIN
    return places


EVERY_SLOT = np.ones((1, 1), np.bool_)


@every_host
@pytest.mark.few(3)
def test_a_gradient_reaches_every_blueprint_unless_it_is_frozen(host: Host) -> None:
    for blueprint, place in find_places(host).items():
        for frozen in (False, True):
            model = esper.attach(host.network(), {place: [blueprint]}, host.arguments())
            (slot,) = model.slots.values()
            slot.germinate(blueprint, torch.Generator().manual_seed(0), alpha=0.5)
            optimizer = torch.optim.SGD(model.parameter_groups(lr=1e-3))
            recorder = GradientRecorder(model, optimizer, None)
            recorder.watch(model.seeds.values())
            model.slots.requires_grad_(not frozen)
            for _ in range(2):
                optimizer.zero_grad()
                loss(model.train(), host.arguments()).backward()
                optimizer.step()
            with warnings.catch_warnings(record=True) as record:
                warnings.simplefilter("always")
                assert recorder.find_unreached(EVERY_SLOT).all() == frozen, blueprint
            assert len(warned(record)) == frozen, blueprint


def test_the_hosts_offer_every_blueprint() -> None:
    entries = (entry if isinstance(entry, Host) else entry.values[0] for entry in HOSTS)
    offered = {blueprint for host in entries for blueprint in find_places(host)}
    assert offered == set(names())


def accumulating(loop: Loop, decision: int) -> float:
    """A step at every other decision only."""
    value = F.cross_entropy(loop.compute(), loop.labels)
    (value / 2).backward()
    if decision % 2:
        loop.optimizer.step()
        loop.optimizer.zero_grad()
    return value.item()


def kept_zeros(loop: Loop, decision: int) -> float:
    return loop.train(set_to_none=False)


def dropped_in_the_step(loop: Loop, decision: int) -> float:
    """As where an optimizer steps within the backward pass, and drops gradients at once."""

    def backward(value: Tensor) -> None:
        value.backward()
        for parameter in loop.model.parameters():
            parameter.grad = None

    return loop.train(backward)


def routed(loop: Loop, decision: int) -> float:
    """One step per decision, every other of which leaves the slots out."""
    loop.cause, loop.steps = "not_called" if decision % 2 else "", 1
    return loop.train()


def written_by_hand(loop: Loop, decision: int) -> float:
    def backward(value: Tensor) -> None:
        learning = [parameter for parameter in loop.model.parameters() if parameter.requires_grad]
        gradients = torch.autograd.grad(value, learning, allow_unused=True)
        for parameter, gradient in zip(learning, gradients, strict=True):
            parameter.grad = gradient

    return loop.train(backward)


def without_a_step(loop: Loop, decision: int) -> float:
    return F.cross_entropy(loop.compute(), loop.labels).item()


@pytest.mark.parametrize(
    "train", [accumulating, kept_zeros, dropped_in_the_step, routed, written_by_hand, without_a_step]
)
def test_training_that_reaches_seeds_in_its_own_way_is_not_warned_of(train: Callable[[Loop, int], float]) -> None:
    loop = Loop()
    with silent():
        for decision in range(DECISIONS):
            loop.grower.step(train_loss=train(loop, decision))
    assert set(loop.model.seeds) == {"0", "2"}


@pytest.mark.parametrize("skipped", ["none", "some", "all"])
def test_steps_that_a_gradient_scaler_skips_do_not_count(skipped: str) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    loop = Loop(scaler=scaler)
    with silent():
        for decision in range(DECISIONS):
            for step in range(2):
                loop.optimizer.zero_grad()
                value = F.cross_entropy(loop.compute(), loop.labels)
                scaler.scale(value).backward()
                if skipped == "all" or (skipped == "some" and (decision + step) % 2):
                    loop.model.host[4].bias.grad.fill_(torch.inf)
                scaler.step(loop.optimizer)
                scaler.update(4.0)
            loop.grower.step(train_loss=value.item())


def test_seeds_with_forks_are_reached() -> None:
    loop = Loop(
        rules=HELD,
        horizon=20,
        evaluate=esper.Refit(validate),
        loss=lambda inputs, labels: F.cross_entropy(loop.model(inputs), labels),
    )

    def backward(value: Tensor) -> None:
        loop.grower.isolated_backward(value, loop.inputs, loop.labels)
        value.backward()

    with silent():
        for _ in range(DECISIONS):
            loop.grower.step(train_loss=loop.train(backward))
    assert set(loop.model.seeds) == {"0", "2"}


def test_a_resumed_grower_does_not_complain_of_seeds_that_it_has_not_seen_learn() -> None:
    before, after = Loop(), Loop()
    carriers = [GrowthInStateDict(loop.model) for loop in (before, after)]
    for carrier, loop in zip(carriers, (before, after), strict=True):
        carrier.add_part("grower", loop.grower)
    for _ in range(4):
        before.grower.step(train_loss=before.train())
    after.model.load_state_dict(before.model.state_dict())
    with silent():
        for number in range(DECISIONS - 4):
            after.grower.step(train_loss=after.train() if number else 1.0)
    assert any(seed.fossilized for seed in after.model.seeds.values())


def test_a_seed_with_weight_0_has_gradients_that_are_0() -> None:
    loop = Loop(rules=HELD)
    with silent():
        for _ in range(DECISIONS):
            for seed in loop.model.seeds.values():
                seed.alpha.zero_()
            value = loop.train()
            for seed in loop.model.seeds.values():
                learning = [parameter for parameter in seed.parameters() if parameter.requires_grad]
                assert all(parameter.grad is not None and not parameter.grad.any() for parameter in learning)
            loop.grower.step(train_loss=value)
