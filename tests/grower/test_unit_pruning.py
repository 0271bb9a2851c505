"""Hidden units grow under a grower as other modules do, and of those that grew the best are kept."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import esper
from esper import Grower, GrowingModel
from esper.engine.promises import PromiseSettings
from esper.errors import SlotError
from esper.grower.unit_pruning import prune_units
from esper.growth.blueprints.units import Units
from grower.training_loop import data, host, validate

PLACES: Any = {("0", "2"): ["units_8", "mlp"], ("2", "4"): ["units_8"]}


def train(model: GrowingModel, grower: Grower, epochs: int) -> None:
    optimizer, (inputs, labels) = grower.optimizer, data()
    for _ in range(epochs):
        model.train()
        for x, y in zip(inputs.split(16), labels.split(16), strict=True):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        grower.step(train_loss=float(loss.detach()))


def growing(controller: str = "all_at_start", **options: Any) -> tuple[GrowingModel, Grower]:
    model = esper.attach(host(), PLACES, torch.zeros(2, 4))
    optimizer = torch.optim.Adam(model.parameter_groups(lr=0.02))
    return model, Grower(model, optimizer, controller=controller, evaluate=validate, horizon=12, **options)


@pytest.mark.parametrize("controller", ["all_at_start", "look", "random"])
def test_controllers_grow_units(controller: str) -> None:
    model, grower = growing(controller)
    train(model, grower, 12)
    grower.finish()
    assert controller != "all_at_start" or any(isinstance(seed.blueprint, Units) for seed in model.seeds.values())
    inputs, _ = data()
    torch.testing.assert_close(model.finalize().eval()(inputs), model.eval()(inputs), rtol=0, atol=1e-5)


def test_a_growth_with_units_resumes() -> None:
    model, grower = growing("look")
    train(model, grower, 4)
    saved = copy.deepcopy((model, grower.optimizer.state_dict(), grower.state_dict()))
    train(model, grower, 4)
    other = saved[0]
    optimizer = torch.optim.Adam(other.parameter_groups(lr=0.02))
    optimizer.load_state_dict(saved[1])
    resumed = Grower(other, optimizer, controller="look", evaluate=validate, horizon=12)
    resumed.load_state_dict(saved[2])
    train(other, resumed, 4)
    assert all(map(torch.equal, model.state_dict().values(), other.state_dict().values()))


def test_training_shows_what_looking_promises() -> None:
    model, grower = growing("look", conduct=esper.EpisodeConfig(promise=PromiseSettings(examples=96)))
    recorder = grower._promise_recorder
    assert recorder is not None
    recorder.set_recording(True)
    inputs, labels = data()
    F.cross_entropy(model.eval()(inputs), labels).backward()
    measured = recorder.measure(np.ones((1, 2), np.bool_))
    looked = model.look(
        lambda model, batch: F.cross_entropy(model(batch), labels, reduction="none"), [inputs], draws=1, examples=96
    )
    for row in looked.rows:
        place = 0, list(model.slots).index(row.slot), grower.network.blueprints.index(row.blueprint)
        assert measured.fitted[place] == pytest.approx(row.promise, abs=2e-3)
        assert row.promise > 0


def test_an_average_of_weights_grows_along() -> None:
    model, grower = growing()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    model.mirror(average)
    train(model, grower, 2)
    average.update_parameters(model)
    assert list(average.module.seeds) == list(model.seeds) == ["2", "4"]
    inputs, _ = data()
    with pytest.warns(UserWarning, match="unfinished"):
        plain = average.module.finalize("keep")
    torch.testing.assert_close(plain.eval()(inputs), average.module.eval()(inputs), rtol=0, atol=1e-5)


def pruned(keep: int, useful: list[int]) -> tuple[GrowingModel, Grower, nn.Module]:
    """A grower of a model with 8 units in slot 2, of which only ``useful`` ones do any good, and its plain model."""
    model, grower = growing("none")
    train(model, grower, 1)
    units = model.slots["2"].germinate("units_8", torch.Generator().manual_seed(1), alpha=1.0).blueprint
    assert isinstance(units, Units)
    # What the loss would have of each unit is its gradient: the useful ones follow it, the others go against it.
    inputs, labels = data(64, seed=1)
    F.cross_entropy(model.eval()(inputs), labels).backward()
    weight = units.last.get_parameter("weight")
    with torch.no_grad():
        weight += 0.3 * weight.grad / weight.grad.norm()
        weight[:, useful] *= -1
    model.slots["2"].fossilize()
    grower.prune_units("2", keep)
    return model, grower, model.finalize()


@pytest.mark.parametrize("useful", [[0, 1, 2, 3], [1, 6], [5]], ids=str)
def test_the_units_that_earn_are_kept(useful: list[int]) -> None:
    model, _, plain = pruned(len(useful), useful)
    units = model.seeds["2"].blueprint
    assert isinstance(units, Units)
    assert len(units.rank_units()) == len(useful)
    assert plain[0].out_features == plain[2].in_features == 8 + len(useful)
    inputs, _ = data()
    torch.testing.assert_close(plain.eval()(inputs), model.eval()(inputs), rtol=0, atol=1e-5)


def make_units() -> Units:
    model = esper.attach(host(), PLACES, torch.zeros(2, 4))
    units = model.slots["2"].germinate("units_8", torch.Generator().manual_seed(1)).blueprint
    assert isinstance(units, Units)
    nn.init.ones_(units.last.get_parameter("weight"))
    with torch.no_grad():  # norms from 1 to 8
        weight = units.layers[0].get_parameter("weight")
        weight.copy_(torch.arange(1.0, 9.0)[:, None].expand_as(weight))
    return units


def test_of_equals_the_smallest_go_first() -> None:
    units = make_units()
    prune_units(units, 3, lambda: 0.5)
    assert units.rank_units() == [5, 6, 7]


def test_unknown_scores_are_no_reason() -> None:
    units = make_units()
    prune_units(units, 7, lambda: float("nan"))
    assert units.rank_units() == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("keep", range(1, 9))
def test_few_evaluations_find_the_best(keep: int) -> None:
    """The score is the sum of what the units are worth: the first ones most, against their norms."""
    units, worth, calls = make_units(), torch.arange(8.0, 0.0, -1.0), []

    def measure() -> float:
        calls.append(keep)
        return float(worth[units.kept].sum())

    prune_units(units, keep, measure)
    assert units.kept.nonzero().flatten().tolist() == list(range(keep))
    assert len(calls) <= 8 + 2


def test_an_evaluation_that_fails_leaves_the_units_as_they_are() -> None:
    def fail() -> float:
        raise KeyError("data")

    units = make_units()
    with pytest.raises(KeyError):
        prune_units(units, 2, fail)
    assert bool(units.kept.all())


def test_what_cannot_be_pruned_is_refused() -> None:
    model, grower = growing("none")
    with pytest.raises(SlotError, match="has no hidden units"):
        grower.prune_units("2", 4)
    model.slots["2"].germinate("mlp")
    with pytest.raises(SlotError, match="has no hidden units"):
        grower.prune_units("2", 4)
    model.slots["4"].germinate("units_8")
    with pytest.raises(SlotError, match="8 hidden units, fewer than the 9"):
        grower.prune_units("4", 9)
    with pytest.raises(SlotError, match="at least 1"):
        grower.prune_units("4", 0)
    with pytest.raises(SlotError, match="no slot 'nine'"):
        grower.prune_units("nine", 4)


def test_groups_of_unequal_size_do_not_cost_the_best_unit() -> None:
    """A single unit is more easily done without than two, also if it is the best one."""
    net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    model = esper.attach(net, {("0", "2"): ["units_5"]}, torch.zeros(2, 4))
    units = model.slots["2"].germinate("units_5", alpha=1.0).blueprint
    assert isinstance(units, Units)
    nn.init.ones_(units.layers[0].get_parameter("weight"))
    with torch.no_grad():
        units.last.get_parameter("weight").copy_(torch.arange(1.0, 6).expand(2, 5))
    merits = torch.tensor([1, 1, 1, 1, 1.5])
    prune_units(units, 1, lambda: float(merits[units.kept].sum()))
    assert units.kept.tolist() == [False, False, False, False, True]
