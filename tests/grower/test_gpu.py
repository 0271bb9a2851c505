"""A grower decides on a GPU what it decides on the CPU, and goes on after it was saved on the other one."""

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import esper
from esper.growth.persist import plant_structure
from factories import CLASSES, RESNET, RINGS, SLOTS, make_data, make_host, numbers
from gpu import CPU, GPU, needs_gpu

EPOCHS = 24
RULES = ("look", "heuristic", "periodic", "all_at_start", "all_at_plateau", "random", "none")


class Loop:
    """A model in float64 on a device, its optimizer and a grower that looks, judges and rolls back."""

    def __init__(self, device: torch.device, controller: str, **options: Any) -> None:
        self.device = device
        inputs, self.labels = (part.to(device) for part in make_data())
        self.inputs = inputs.double()
        self.model = esper.attach(make_host().double().to(device), SLOTS, self.inputs[:2])
        self.optimizer = torch.optim.AdamW(self.model.parameter_groups(lr=1e-2))
        held_out, labels = make_data(64, seed=1)
        batch = held_out.double().to(device), labels.to(device)
        self.grower = esper.Grower(
            self.model,
            self.optimizer,
            esper.Validation("classification", [batch]),
            controller=controller,
            horizon=EPOCHS,
            classes=RINGS,
            **options,
        )

    def epoch(self, *, breaks: bool = False) -> esper.Decision:
        self.model.train()
        losses = list[float]()
        for half in (slice(0, 48), slice(48, 96)):
            loss = F.cross_entropy(self.model(self.inputs[half]), self.labels[half])
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            losses.append(loss.item())
        return self.grower.step(train_loss=math.nan if breaks else float(np.mean(losses)))

    def state(self) -> dict[str, Any]:
        parts = {"model": self.model, "optimizer": self.optimizer, "grower": self.grower}
        return copy.deepcopy({name: part.state_dict() for name, part in parts.items()})


@needs_gpu
@pytest.mark.parametrize("controller", RULES)
def test_it_decides_as_on_the_cpu(controller: str) -> None:
    near, far = Loop(CPU, controller), Loop(GPU, controller)
    for epoch in range(EPOCHS):
        breaks = epoch == 11  # the governor rolls back
        expected, found = near.epoch(breaks=breaks), far.epoch(breaks=breaks)
        assert (found.op, found.slot, found.blueprint) == (expected.op, expected.slot, expected.blueprint)
        assert np.array_equal(far.grower.network.table.stage, near.grower.network.table.stage)
    far.grower.finish()
    near.grower.finish()
    assert far.model.seeds.keys() == near.model.seeds.keys()
    torch.testing.assert_close(far.model(far.inputs).cpu(), near.model(near.inputs), rtol=1e-4, atol=1e-5)
    assert next(far.model.finalize().parameters()).device.type == "cuda"


@needs_gpu
@pytest.mark.parametrize("place", ["cuda", "cpu"])
def test_it_goes_on_there_or_elsewhere(place: str) -> None:
    whole = Loop(GPU, "look")
    for _ in range(EPOCHS // 2):
        whole.epoch()
    saved = whole.state()
    other = Loop(torch.device(place), "look")
    plant_structure(other.model, saved["grower"]["seeds"])
    other.model.load_state_dict(saved["model"])
    other.optimizer.load_state_dict(saved["optimizer"])
    other.grower.load_state_dict(saved["grower"])
    for _ in range(EPOCHS // 2):
        expected, found = whole.epoch(), other.epoch()
        assert (found.op, found.slot, found.blueprint) == (expected.op, expected.slot, expected.blueprint)
    assert other.model.seeds, "the test means to go on with modules that grew"
    torch.testing.assert_close(other.model(other.inputs).cpu(), whole.model(whole.inputs).cpu(), rtol=1e-4, atol=1e-5)


@needs_gpu
def test_training_waits_for_no_device() -> None:
    images = numbers(3, 8, 8).cuda()
    model = esper.attach(RESNET.network().cuda(), RESNET.places, images)
    optimizer = torch.optim.AdamW(model.parameter_groups(lr=0.01))
    esper.Grower(model, optimizer, controller="heuristic", evaluate=lambda one: (1.0, 0.5), classes=CLASSES)
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
