"""New hidden units between two layers of a host: a parallel path that becomes part of the layers."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.flop_counter import FlopCounterMode

import esper
from esper.errors import ExportError, SlotError, UnknownBlueprintError
from esper.growth.blueprints.registry import get
from esper.growth.blueprints.units import Units
from esper.growth.model import GrowingModel
from esper.growth.promise import compute_promise
from esper.lifecycle.actions import Blend
from esper.numerics.random_streams import module_generator
from growth.growing import generator, random


class Functional(nn.Module):
    """Functions in place of modules, and a residual path around them."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(5, 9), nn.Linear(9, 5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(F.dropout(F.gelu(self.fc1(x), approximate="tanh"), 0.1, self.training))


class Gated(nn.Module):
    """``down(silu(gate(x)) * up(x))``, with a function."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(5, 9, bias=False), nn.Linear(5, 9, bias=False), nn.Linear(9, 5)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.dropout(F.silu(self.gate(x)) * self.up(x)))


class Block(nn.Module):
    """He et al. 2016."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(8), nn.BatchNorm2d(8)
        self.shortcut = nn.Conv2d(3, 8, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm1(self.conv1(x)).relu_()
        return (self.shortcut(x) + self.norm2(self.conv2(hidden))).relu()


Case = tuple[Callable[[], nn.Module], Any, Tensor]
CASES: dict[str, Case] = {
    "linear": (lambda: nn.Sequential(nn.Linear(5, 9), nn.ReLU(), nn.Linear(9, 3)), ("0", "2"), random(4, 5)),
    "no bias": (
        lambda: nn.Sequential(nn.Linear(5, 9, bias=False), nn.Tanh(), nn.Linear(9, 3, bias=False)),
        ("0", "2"),
        random(4, 5),
    ),
    "nothing between": (lambda: nn.Sequential(nn.Linear(5, 9), nn.Linear(9, 3)), ("0", "1"), random(4, 5)),
    "dropout": (
        lambda: nn.Sequential(nn.Linear(5, 9), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(9, 3)),
        ("0", "3"),
        random(4, 5),
    ),
    "tokens": (lambda: nn.Sequential(nn.Linear(5, 9), nn.GELU(), nn.Linear(9, 3)), ("0", "2"), random(4, 6, 5)),
    "functions": (Functional, ("fc1", "fc2"), random(4, 5)),
    "gated": (Gated, ("gate", "up", "down"), random(4, 7, 5)),
    "norm": (
        lambda: nn.Sequential(nn.Linear(5, 9), nn.BatchNorm1d(9), nn.SiLU(), nn.Linear(9, 3)),
        ("0", "3"),
        random(4, 5),
    ),
    "signals": (
        lambda: nn.Sequential(nn.Conv1d(2, 6, 5, stride=2, dilation=2), nn.ReLU(), nn.Conv1d(6, 3, 3, padding="same")),
        ("0", "2"),
        random(4, 2, 30),
    ),
    "images": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3, 2, 1, padding_mode="circular"),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 4, (3, 1), padding=(1, 0)),
        ),
        ("0", "4"),
        random(4, 3, 12, 12),
    ),
    "images to features": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)),
        ("0", "4"),
        random(4, 3, 8, 8),
    ),
    "block": (Block, ("conv1", "conv2"), random(4, 3, 8, 8)),
    "encoder layer": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
        ("linear1", "linear2"),
        random(4, 6, 8),
    ),
}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def attached(case: Case, blueprint: str = "units_4", **options: Any) -> GrowingModel:
    make, place, x = case
    torch.manual_seed(0)
    return esper.attach(make().double(), {place: [blueprint]}, x[:2].double(), **options)


def slot_of(model: GrowingModel) -> str:
    (name,) = model.slots
    return name


def grow(model: GrowingModel, alpha: float = 0.7) -> Units:
    """As after much training."""
    slot = model.slots[slot_of(model)]
    units = slot.germinate(slot.blueprints[0], generator(2), alpha=alpha).blueprint
    assert isinstance(units, Units)
    for parameter in units.parameters():
        nn.init.normal_(parameter, std=0.5, generator=generator(3))
    return units


def merged(model: GrowingModel) -> nn.Module:
    model.slots[slot_of(model)].fossilize()
    return model.finalize()


@every_case
def test_new_units_do_nothing_and_learn_at_once(case: Case) -> None:
    model, x = attached(case), case[2].double()
    model.eval()
    before = model(x)
    units = model.slots[slot_of(model)].germinate("units_4", generator(), alpha=1.0).blueprint
    assert torch.equal(model(x), before)
    model(x).square().sum().backward()
    for name, parameter in units.named_parameters():
        assert bool((parameter.grad != 0).any()) == name.startswith("last")


@every_case
def test_the_wider_model_is_the_growing_one(case: Case) -> None:
    model, x = attached(case), case[2].double()
    grow(model)
    model.train()
    for _ in range(3):  # with running statistics of their own
        model(x)
    model.eval()
    plain = merged(model).eval()
    torch.testing.assert_close(plain(x), model(x), rtol=1e-12, atol=1e-12)
    assert plain.state_dict().keys() == model.host.state_dict().keys()
    assert [type(part) for part in plain.modules()] == [type(part) for part in model.host.modules()]


@every_case
def test_what_they_cost_is_what_they_have(case: Case) -> None:
    model, x = attached(case).eval(), case[2].double()
    units, site = grow(model), model.slots[slot_of(model)].site
    assert sum(parameter.numel() for parameter in units.parameters()) == Units.parameters_at(site) * 4 // (
        Units.count_units(site)
    )
    with FlopCounterMode(display=False) as without, model.without_growth():
        model(x)
    with FlopCounterMode(display=False) as counter:
        model(x)
    added = counter.get_total_flops() - without.get_total_flops()
    assert len(x) * type(units).flops_at(site) == added > 0
    plain = merged(model)
    more = sum(p.numel() for p in plain.parameters()) - sum(p.numel() for p in model.host.parameters())
    assert more == type(units).parameters_at(site) == model.summary().parameters


@every_case
def test_they_come_back_from_files_copies_and_pickles(case: Case, tmp_path: Path) -> None:
    model, x = attached(case).eval(), case[2].double()
    units = grow(model)
    units.kept[1] = False
    esper.save(model, tmp_path)
    loaded = esper.load(tmp_path, case[0]().double(), x[:2])
    for other in (loaded, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other.eval()(x), model(x))
        assert type(other.seeds[slot_of(model)].blueprint) is type(units)


def test_the_contract() -> None:
    x = random(6, 5)
    model = esper.attach(nn.Sequential(nn.Linear(5, 9), nn.ReLU(), nn.Linear(9, 3)), {("0", "2"): ["units_8"]}, x)
    grow(model, alpha=1.0)
    plain = merged(model)
    assert (plain[0].out_features, plain[2].in_features, len(plain)) == (17, 17, 3)
    torch.testing.assert_close(plain(x), model(x), rtol=0, atol=1e-5)


def test_units_are_an_eighth_of_those_that_there_are() -> None:
    for width, units in ((4, 1), (9, 1), (64, 8)):
        net = nn.Sequential(nn.Linear(5, width), nn.ReLU(), nn.Linear(width, 3))
        model = esper.attach(net, {("0", "2"): ["units"]}, random(2, 5))
        assert Units.count_units(model.slots["2"].site) == units


def test_any_number_of_units_has_a_name() -> None:
    assert get("units_37") is get("units_37")
    assert get("units_37").name == "units_37"
    for name in ("units_0", "units_x", "units_-1"):
        with pytest.raises(UnknownBlueprintError, match="units"):
            get(name)


def test_pruned_units_have_no_effect_and_are_not_merged() -> None:
    model, x = attached(CASES["norm"]).eval(), CASES["norm"][2].double()
    units = grow(model)
    before = model(x)
    units.kept[[0, 2]] = False
    assert not torch.equal(model(x), before)
    plain = merged(model).eval()
    assert plain[0].out_features == plain[1].num_features == plain[3].in_features == 11
    torch.testing.assert_close(plain(x), model(x), rtol=1e-12, atol=1e-12)


def test_units_grow_on_both_sides_of_a_layer() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    x = random(4, 5).double()
    model = esper.attach(net, {("0", "2"): ["units_4"], ("2", "4"): ["units_3"]}, x)
    for name, slot in model.slots.items():
        units = slot.germinate(slot.blueprints[0], generator(int(name)), alpha=0.6).blueprint
        for parameter in units.parameters():
            nn.init.normal_(parameter)
        slot.fossilize()
    plain = model.finalize()
    torch.testing.assert_close(plain(x), model(x), rtol=1e-12, atol=1e-12)
    assert [plain[place].weight.shape for place in (0, 2, 4)] == [(11, 5), (9, 11), (3, 9)]


def test_other_modules_may_grow_in_the_same_slot() -> None:
    net = nn.Sequential(nn.Linear(5, 9), nn.ReLU(), nn.Linear(9, 3))
    model = esper.attach(net, {("0", "2"): ["units_4", "lora_2", "mlp"]}, random(2, 5))
    for name in ("mlp", "lora_2", "units_4"):
        model.slots["2"].germinate(name, alpha=1.0)
        model(random(4, 5))
        model.slots["2"].prune()


@pytest.mark.parametrize(
    "place", [("0", "mlp"), ("1", "norm"), ("0", "input_skip"), ("0", "block_copy"), ("0", "lora_2")]
)
def test_what_else_grew_on_the_former_units_is_merged_or_refused(place: tuple[str, str]) -> None:
    name, blueprint = place
    net = nn.Sequential(nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 3))
    model = esper.attach(net, {("0", "2"): ["units_4"], name: [blueprint]}, random(4, 5)).eval()
    for slot in model.slots.values():
        seed = slot.germinate(slot.blueprints[0], generator(1), alpha=0.5)
        for parameter in seed.parameters():
            nn.init.normal_(parameter, std=0.3)
        slot.fossilize()
    if blueprint == "lora_2":
        torch.testing.assert_close(model.finalize()(random(3, 5)), model(random(3, 5)))
        return
    with pytest.raises(ExportError, match="what grew between their layers, depends on"):
        model.finalize()


def test_a_wider_model_grows_again() -> None:
    model, x = attached(CASES["linear"]), CASES["linear"][2].double()
    grow(model)
    again = esper.attach(merged(model), {("0", "2"): ["units_4"]}, x)
    grow(again)
    plain = merged(again)
    assert plain[0].out_features == 17
    torch.testing.assert_close(plain(x), again(x), rtol=1e-12, atol=1e-12)


def test_frozen_layers_stay_and_new_units_learn() -> None:
    model, x = attached(CASES["norm"], freeze_host=True), CASES["norm"][2].double()
    units = grow(model)
    before = copy.deepcopy(model.host.state_dict())
    optimizer = torch.optim.AdamW(model.parameter_groups(lr=0.1))
    model.link(optimizer)
    first = copy.deepcopy(units.state_dict())
    model.train()
    for _ in range(2):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
    assert all(torch.equal(before[name], value) for name, value in model.host.state_dict().items())
    assert all(not torch.equal(first[name], value) for name, value in units.state_dict().items() if name != "kept")
    plain = merged(model.eval()).eval()
    torch.testing.assert_close(plain(x), model(x), rtol=1e-12, atol=1e-12)
    assert torch.equal(plain[0].weight[:9], model.host[0].weight)
    assert all(parameter.requires_grad for parameter in plain.parameters())


def test_moments_of_the_host_survive() -> None:
    model, x = attached(CASES["linear"]), CASES["linear"][2].double()
    optimizer = torch.optim.AdamW(model.parameter_groups(lr=0.1))
    model.link(optimizer)
    model(x).square().sum().backward()
    optimizer.step()
    before = {parameter: state["exp_avg"].clone() for parameter, state in optimizer.state.items()}
    grow(model)
    assert all(torch.equal(optimizer.state[parameter]["exp_avg"], value) for parameter, value in before.items())


def test_only_what_is_added_has_a_blend() -> None:
    model = attached(CASES["linear"])
    with pytest.raises(SlotError, match="only adds"):
        model.slots["2"].germinate("units_4", blend=Blend.GATE)


def test_a_weight_that_is_computed_by_now_is_refused() -> None:
    model = attached(CASES["linear"])
    grow(model)
    parametrizations.weight_norm(model.host[0])
    with pytest.raises(ExportError, match="'0' is now computed from other tensors"):
        merged(model)


def test_code_that_goes_by_the_number_of_units_is_refused() -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1, self.act, self.fc2 = nn.Linear(5, 9), nn.ReLU(), nn.Linear(9, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc2(self.act(self.fc1(x)).view(len(x), 9))

    model = esper.attach(Fixed(), {("fc1", "fc2"): ["units_4"]}, random(4, 5))
    grow(model)
    with pytest.raises(ExportError, match="depends on the original number of units"):
        merged(model)


def test_a_replaced_first_layer_is_noticed() -> None:
    model = attached(CASES["linear"])
    grow(model)
    model.host[0] = nn.Linear(5, 9).double()
    with pytest.raises(SlotError, match="'0' was replaced"):
        model.finalize()


def test_without_growth_the_host_computes_as_before_and_hooks_go_with_the_slots() -> None:
    case = CASES["encoder layer"]
    torch.manual_seed(0)
    host, x = case[0]().double().eval(), case[2].double()
    with torch.no_grad():
        before = host(x)
        model = esper.attach(host, {case[1]: ["units_4"]}, x[:2])
        grow(model)
        assert not torch.equal(model(x), before)
        with model.without_growth():
            assert torch.equal(model(x), before)
            assert not (host.linear1._forward_pre_hooks)
            assert not (host.linear2._forward_hooks)
        assert not torch.equal(model(x), before)
    model.release()
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in host.modules())


def test_a_part_of_the_host_that_was_called_alone_is_named() -> None:
    model = attached(CASES["linear"])
    grow(model)
    with pytest.raises(SlotError, match="without those that make its hidden units"):
        model.host[2](random(4, 9).double())


def test_copies_do_not_keep_the_input_of_a_layer_that_was_called_alone() -> None:
    model = attached(CASES["linear"])
    model.host[0](random(4, 5).double().requires_grad_() * 2)
    source = copy.deepcopy(model).slots["2"].source
    assert source is not None
    assert source.inputs is None


@pytest.mark.parametrize("case", ["linear", "gated", "norm", "images to features"])
def test_looking_promises_what_planted_units_do(case: str) -> None:
    """Against K by planting them at full weight, and differentiating the loss of each example."""
    model, count = attached(CASES[case]), 12
    x = random(count, *CASES[case][2].shape[1:]).double()
    labels = torch.arange(count) % 3

    def losses(model: nn.Module, batch: Tensor) -> Tensor:
        logits = model(batch)
        return F.cross_entropy(logits if logits.dim() == 2 else logits.mean(1), labels, reduction="none")

    (row,) = model.look(losses, [x], draws=1).rows
    slot = model.slots[slot_of(model)]
    seed = slot.germinate("units_4", module_generator(0, 0, 0), alpha=1.0)
    assert row.parameters == seed.parameter_count
    rows: list[Tensor] = []
    for loss in losses(model.eval(), x):
        gradients = torch.autograd.grad(loss, list(seed.parameters()), retain_graph=True)
        rows.append(torch.cat([gradient.flatten() for gradient in gradients]))
    stacked = torch.stack(rows)
    assert row.promise == pytest.approx(float(compute_promise(stacked @ stacked.mT)), abs=1e-6)


def test_checkpointed_layers_are_computed_again() -> None:
    from torch.utils.checkpoint import checkpoint  # noqa: PLC0415

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(5, 9), nn.ReLU(), nn.Linear(9, 3))
            self.checkpointed = False

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=False) if self.checkpointed else self.inner(x)

    model, x = esper.attach(Checkpointed(), {("inner.0", "inner.2"): ["units_4"]}, random(4, 5)), random(4, 5)
    grow(model)
    gradients: list[Mapping[str, Tensor]] = []
    for checkpointed in (False, True):
        model.host.checkpointed = checkpointed
        model.zero_grad()
        (model(x).square().sum() + model(2 * x).sum()).backward()
        gradients.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient)
