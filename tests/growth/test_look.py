"""Where a model would grow, and by what: against seeds that are really planted, and where the answer is known."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import esper
from esper.errors import LookError
from esper.growth.look import Look
from esper.growth.model import GrowingModel
from esper.growth.promise import compute_promise
from esper.numerics.random_streams import module_generator
from factories import EXAMPLES, HOSTS, RESNET, Host, classes, every_host, outputs

ERROR = 0.03
"""What figures may differ by where the cause is known but the data are a sample."""


def example_losses(model: nn.Module, batch: Any) -> Tensor:
    """Mean cross-entropy of each example's outputs against arbitrary classes: ``[B]``."""
    logits = outputs(model, batch)
    return F.cross_entropy(logits.float(), classes(len(logits)), reduction="none").view(EXAMPLES, -1).mean(1)


def planted_grams(host: Host, slot: str, blueprint: str, draw: int) -> Tensor:
    """K by planting the seed at full weight, and asking autograd for each example's own loss."""
    model = host.attached().eval()
    seed = model.slots[slot].germinate(blueprint, module_generator(0, list(model.slots).index(slot), draw), alpha=1.0)
    rows = []
    for loss in example_losses(model, host.arguments()):
        gradients = torch.autograd.grad(loss, list(seed.parameters()), retain_graph=True, allow_unused=True)
        rows.append(torch.cat([each.flatten() for each in gradients if each is not None]))
    stacked = torch.stack(rows).double()
    return stacked @ stacked.mT


@pytest.mark.landing
@every_host
def test_it_promises_what_planted_seeds_ask_for(host: Host) -> None:
    looked = host.attached().look(example_losses, [host.arguments()], draws=2)
    assert {(row.slot, row.blueprint) for row in looked.rows} == {
        (slot.name, blueprint) for slot in host.attached().slots.values() for blueprint in slot.blueprints
    }
    for row in looked.rows:
        grams = torch.stack([planted_grams(host, row.slot, row.blueprint, draw) for draw in range(2)])
        assert row.promise == pytest.approx(float(compute_promise(grams).fitted.mean()), abs=1e-3)
        assert row.promise_held_out == pytest.approx(float(compute_promise(grams).held_out.mean()), abs=1e-3)
    assert [row.promise for row in looked.rows] == sorted((row.promise for row in looked.rows), reverse=True)
    assert looked.slots == host.slots


@every_host
@pytest.mark.few(4)
def test_nothing_of_it_remains_in_the_model(host: Host) -> None:
    model = host.grown_by_hand().train()
    next(model.host.children()).eval()
    model(host.arguments()) if isinstance(host.arguments(), Tensor) else model(**host.arguments())
    before = copy.deepcopy(model.state_dict())
    modes = [module.training for module in model.modules()]
    hooks = [len(module._forward_hooks) for module in model.host.modules()]
    random = torch.get_rng_state()
    model.look(example_losses, [host.arguments()], layers=True)
    torch.testing.assert_close(dict(model.state_dict()), dict(before), rtol=0, atol=0)
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), random)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert [len(module._forward_hooks) for module in model.host.modules()] == hooks


def test_a_mean_counts_for_each_example() -> None:
    model, inputs = RESNET.attached(), RESNET.arguments()
    each = model.look(example_losses, [inputs])
    mean = model.look(lambda model, batch: example_losses(model, batch).mean().expand(EXAMPLES), [inputs])
    assert [row.slot for row in each.rows] == [row.slot for row in mean.rows]
    for one, other in zip(each.rows, mean.rows, strict=True):
        assert one.promise == pytest.approx(other.promise, abs=1e-5)
    assert each.loss == pytest.approx(mean.loss)


@pytest.mark.parametrize("change", ["frozen", "compiled", "under no_grad", "under inference_mode", "twice the loss"])
def test_it_sees_the_same(change: str) -> None:
    host = HOSTS[0]
    expected = host.attached().look(example_losses, [host.arguments()])
    model, loss, inputs = host.attached(), example_losses, host.arguments()
    if change == "frozen":
        model.host.requires_grad_(False)
    if change == "compiled":
        model.compile(backend="eager")
        model(host.arguments())
    if change == "twice the loss":
        loss = lambda model, batch: 2 * example_losses(model, batch)  # noqa: E731
    with {"under no_grad": torch.no_grad(), "under inference_mode": torch.inference_mode()}.get(
        change, torch.enable_grad()
    ):
        looked = model.look(loss, [inputs])
    for one, other in zip(looked.rows, expected.rows, strict=True):
        assert (one.slot, one.blueprint) == (other.slot, other.blueprint)
        assert one.promise == pytest.approx(other.promise, abs=1e-5)


def test_low_precision_sees_much_the_same() -> None:
    host = HOSTS[0]
    expected = host.attached().look(example_losses, [host.arguments()])

    def under_autocast(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return example_losses(model, batch)

    looked = host.attached().look(under_autocast, [host.arguments()])
    with torch.autocast("cpu", torch.bfloat16):
        assert repr(host.attached().look(example_losses, [host.arguments()])) == repr(looked)
    for row in expected.rows:
        twin = next(one for one in looked.rows if (one.slot, one.blueprint) == (row.slot, row.blueprint))
        assert twin.promise == pytest.approx(row.promise, abs=ERROR)


def test_batches_are_taken_until_there_are_examples_enough() -> None:
    model, taken = RESNET.attached(), []

    def batches() -> Any:
        while True:
            taken.append(1)
            yield RESNET.arguments()

    looked = model.look(example_losses, batches(), examples=2 * EXAMPLES)
    assert len(taken) == 2
    assert looked.examples == 2 * EXAMPLES
    assert model.look(example_losses, [RESNET.arguments()], examples=99).examples == EXAMPLES


def test_a_taken_slot_is_looked_at_behind_its_seed() -> None:
    model = RESNET.grown_by_hand()
    looked = model.look(example_losses, [RESNET.arguments()])
    assert {row.slot: row.resident for row in looked.rows} == {
        "layer1": "conv3x3",
        "layer2.conv1": "norm",
        "layer2": "norm",
    }
    assert "layer1 (behind conv3x3)" in repr(looked)
    vacated = RESNET.attached().look(example_losses, [RESNET.arguments()])
    promises = [{(row.slot, row.blueprint): row.promise for row in one.rows} for one in (looked, vacated)]
    assert promises[0]["layer1", "gate"] != pytest.approx(promises[1]["layer1", "gate"], abs=1e-4)


# Where the answer is known.


def fit(model: nn.Module, inputs: Tensor, targets: Tensor, steps: int = 400) -> None:
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    for step in range(steps):
        part = slice(step * 64 % len(inputs), step * 64 % len(inputs) + 64)
        optimizer.zero_grad()
        squared_error(model, (inputs[part], targets[part])).mean().backward()
        optimizer.step()
        schedule.step()


def squared_error(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (model(batch[0]) - batch[1]).square().flatten(1).mean(1)


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def held_out(looked: Look) -> dict[tuple[str, str], float]:
    return {(row.slot, row.blueprint): row.promise_held_out for row in looked.rows}


def test_a_bottleneck_is_found() -> None:
    """Eight independent numbers are to come through, and two channels in the middle let two pass."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 2), nn.Linear(2, 16), nn.Linear(16, 8))
    inputs = drawn(1024, 8, seed=1)
    fit(net, inputs, inputs)
    model = esper.attach(net, {"0": ["mlp", "lowrank"], "2": ["mlp", "lowrank", "input_skip"]}, inputs[:4])
    fresh = drawn(512, 8, seed=2)
    looked = model.look(squared_error, [(fresh, fresh)], examples=512)
    assert (looked.rows[0].slot, looked.rows[0].blueprint) == ("2", "input_skip")
    promised = held_out(looked)
    assert promised.pop(("2", "input_skip")) > 0.6
    assert (
        max(value for (slot, _), value in promised.items() if slot == "2") < 2 * ERROR
    )  # nothing came through to them


class TokenWise(nn.Module):
    """Each token by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.inner, self.head = nn.Linear(4, 12), nn.Linear(12, 12), nn.Linear(12, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.inner(self.embed(tokens)).relu())


def test_a_network_that_cannot_mix_tokens_is_told_so() -> None:
    """Every token is to tell what its left neighbour is."""
    torch.manual_seed(0)
    inputs, net = drawn(1024, 6, 4, seed=1), TokenWise()
    fit(net, inputs, inputs.roll(1, 1))
    places = {"embed": ["mlp", "token_conv", "token_mix"]}
    model = esper.attach(net, places, inputs[:4], causal=False)
    fresh = drawn(256, 6, 4, seed=2)
    promised = held_out(model.look(squared_error, [(fresh, fresh.roll(1, 1))]))
    assert promised["embed", "token_conv"] > 0.2
    assert promised["embed", "mlp"] < 0.25 * promised["embed", "token_conv"]


def noisy_line() -> tuple[nn.Sequential, Tensor, Tensor]:
    """A network that has learned a line, and fresh examples: all that it does not tell is noise."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    inputs, fresh = drawn(8192, 8, seed=1), drawn(512, 8, seed=3)
    fit(net, inputs, inputs[:, :2] + drawn(8192, 2, seed=2), steps=1500)
    return net, fresh, fresh[:, :2] + drawn(512, 2, seed=4)


@pytest.mark.landing
def test_a_network_that_lacks_nothing_is_promised_nothing() -> None:
    net, inputs, targets = noisy_line()
    model = esper.attach(net, {"0": ["mlp", "lowrank", "norm"]}, inputs[:4])
    looked = model.look(squared_error, [(inputs[:128], targets[:128])])
    assert max(row.promise_held_out for row in looked.rows) < ERROR
    assert max(row.promise for row in looked.rows) > 0.1  # what fits noise
    assert model.look(squared_error, [(inputs, targets)], examples=512).rows[0].promise < looked.rows[0].promise


def test_a_layer_that_unlearned_all_is_told() -> None:
    net, inputs, targets = noisy_line()
    model = esper.attach(net, {"0": ["norm"]}, inputs[:4])
    needs = [model.look(squared_error, [(inputs, targets)], examples=512, layers=True).layers]
    nn.init.zeros_(net[1].weight)
    nn.init.zeros_(net[1].bias)
    needs.append(model.look(squared_error, [(inputs, targets)], examples=512, layers=True).layers)
    assert [[(one.layer, one.kind, one.parameters) for one in layers] for layers in needs] == [
        [("0", "Linear", 72), ("1", "Linear", 18)]
    ] * 2
    assert max(one.promise_held_out for one in needs[0]) < ERROR
    assert needs[1][1].promise_held_out > 0.2
    assert needs[1][0].promise == 0  # nothing reaches it through zeros


def test_a_layer_under_a_seed_is_asked_through_the_seed_too() -> None:
    host = HOSTS[0]
    model = host.grown_by_hand()
    taken = model.look(example_losses, [host.arguments()], layers=True).layers
    rows = []
    for loss in example_losses(model.eval(), host.arguments()):
        gradients = torch.autograd.grad(loss, list(model.host.get_submodule("0").parameters()), retain_graph=True)
        rows.append(torch.cat([each.flatten() for each in gradients]).double())
    assert taken[0].layer == "0"
    gram = torch.stack(rows) @ torch.stack(rows).mT
    assert taken[0].promise == pytest.approx(float(compute_promise(gram).fitted), abs=1e-3)


# What is shown.


def test_it_shows_a_table_and_a_map(tmp_path: Path) -> None:
    looked = RESNET.attached().look(example_losses, [RESNET.arguments()])
    lines = repr(looked).splitlines()
    assert lines[0].split() == [
        "slot",
        "blueprint",
        "promise",
        "held",
        "out",
        "error",
        "parameters",
        "FLOPs",
        "promise/1k",
    ]
    best = looked.rows[0]
    assert lines[1].split()[:2] == [best.slot, best.blueprint]
    assert f"{best.promise:.3f}" in lines[1]
    assert f"{best.promise / best.parameters * 1000:.3f}" in lines[1]
    assert lines[-1].startswith(f"{EXAMPLES} examples, mean loss ")
    looked.to_svg(tmp_path / "map.svg")
    drawing = "".join(ET.parse(tmp_path / "map.svg").getroot().itertext())
    for row in looked.rows:
        assert row.slot in drawing
        assert row.blueprint in drawing
        assert f"{row.promise_held_out:.2f}".lstrip("-") in drawing
    assert "<svg" in looked._repr_html_()
    assert best.slot in looked._repr_html_()


# What is refused.


def refused(loss: Callable[..., Any], batches: Any = None, model: GrowingModel | None = None) -> str:
    with pytest.raises(LookError) as error:
        (model or RESNET.attached()).look(loss, [RESNET.arguments()] if batches is None else batches)
    return str(error.value)


def test_losses_that_cannot_be_used_are_refused() -> None:
    assert "returned a float" in refused(lambda model, batch: 0.5)
    assert f"returned shape ({EXAMPLES}, 5) for a batch of {EXAMPLES}" in refused(lambda model, batch: model(batch))
    for reduce in (torch.sum, torch.mean):
        said = refused(lambda model, batch, reduce=reduce: reduce(example_losses(model, batch)))
        assert f"returned shape () for a batch of {EXAMPLES} examples: return [{EXAMPLES}]" in said
    assert "remove detach()" in refused(lambda model, batch: example_losses(model, batch).detach())
    assert "is not finite" in refused(lambda model, batch: example_losses(model, batch) / 0)
    assert "called no module with a slot" in refused(lambda model, batch: torch.ones((), requires_grad=True))
    assert "'layer1' did not run exactly once" in refused(
        lambda model, batch: example_losses(model, batch) + example_losses(model, batch)
    )
    assert "returned torch.complex64" in refused(lambda model, batch: example_losses(model, batch) * 1j)
    assert "held 0 examples" in refused(example_losses, [])
    assert "a batch is empty" in refused(example_losses, [RESNET.arguments()[:0]])


class Rounding(nn.Module):
    """What no vmap can take: a number of its input decides what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * self.scale * (1 if inputs.sum().item() < 1e9 else 2)


def test_a_layer_that_takes_no_example_by_itself_is_named() -> None:
    model = esper.attach(nn.Sequential(nn.Linear(4, 3), Rounding()), {"0": ["norm"]}, torch.zeros(2, 4))
    with pytest.raises(LookError, match=r"layer '1' \(Rounding\) cannot be differentiated example by example"):
        model.look(squared_error, [(drawn(8, 4, seed=1), torch.zeros(8, 3))], layers=True)


def test_a_refusal_leaves_no_hooks() -> None:
    model = RESNET.attached()
    hooks = [len(module._forward_hooks) for module in model.host.modules()]
    refused(lambda model, batch: 0.5, model=model)
    assert [len(module._forward_hooks) for module in model.host.modules()] == hooks
