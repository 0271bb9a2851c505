"""Averages of a growing model's weights: whatever grows grows in them too, and they stay averages."""

import copy
import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from esper.errors import SlotError
from esper.growth.attach import attach
from esper.growth.model import GrowingModel
from esper.lifecycle.actions import Blend
from factories import attach_mlp, mlp, numbers, outputs

DECAY = 0.75


class ByStateDict:
    """An average as other libraries keep it: value by value of the state dict, in order, without a look at names."""

    def __init__(self, model: nn.Module) -> None:
        self.module = copy.deepcopy(model)
        self.module.requires_grad_(False)

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        for average, value in zip(self.module.state_dict().values(), model.state_dict().values(), strict=False):
            if average.is_floating_point():
                average.lerp_(value, 1 - DECAY)


AVERAGES: dict[str, Callable[[nn.Module], Any]] = {
    "averaged": lambda model: AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY)),
    "averaged with buffers": lambda model: AveragedModel(
        model, multi_avg_fn=get_ema_multi_avg_fn(DECAY), use_buffers=True
    ),
    "mean": AveragedModel,
    "by state dict": ByStateDict,
}
every_average = pytest.mark.parametrize("average", AVERAGES.values(), ids=AVERAGES)
every_blend = pytest.mark.parametrize("blend", Blend, ids=lambda blend: blend.name.lower())


def mirrored(average: Callable[[nn.Module], Any]) -> tuple[GrowingModel, Any]:
    growing = attach_mlp()
    kept = average(growing)
    growing.mirror(kept.module)
    return growing, kept


@torch.no_grad()
def learn(growing: GrowingModel, kept: Any) -> None:
    """All parameters move, and the average is updated."""
    for place, parameter in enumerate(growing.parameters()):
        parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(place)) / 8)
    kept.update_parameters(growing)


def require_alike(growing: GrowingModel, kept: Any) -> None:
    """Same names in the same order, same shapes, same weights of seeds and same stages."""
    state, kept_state = growing.state_dict(), kept.module.state_dict()
    assert list(state) == list(kept_state)
    assert [tensor.shape for tensor in state.values()] == [tensor.shape for tensor in kept_state.values()]
    assert [name for name, _ in growing.named_parameters()] == [name for name, _ in kept.module.named_parameters()]
    assert growing.seeds.keys() == kept.module.seeds.keys()
    for name, seed in growing.seeds.items():
        other = kept.module.seeds[name]
        assert other is not seed
        assert (other.fossilized, other.blend) == (seed.fossilized, seed.blend)
        assert torch.equal(other.alpha, seed.alpha)


@every_average
@every_blend
def test_an_average_goes_through_all_that_happens_to_seeds(average: Callable[[nn.Module], Any], blend: Blend) -> None:
    growing, kept = mirrored(average)
    first, second = growing.slots.values()

    def after(change: Callable[[], object]) -> None:
        change()
        require_alike(growing, kept)
        learn(growing, kept)
        require_alike(growing, kept)

    after(lambda: first.germinate("mlp", blend=blend))
    after(lambda: first.set_alpha(0.5))
    after(lambda: second.germinate("lowrank", blend=blend, alpha=0.3))
    after(first.prune)
    after(lambda: first.germinate("lowrank", blend=blend, alpha=1.0))
    after(first.fossilize)
    after(lambda: second.set_alpha(0.9))
    after(second.remove)
    average_of = [parameter.clone() for parameter in kept.module.parameters()]
    learn(growing, kept)
    for mean, before, new in zip(kept.module.parameters(), average_of, growing.parameters(), strict=True):
        assert not torch.equal(mean, new)  # an average, not the model
        assert not torch.equal(mean, before)


def test_an_average_of_a_seed_is_that_of_its_values_since_it_came() -> None:
    growing, kept = mirrored(AVERAGES["averaged"])
    for _ in range(3):
        learn(growing, kept)
    seed = growing.slots["0"].germinate("mlp", alpha=1.0)
    expected = [parameter.detach().clone() for parameter in seed.parameters()]
    for _ in range(3):
        learn(growing, kept)
        expected = [DECAY * mean + (1 - DECAY) * new for mean, new in zip(expected, seed.parameters(), strict=True)]
    torch.testing.assert_close(list(kept.module.seeds["0"].parameters()), expected)


@every_average
def test_a_finalized_average_computes_what_the_average_does(average: Callable[[nn.Module], Any]) -> None:
    growing, kept = mirrored(average)
    growing.slots["0"].germinate("mlp", alpha=1.0)
    for _ in range(3):
        learn(growing, kept)
    growing.slots["0"].fossilize()
    learn(growing, kept)
    inputs = numbers(7)
    expected = outputs(kept.module.eval(), inputs)
    torch.testing.assert_close(outputs(kept.module.finalize(), inputs), expected)
    assert not torch.allclose(outputs(growing.eval(), inputs), expected)


def test_a_mirror_is_elsewhere_and_in_its_own_mode() -> None:
    growing = attach_mlp()
    other = copy.deepcopy(growing).double().eval()
    growing.mirror(other)
    growing.slots["0"].germinate("mlp", alpha=1.0)
    assert outputs(other, numbers(7).double()).dtype == torch.float64
    assert not any(part.training for part in other.modules())
    assert all(part.training for part in growing.modules())


def test_what_grew_before_is_caught_up_with() -> None:
    growing = attach_mlp()
    other = copy.deepcopy(growing)
    growing.slots["0"].germinate("mlp", alpha=0.5)
    growing.mirror(nn.ModuleDict({"inside": other}))
    assert other.state_dict().keys() == growing.state_dict().keys()


@pytest.mark.parametrize("wrong", ["itself", "host", "other slots"])
def test_what_is_no_copy_is_refused(wrong: str) -> None:
    growing = attach_mlp()
    other = {"itself": growing, "host": growing.host, "other slots": attach(mlp(), ["0"], numbers(7))}[wrong]
    with pytest.raises(SlotError, match="contains no copy of this model: give copy.deepcopy"):
        growing.mirror(other)


def grow_twice(growing: GrowingModel) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        growing.slots["0"].germinate("mlp")
        growing.slots["2"].germinate("mlp")
        growing.slots["2"].prune()
    return [str(one.message) for one in caught]


@every_average
def test_an_average_that_nobody_declared_is_warned_of_once(average: Callable[[nn.Module], Any]) -> None:
    growing = attach_mlp()
    kept = average(growing)
    (warned,) = grow_twice(growing)
    assert "model.mirror(average)" in warned
    del kept


def gone(growing: GrowingModel) -> None:
    copy.deepcopy(growing)
    gc.collect()


QUIET: dict[str, Callable[[GrowingModel], object]] = {
    "no copy": lambda growing: None,
    "a copy that is gone": gone,
    "a plain model": lambda growing: growing.finalize(),
    "a released copy": lambda growing: [copied := copy.deepcopy(growing), copied.release()],
    "a mirror": lambda growing: [copied := copy.deepcopy(growing), growing.mirror(copied)],
}


@pytest.mark.landing
@pytest.mark.parametrize("before", QUIET.values(), ids=QUIET)
def test_otherwise_nobody_is_warned(before: Callable[[GrowingModel], object]) -> None:
    growing = attach_mlp()
    kept = before(growing)
    assert grow_twice(growing) == []
    del kept


@pytest.mark.landing
def test_a_mirror_lives_no_longer_for_being_known() -> None:
    growing = attach_mlp()
    copied = copy.deepcopy(growing)
    growing.mirror(copied)
    reference = weakref.ref(copied)
    del copied
    gc.collect()
    assert reference() is None
    assert grow_twice(growing) == []


def test_a_copy_of_a_model_that_was_compiled_in_place_runs_itself() -> None:
    growing, inputs = attach_mlp(), numbers(7)
    growing.compile(backend="eager")
    growing(inputs)
    copied = copy.deepcopy(growing)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    assert not copied(inputs).any()
    assert growing(inputs).any()
