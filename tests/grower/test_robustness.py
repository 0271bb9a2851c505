"""What a grower does when a seed cannot be made, and what it must not do to a device."""

import copy
import math

import numpy as np
import pytest
import torch

from esper.engine.engine import GrowthConfig
from esper.engine.governor import GovernorSettings
from esper.errors import DivergedError
from esper.grower import Grower
from esper.growth.attach import attach
from esper.growth.blueprints import registry
from factories import CLASSES, RESNET, Loop, loss, mlp, numbers, score
from growth.broken import Broken


def test_a_seed_that_cannot_be_made_leaves_everything_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._registry, Broken.name, Broken)
    model = attach(mlp(), {"0": [Broken.name]}, numbers(7))
    optimizer = torch.optim.AdamW(model.parameter_groups(lr=0.01))
    grower = Grower(
        model, optimizer, controller="heuristic", evaluate=lambda one: score(one, numbers(7)), classes=CLASSES
    )
    found = loss(model, numbers(7))
    found.backward()
    optimizer.step()
    table, state, keys = copy.deepcopy(grower.network.table), optimizer.state_dict(), model.state_dict().keys()
    with pytest.raises(MemoryError):
        grower.step(train_loss=found)
    assert model.seeds == {}
    assert model.state_dict().keys() == keys
    assert optimizer.state_dict()["param_groups"] == state["param_groups"]
    assert optimizer.state_dict()["state"].keys() == state["state"].keys()
    assert np.array_equal(grower.network.table.stage, table.stage)
    assert grower.network.germinations.tolist() == [0]


def test_the_rollback_that_is_too_many_leaves_sound_books() -> None:
    loop = Loop("all_at_start", growth=GrowthConfig(governor=GovernorSettings(max_rollbacks=0)))
    for _ in range(2):
        loop.epoch()
    assert loop.model.seeds
    with pytest.raises(DivergedError, match="is infinite or not a number"):
        loop.epoch(lambda _: math.nan)
    assert loop.model.seeds == {}
    assert not loop.grower.network.table.owning.any()
    loop.epoch()


@pytest.mark.gpu
def test_training_waits_for_no_device() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    images = numbers(3, 8, 8).cuda()
    model = attach(RESNET.network().cuda(), RESNET.places, images)
    optimizer = torch.optim.AdamW(model.parameter_groups(lr=0.01))
    Grower(model, optimizer, controller="heuristic", evaluate=lambda one: (1.0, 0.5), classes=CLASSES)
    for grown in (False, True):
        if grown:
            model.slots["layer1"].germinate("conv3x3", alpha=0.5)
        for step in range(3):
            torch.cuda.set_sync_debug_mode("error" if step else "default")  # the first step chooses kernels
            try:
                optimizer.zero_grad()
                model(images).square().mean().backward()
                optimizer.step()
            finally:
                torch.cuda.set_sync_debug_mode("default")
