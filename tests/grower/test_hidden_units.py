"""Hidden units grow under a grower as other modules do."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import esper
from esper import Grower, GrowingModel
from esper.growth.blueprints.units import Units
from esper.growth.promise import PromiseSettings
from factories import make_data, make_host, validate

PLACES: Any = {("0", "1", "2"): ["units_8"], ("2", "3", "4"): ["units_8"]}


def train(model: GrowingModel, grower: Grower, epochs: int) -> None:
    optimizer, (inputs, labels) = grower.optimizer, make_data()
    for _ in range(epochs):
        model.train()
        for x, y in zip(inputs.split(16), labels.split(16), strict=True):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        grower.step(train_loss=float(loss.detach()))


def growing(controller: str = "all_at_start", **options: Any) -> tuple[GrowingModel, Grower]:
    model = esper.attach(make_host(), PLACES, torch.zeros(2, 4))
    optimizer = torch.optim.Adam(model.parameter_groups(lr=0.02))
    return model, Grower(model, optimizer, controller=controller, evaluate=validate, horizon=12, **options)


@pytest.mark.parametrize("controller", ["all_at_start", "look", "random"])
def test_controllers_grow_units(controller: str) -> None:
    model, grower = growing(controller)
    train(model, grower, 12)
    grower.finish()
    assert controller != "all_at_start" or any(isinstance(seed.blueprint, Units) for seed in model.seeds.values())
    inputs, _ = make_data()
    torch.testing.assert_close(model.finalize().eval()(inputs), model.eval()(inputs))


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
    model, grower = growing("look", growth=esper.GrowthConfig(promise=PromiseSettings(examples=96)))
    recorder = grower.backend.promise_recorder
    assert recorder is not None
    recorder.set_recording(True)
    inputs, labels = make_data()
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
    inputs, _ = make_data()
    with pytest.warns(UserWarning, match="unfinished"):
        plain = average.module.finalize("keep")
    torch.testing.assert_close(plain.eval()(inputs), average.module.eval()(inputs), rtol=0, atol=1e-5)
