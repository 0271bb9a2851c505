"""Slots on a host: it stays itself, grows only where a seed lives, and survives copying and pickling."""

import copy
import inspect
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import esper
from esper.errors import SlotError, UnknownBlueprintError
from esper.growth.model import GrowingModel
from esper.growth.site import Layout
from esper.tasks.token_suite import FEATURES, TOKENS, TokenHost
from factories import Host, draw_normal, every_host, generator, plant

SLOTS = ("layer0", "layer1.linear", "layer2")
Duplicate = Callable[[GrowingModel], GrowingModel]


def host() -> TokenHost:
    return TokenHost((6, 5, 4), linear_host=False, generator=generator())


def growing() -> GrowingModel:
    return GrowingModel(host(), SLOTS, inputs())


def inputs(count: int = 3) -> Tensor:
    return draw_normal(count, TOKENS, FEATURES)


def by_pickle(model: GrowingModel) -> GrowingModel:
    return pickle.loads(pickle.dumps(model))


def test_the_host_keeps_its_keys_and_its_outputs() -> None:
    plain, model = host(), growing()
    assert model.host.state_dict().keys() == plain.state_dict().keys()
    assert torch.equal(model(inputs()), plain(inputs()))
    plant(model, "layer1.linear", "mlp")
    assert model.host.state_dict().keys() == plain.state_dict().keys()
    grown = model.state_dict().keys() - {f"host.{name}" for name in plain.state_dict()}
    assert grown
    assert all(key.startswith("slots.layer1/linear.") for key in grown)


def test_the_host_called_directly_grows_too() -> None:
    model = growing()
    plant(model, "layer0", "mlp")
    assert torch.equal(model.host(inputs()), model(inputs()))
    assert not torch.equal(model(inputs()), host()(inputs()))


def test_a_dormant_slot_passes_the_very_tensor() -> None:
    slot, features = growing().slots["layer0"], inputs()
    assert slot(slot, (), {}, features) is features


def test_a_seed_adds_alpha_times_its_contribution() -> None:
    model, features = growing(), inputs()
    plant(model, "layer1.linear", "input_skip", alpha=0.25)
    slot = model.slots["layer1.linear"]
    seed = slot.occupant
    first = model.host.layer0(features)
    expected = model.host.layer1.linear.forward(first)  # not called, so not hooked
    expected = expected + 0.25 * seed.blueprint(expected, features)
    expected = model.host.layer1.activate(expected)
    model(features)  # the seed reads what the network was last given
    torch.testing.assert_close(model.host.layer1(first), expected)


@pytest.mark.parametrize("slot", SLOTS)
def test_gradients_reach_host_and_seed(slot: str) -> None:
    """Whatever blueprint: those of the host are of the function with the seed, and no part of the seed goes without."""
    plain = host()
    plain(inputs()).square().sum().backward()
    blueprints = growing().slots[slot].blueprints
    assert len(blueprints) >= 5
    for blueprint in blueprints:
        model = growing()
        plant(model, slot, blueprint)
        model(inputs()).square().sum().backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, (blueprint, name)
            assert parameter.grad.any(), (blueprint, name)
        for (name, mine), before in zip(model.host.named_parameters(), plain.parameters(), strict=True):
            assert not torch.allclose(mine.grad, before.grad), (blueprint, name)


def test_pruning_leaves_nothing_behind() -> None:
    model = growing()
    before = model(inputs())
    plant(model, "layer2", "mlp")
    assert not torch.equal(model(inputs()), before)
    model.slots["layer2"].prune()
    assert torch.equal(model(inputs()), before)
    assert model.state_dict().keys() == growing().state_dict().keys()
    model.slots["layer2"].germinate("norm", generator())  # the slot is free again


@pytest.mark.parametrize("duplicate", [copy.deepcopy, by_pickle], ids=["deepcopy", "pickle"])
def test_duplicates_do_not_carry_the_last_batch(duplicate: Duplicate) -> None:
    model = growing()
    model(inputs().requires_grad_() * 2)  # not a leaf: such a tensor can be neither copied nor stored
    other = duplicate(model)
    assert other.input_hook.inputs is None
    assert model.input_hook.inputs.shape == (3, TOKENS, FEATURES)
    plant(other, "layer0", "input_skip")
    with pytest.raises(SlotError, match="has not been called: call the whole host"):
        other.host.layer0(inputs())


def test_slots_are_found_by_the_name_of_their_submodule() -> None:
    model = growing()
    assert tuple(model.slots) == SLOTS
    assert model.slots["layer1.linear"].site.layout is Layout.TOKENS
    assert [model.slots[name].site.width for name in SLOTS] == [6, 5, 4]
    assert model.slots.items() == [(name, model.slots[name]) for name in model.slots]
    assert dict(model.slots) == dict(zip(SLOTS, model.slots.values(), strict=True))
    with pytest.raises(SlotError, match=r"no slot 'layer1'; this model has layer0, layer1\.linear, layer2"):
        model.slots["layer1"]


def test_what_cannot_germinate_is_refused_and_changes_nothing() -> None:
    model = growing()
    plant(model, "layer0", "mlp")
    expected = model(inputs())
    with pytest.raises(SlotError, match="slot 'layer0' is taken"):
        model.slots["layer0"].germinate("mlp", generator())
    with pytest.raises(UnknownBlueprintError, match="did you mean 'mlp'"):
        model.slots["layer2"].germinate("mpl", generator())
    with pytest.raises(SlotError, match="'conv3x3' does not support tokens"):
        model.slots["layer2"].germinate("conv3x3", generator())
    with pytest.raises(SlotError, match="no slot 'layer9'"):
        model.slots["layer9"].germinate("mlp", generator())
    assert torch.equal(model(inputs()), expected)


# A growing model shows how its host is called, and what else the host has to offer; so do its copies.


class Scaled(nn.Module):
    """Says more of itself than its outputs."""

    accepts_loss_kwargs = False
    _private = 1

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)
        self.config = {"width": 8}

    def forward(self, inputs: Tensor, labels: Tensor | None = None, *, scale: float = 1.0) -> Tensor:
        return self.last(self.first(inputs).relu()) * scale

    def predict(self, inputs: Tensor) -> Tensor:
        return self(inputs).argmax(1)


def grown() -> GrowingModel:
    torch.manual_seed(0)
    model = esper.attach(Scaled(), {"first": ["mlp"]}, torch.zeros(2, 4))
    plant(model, "first", "mlp")
    return model


@every_host
def test_the_signature_is_the_host_s(host: Host) -> None:
    model, alone = host.attached(), host.network()
    assert inspect.signature(model.forward) == inspect.signature(alone.forward)
    assert inspect.signature(type(model).forward) == inspect.signature(type(alone).forward)
    assert isinstance(model, GrowingModel)
    assert type(alone).__name__ in type(model).__name__


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, by_pickle], ids=["copy", "deepcopy", "pickle"])
def test_copies_are_called_alike_and_compute_alike(copied: Callable[[GrowingModel], GrowingModel]) -> None:
    model = grown()
    other = copied(model)
    x = torch.ones(3, 4)
    assert type(other) is type(model)
    assert inspect.signature(other.forward) == inspect.signature(model.host.forward)
    assert torch.equal(other(x, scale=2.0), model(x, scale=2.0))
    if copied is not copy.copy:  # a forward that belonged to the first would still see this
        nn.init.zeros_(model.host.last.weight)
        assert not torch.equal(other(x), model(x))


def test_what_only_the_host_has_is_read_from_it() -> None:
    model = grown()
    x = torch.randn(5, 4)
    assert model.config is model.host.config
    assert model.accepts_loss_kwargs is False
    assert torch.equal(model.predict(x), model(x).argmax(1))
    with pytest.raises(AttributeError, match="'GrowingScaled' object has no attribute 'nothing'"):
        model.nothing  # noqa: B018
    with pytest.raises(AttributeError):
        model._private  # noqa: B018
