"""Models that grow on a GPU compute there what they compute on the CPU."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import esper
from esper.growth.attach import attach
from esper.growth.blueprints.registry import Blueprint
from esper.growth.model import GrowingModel
from esper.growth.site import Site
from factories import EXAMPLES, Host, classes, every_host, generator, outputs
from gpu import CPU, GPU, full_float32, move, needs_gpu  # noqa: F401 - a fixture
from growth.blueprint_cases import batch, every_case, grown, newborn
from growth.test_units import CASES as PAIRS

every_pair = pytest.mark.parametrize("pair", PAIRS)
pytestmark = pytest.mark.usefixtures("full_float32")


def grow(host: Host, device: torch.device) -> GrowingModel:
    """Attached and grown on the device."""
    model = attach(host.network().to(device), host.places, move(host.arguments(), device))
    for index, name in enumerate(host.slots):
        stir(model, name, host.blueprint if index == 0 else "norm")
    return model


def stir(model: GrowingModel, slot: str, blueprint: str) -> None:
    """Plant a seed that changes the output, by numbers drawn on the CPU."""
    seed = model.slots[slot].germinate(blueprint, generator(2), alpha=0.7)
    for parameter in seed.parameters():
        parameter.data.add_(torch.randn(parameter.shape, generator=generator(4)).to(parameter.device) / 2)


def example_losses(model: nn.Module, arguments: Any) -> Tensor:
    """Of each example: ``[B]``."""
    logits = outputs(model, arguments)
    labels = classes(len(logits)).to(logits.device)
    return F.cross_entropy(logits.float(), labels, reduction="none").view(EXAMPLES, -1).mean(1)


def list_devices(model: nn.Module) -> set[str]:
    return {value.device.type for value in (*model.parameters(), *model.buffers())}


def assert_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.detach().cpu(), expected.detach().cpu(), rtol=1e-3, atol=1e-4)


@needs_gpu
@every_host
def test_outputs_and_gradients_are_those_of_the_cpu(host: Host) -> None:
    found: list[list[Tensor]] = []
    for device in (CPU, GPU):
        model, arguments = grow(host, device), move(host.arguments(), device)
        example_losses(model, arguments).mean().backward()
        assert list_devices(model) == {device.type}
        found.append([outputs(model, arguments), *(one.grad for one in model.parameters() if one.grad is not None)])
    assert len(found[0]) == len(found[1]) > 1
    for one, other in zip(*found, strict=True):
        assert_close(one, other)


@needs_gpu
@every_host
def test_promises_are_those_of_the_cpu(host: Host) -> None:
    rows: list[dict[tuple[str, str], float]] = []
    for device in (CPU, GPU):
        arguments = move(host.arguments(), device)
        model = attach(host.network().to(device), host.places, arguments)
        looked = model.look(example_losses, [arguments], draws=2)
        rows.append({(row.slot, row.blueprint): row.promise_held_out for row in looked.rows})
    assert rows[1] == pytest.approx(rows[0], rel=0.02, abs=2e-3)


@needs_gpu
@every_host
def test_finalized_models_compute_the_same(host: Host) -> None:
    model, arguments = grow(host, GPU).eval(), move(host.arguments())
    for name in host.slots:
        model.slots[name].fossilize()
    expected = outputs(model, arguments)
    plain = model.finalize()
    assert list_devices(plain) == {"cuda"}
    assert_close(outputs(plain.eval(), arguments), expected)


@needs_gpu
@every_host
def test_a_model_that_is_saved_on_a_gpu_is_loaded_anywhere(host: Host, tmp_path: Path) -> None:
    model = grow(host, GPU).eval()
    esper.save(model, tmp_path)
    for device in (CPU, GPU):
        arguments = move(host.arguments(), device)
        loaded = esper.load(tmp_path, host.network().to(device), arguments).eval()
        assert list_devices(loaded) == {device.type}
        assert_close(outputs(loaded, arguments), outputs(model, move(host.arguments())))


@needs_gpu
@every_host
def test_a_model_may_move_after_it_grew(host: Host) -> None:
    model = grow(host, CPU).eval()
    expected = outputs(model, host.arguments())
    model.to(GPU)
    assert list_devices(model) == {"cuda"}
    assert_close(outputs(model, move(host.arguments())), expected)
    model.slots[host.slots[-1]].remove()
    model.slots[host.slots[-1]].germinate("norm", generator(3))
    assert list_devices(model) == {"cuda"}


@needs_gpu
@every_host
def test_it_learns_with_autocast_and_a_scaler(host: Host) -> None:
    model, arguments = grow(host, GPU), move(host.arguments())
    optimizer = torch.optim.AdamW(model.parameter_groups(lr=1e-3), fused=True)
    model.link(optimizer)
    for dtype, scaler in ((torch.bfloat16, None), (torch.float16, torch.amp.GradScaler("cuda"))):
        model.slots[host.slots[-1]].remove()
        model.slots[host.slots[-1]].germinate("norm", generator(3), alpha=0.5)
        for _ in range(2):
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype):
                loss = example_losses(model, arguments).mean()
            if scaler is None:
                loss.backward()
                optimizer.step()
            else:
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
        assert torch.isfinite(example_losses(model, arguments)).all()


@needs_gpu
@every_case
def test_blueprints_compute_what_they_compute_on_the_cpu(kind: type[Blueprint], site: Site) -> None:
    features, inputs = batch(site)
    near, far = grown(kind, site), grown(kind, site).to(GPU)
    expected, found = near(features, inputs), far(features.to(GPU), inputs.to(GPU))
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-6, atol=1e-8)
    drawn, there = newborn(kind, site), newborn(kind, site).to(GPU)
    assert all(torch.equal(one, other.cpu()) for one, other in zip(drawn.parameters(), there.parameters(), strict=True))


@needs_gpu
@every_pair
def test_new_units_become_part_of_their_layers(pair: str) -> None:
    make, place, x = PAIRS[pair]
    torch.manual_seed(0)
    inputs = x.double().to(GPU)
    model = esper.attach(make().double().to(GPU), {place: ["units_4"]}, inputs[:2])
    (slot,) = model.slots.values()
    units = slot.germinate("units_4", generator(2), alpha=0.7).blueprint
    for parameter in units.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator(3)))
    model(inputs)
    model.eval()
    slot.fossilize()
    plain = model.finalize().eval()
    assert list_devices(plain) == {"cuda"}
    torch.testing.assert_close(plain(inputs), model(inputs), rtol=1e-9, atol=1e-9)
