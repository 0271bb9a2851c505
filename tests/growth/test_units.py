"""New hidden units between two layers of a host: a parallel path that becomes part of the layers."""

import copy
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize
from torch.utils.flop_counter import FlopCounterMode

import esper
import tiny_transformers
from esper.errors import ExportError, SlotError, UnknownBlueprintError
from esper.growth.blueprints.registry import get
from esper.growth.blueprints.units import Units
from esper.growth.model import GrowingModel
from esper.growth.promise import compute_promise
from esper.numerics.random_streams import module_generator
from factories import draw_normal, generator
from growth.padded_hosts import TorchEncoder


class Block(nn.Module):
    """A residual path around two convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.act, self.norm = nn.ReLU(inplace=True), nn.BatchNorm2d(8)
        self.shortcut = nn.Conv2d(3, 8, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        return (self.shortcut(x) + self.norm(self.conv2(self.act(self.conv1(x))))).relu()


Case = tuple[Callable[[], nn.Module], Any, Tensor]
CASES: dict[str, Case] = {
    "linear": (lambda: nn.Sequential(nn.Linear(5, 9), nn.ReLU(), nn.Linear(9, 3)), ("0", "1", "2"), draw_normal(4, 5)),
    "no bias": (
        lambda: nn.Sequential(nn.Linear(5, 9, bias=False), nn.Tanh(), nn.Linear(9, 3, bias=False)),
        ("0", "1", "2"),
        draw_normal(4, 5),
    ),
    "nothing between": (lambda: nn.Sequential(nn.Linear(5, 9), nn.Linear(9, 3)), ("0", "1"), draw_normal(4, 5)),
    "one unit": (
        lambda: nn.Sequential(nn.Linear(5, 1), nn.GELU(), nn.Linear(1, 3)),
        ("0", "1", "2"),
        draw_normal(4, 5),
    ),
    "dropout": (
        lambda: nn.Sequential(nn.Linear(5, 9), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(9, 3)),
        ("0", "1", "2", "3"),
        draw_normal(4, 5),
    ),
    "a container between": (
        lambda: nn.Sequential(nn.Linear(5, 9), nn.Sequential(nn.SiLU(), nn.Dropout()), nn.Linear(9, 3)),
        ("0", "1", "2"),
        draw_normal(4, 5),
    ),
    "tokens": (
        lambda: nn.Sequential(nn.Linear(5, 9), nn.GELU(), nn.Linear(9, 3)),
        ("0", "1", "2"),
        draw_normal(4, 6, 5),
    ),
    "signals": (
        lambda: nn.Sequential(nn.Conv1d(2, 6, 5, stride=2, dilation=2), nn.ReLU(), nn.Conv1d(6, 3, 3, padding="same")),
        ("0", "1", "2"),
        draw_normal(4, 2, 30),
    ),
    "images": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3, 2, 1, padding_mode="circular"),
            nn.ReLU(inplace=True),
            nn.Dropout2d(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 4, (3, 1), padding=(1, 0)),
        ),
        ("0", "1", "2", "3", "4"),
        draw_normal(4, 3, 12, 12),
    ),
    "images to features": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)),
        ("0", "1", "2", "3", "4"),
        draw_normal(4, 3, 8, 8),
    ),
    "block": (Block, ("conv1", "act", "conv2"), draw_normal(4, 3, 8, 8)),
    "encoder layer": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, activation=nn.ReLU()),
        ("linear1", "activation", "dropout", "linear2"),
        draw_normal(4, 6, 8),
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
    for _ in range(3):
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
    assert sum(parameter.numel() for parameter in units.parameters()) == Units.cost_at(site).parameters * 4 // (
        Units.count_units(site)
    )
    with FlopCounterMode(display=False) as without, model.without_growth():
        model(x)
    with FlopCounterMode(display=False) as counter:
        model(x)
    added = counter.get_total_flops() - without.get_total_flops()
    assert len(x) * type(units).cost_at(site).flops == added > 0
    plain = merged(model)
    more = sum(p.numel() for p in plain.parameters()) - sum(p.numel() for p in model.host.parameters())
    assert more == type(units).cost_at(site).parameters == model.summary().parameters


@every_case
def test_they_come_back_from_files_copies_and_pickles(case: Case, tmp_path: Path) -> None:
    model, x = attached(case).eval(), case[2].double()
    units = grow(model)
    esper.save(model, tmp_path)
    loaded = esper.load(tmp_path, case[0]().double(), x[:2])
    for other in (loaded, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other.eval()(x), model(x))
        assert type(other.seeds[slot_of(model)].blueprint) is type(units)


def test_units_are_an_eighth_of_those_that_there_are() -> None:
    for width, units in ((4, 1), (9, 1), (64, 8)):
        net = nn.Sequential(nn.Linear(5, width), nn.ReLU(), nn.Linear(width, 3))
        model = esper.attach(net, {("0", "1", "2"): ["units"]}, draw_normal(2, 5))
        assert Units.count_units(model.slots["2"].site) == units


def test_any_number_of_units_has_a_name() -> None:
    assert get("units_37") is get("units_37")
    assert get("units_37").name == "units_37"
    for name in ("units_0", "units_x", "units_-1"):
        with pytest.raises(UnknownBlueprintError, match="units"):
            get(name)


def test_units_grow_on_both_sides_of_a_layer() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    x = draw_normal(4, 5).double()
    model = esper.attach(net, {("0", "1", "2"): ["units_4"], ("2", "3", "4"): ["units_3"]}, x)
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
    model = esper.attach(net, {("0", "1", "2"): ["units_4", "lora_2", "mlp"]}, draw_normal(2, 5))
    for name in ("mlp", "lora_2", "units_4"):
        model.slots["2"].germinate(name, alpha=1.0)
        model(draw_normal(4, 5))
        model.slots["2"].prune()


@pytest.mark.parametrize("offer", [["mlp"], ["lora_2", "norm"], ["block_copy"], "auto"], ids=str)
@pytest.mark.parametrize("name", ["0", "1"])
def test_what_cannot_be_merged_with_units_is_refused_where_they_grow(name: str, offer: list[str] | str) -> None:
    net = nn.Sequential(nn.Linear(5, 9), nn.ReLU(), nn.Linear(9, 3))
    with pytest.raises(SlotError, match=rf"units may grow at '{name}', where finalize can merge no more than lora_K"):
        esper.attach(net, {("0", "1", "2"): ["units_4"], name: offer}, draw_normal(4, 5))


def test_an_update_of_the_layer_that_makes_units_is_merged_with_them() -> None:
    net = nn.Sequential(nn.Linear(5, 9), nn.ReLU(), nn.Linear(9, 3))
    model = esper.attach(net, {("0", "1", "2"): ["units_4"], "0": ["lora_2"]}, draw_normal(4, 5)).eval()
    for slot in model.slots.values():
        seed = slot.germinate(slot.blueprints[0], generator(1), alpha=0.5)
        for parameter in seed.parameters():
            nn.init.normal_(parameter, std=0.3)
        slot.fossilize()
    torch.testing.assert_close(model.finalize()(draw_normal(3, 5)), model(draw_normal(3, 5)))


def test_a_wider_model_grows_again() -> None:
    model, x = attached(CASES["linear"]), CASES["linear"][2].double()
    grow(model)
    again = esper.attach(merged(model), {("0", "1", "2"): ["units_4"]}, x)
    grow(again)
    plain = merged(again)
    assert plain[0].out_features == 17
    torch.testing.assert_close(plain(x), again(x), rtol=1e-12, atol=1e-12)


def test_frozen_layers_stay_and_new_units_learn() -> None:
    model, x = attached(CASES["dropout"], freeze_host=True), CASES["dropout"][2].double()
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
    assert all(not torch.equal(first[name], value) for name, value in units.state_dict().items())
    plain = merged(model.eval()).eval()
    torch.testing.assert_close(plain(x), model(x), rtol=1e-12, atol=1e-12)
    assert torch.equal(plain[0].weight[:9], model.host[0].weight)
    assert all(parameter.requires_grad for parameter in plain.parameters())


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

    model = esper.attach(Fixed(), {("fc1", "act", "fc2"): ["units_4"]}, draw_normal(4, 5))
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
        assert not torch.equal(model(x), before)
    model.release()
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in host.modules())


def test_a_part_of_the_host_that_was_called_alone_is_named() -> None:
    model = attached(CASES["linear"])
    grow(model)
    with pytest.raises(SlotError, match="reads the input of the network or of a layer, which has not been called"):
        model.host[2](draw_normal(4, 9).double())


def test_copies_do_not_keep_the_input_of_a_layer_that_was_called_alone() -> None:
    model = attached(CASES["linear"])
    model.host[0](draw_normal(4, 5).double().requires_grad_() * 2)
    source = copy.deepcopy(model).slots["2"].source
    assert source.inputs is None


@pytest.mark.parametrize("case", ["linear", "dropout", "signals", "images to features"])
def test_looking_promises_what_planted_units_do(case: str) -> None:
    """Against K by planting them at full weight, and differentiating the loss of each example."""
    model, count = attached(CASES[case]), 12
    x = draw_normal(count, *CASES[case][2].shape[1:]).double()
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
    assert row.promise == pytest.approx(float(compute_promise(stacked @ stacked.mT).fitted), abs=1e-6)


def test_checkpointed_layers_are_computed_again() -> None:
    from torch.utils.checkpoint import checkpoint  # noqa: PLC0415

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(5, 9), nn.ReLU(), nn.Linear(9, 3))
            self.checkpointed = False

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=False) if self.checkpointed else self.inner(x)

    model, x = (
        esper.attach(Checkpointed(), {("inner.0", "inner.1", "inner.2"): ["units_4"]}, draw_normal(4, 5)),
        draw_normal(4, 5),
    )
    grow(model)
    gradients: list[Mapping[str, Tensor]] = []
    for checkpointed in (False, True):
        model.host.checkpointed = checkpointed
        model.zero_grad()
        (model(x).square().sum() + model(2 * x).sum()).backward()
        gradients.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient)


# Where no units can be added ------------------------------------------------------------------------------------------


class Between(nn.Module):
    """``fc2(function(act(fc1(x))))``."""

    def __init__(self, act: nn.Module, function: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(5, 8), act, nn.Linear(8, 3)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.function(self.act(self.fc1(x))))


class Mixing(nn.Module):
    """A module without state that makes something of all units."""

    def __init__(self, mix: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.mix = mix

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x)


class Gated(Between):
    """``fc2(act(fc1(x)) * up(x))``."""

    def __init__(self) -> None:
        super().__init__(nn.SiLU())
        self.up = nn.Linear(5, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)) * self.up(x))


class ReadTwice(Between):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.act(self.fc1(x))
        return self.fc2(hidden) + hidden.mean(-1, keepdim=True)


class CalledTwice(Between):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + super().forward(2 * x)


class ChangedBefore(Between):
    def forward(self, x: Tensor) -> Tensor:
        features = x.clone()
        hidden = self.act(self.fc1(features))
        features.relu_()
        return self.fc2(hidden)


class Tripled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return 3 * super().forward(input)


def changed(change: Callable[[Any], Any]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        net = Between(nn.ReLU())
        change(net)
        return net

    return make


NAMED: Any = ("fc1", "act", "fc2")
REFUSED: dict[str, tuple[Callable[[], nn.Module], Any, str]] = {
    "batch norm": (lambda: Between(nn.BatchNorm1d(8)), NAMED, r"'act' \(BatchNorm1d\) has parameters or buffers"),
    "batch norm without weights": (
        lambda: Between(nn.BatchNorm1d(8, affine=False)),
        NAMED,
        r"'act' \(BatchNorm1d\) has parameters or buffers",
    ),
    "layer norm": (lambda: Between(nn.LayerNorm(8)), NAMED, "has parameters or buffers.*let another blueprint"),
    "slopes of units": (lambda: Between(nn.PReLU(8)), NAMED, r"'act' \(PReLU\) has parameters"),
    "layer norm without weights": (
        lambda: Between(nn.LayerNorm(8, elementwise_affine=False)),
        NAMED,
        r"'act' \(LayerNorm\) is named between.*units are mixed",
    ),
    "softmax": (
        lambda: Between(nn.Softmax(-1)),
        NAMED,
        r"'act' \(Softmax\) is named between.*units are mixed",
    ),
    "halves": (lambda: Between(nn.Sequential(nn.Unflatten(1, (2, 4)), nn.Flatten())), NAMED, "are mixed"),
    "sums": (
        lambda: Between(Mixing(lambda x: x.cumsum(-1))),
        NAMED,
        r"'act' \(Mixing\) is named between.*units are mixed",
    ),
    "sums from behind": (lambda: Between(Mixing(lambda x: x.flip(-1).cumsum(-1).flip(-1))), NAMED, "are mixed"),
    "reversed": (lambda: Between(Mixing(lambda x: x.flip(-1))), NAMED, "are mixed"),
    "of the first": (lambda: Between(Mixing(lambda x: x * x[:, :1])), NAMED, "are mixed"),
    "of its place": (lambda: Between(Mixing(lambda x: x * torch.arange(x.shape[-1]))), NAMED, "are mixed"),
    "the middle": (lambda: Between(Mixing(lambda x: x * x[:, [x.shape[1] // 2]])), NAMED, "are mixed"),
    "the last": (lambda: Between(Mixing(lambda x: x * x[:, -1:])), NAMED, "are mixed"),
    "pairs": (
        lambda: Between(Mixing(lambda x: x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2))),
        NAMED,
        "are mixed",
    ),
    "no tensor": (
        lambda: Between(Mixing(lambda x: (x, x)), lambda both: both[0]),
        NAMED,
        r"'act' \(Mixing\) is named between.*units are mixed",
    ),
    "no such module": (lambda: Between(nn.ReLU()), ("fc1", "act2", "fc2"), "no submodule 'act2'"),
    "gated": (
        Gated,
        NAMED,
        "layers are multiplied, .*let another blueprint, such as 'mlp', grow",
    ),
    "gated, all named": (Gated, ("fc1", "act", "up", "fc2"), r"'up' \(Linear\) has parameters or buffers"),
    "gated, in the former way": (Gated, ("fc1", "up", "fc2"), r"'up' \(Linear\) has parameters or buffers"),
    "function": (lambda: Between(nn.ReLU(), F.gelu), NAMED, r"F.relu, a module that is called, such as nn.ReLU\(\)"),
    "clamped far from zero": (lambda: Between(nn.ReLU(), lambda x: x.clamp(max=20)), NAMED, "more lies there"),
    "flat near zero": (lambda: Between(nn.Tanh(), lambda x: F.hardshrink(x, 0.05)), NAMED, "more lies there"),
    "former form": (lambda: Between(nn.ReLU()), ("fc1", "fc2"), "nothing is named between them, and more lies there"),
    "wrong order": (
        lambda: nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Softplus(), nn.Linear(8, 3)),
        ("0", "2", "1", "3"),
        "name all modules in the order of their calls",
    ),
    "read twice": (lambda: ReadTwice(nn.ReLU()), NAMED, "used elsewhere"),
    "in other order": (
        lambda: nn.Sequential(nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 5)),
        ("2", "1", "0"),
        "have to be called once each in a forward pass, in this order",
    ),
    "called twice": (lambda: CalledTwice(nn.ReLU()), NAMED, "called once each|changed in place"),
    "input changed": (lambda: ChangedBefore(nn.ReLU()), NAMED, "input of the first layer is changed in place"),
    "hooked": (
        changed(lambda net: net.fc1.register_forward_hook(lambda *_: 2 * _[-1])),
        NAMED,
        r"a hook on 'fc1' \(Linear\)",
    ),
    "hooked behind": (
        changed(lambda net: net.fc2.register_forward_hook(lambda *_: 2 * _[-1])),
        NAMED,
        r"a hook on 'fc2' \(Linear\)",
    ),
    "weight norm": (
        changed(lambda net: parametrizations.weight_norm(net.fc2)),
        NAMED,
        r"'fc2' \(ParametrizedLinear\) is not a plain",
    ),
    "computed bias": (
        changed(lambda net: parametrize.register_parametrization(net.fc1, "bias", nn.Softplus())),
        NAMED,
        r"'fc1' \(ParametrizedLinear\) is not a plain",
    ),
    "own forward": (
        changed(lambda net: setattr(net, "fc2", Tripled(8, 3))),
        NAMED,
        r"'fc2' \(Tripled\) is not a plain",
    ),
    "groups": (
        lambda: nn.Sequential(nn.Conv1d(5, 10, 1, groups=5), nn.ReLU(), nn.Conv1d(10, 3, 1)),
        ("0", "1", "2"),
        r"'0' \(Conv1d\) is not a plain",
    ),
    "channels elsewhere": (
        lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Conv1d(5, 3, 1)),
        ("0", "1", "2"),
        "channels last",
    ),
    "channels become positions": (
        lambda: nn.Sequential(nn.Linear(6, 8), Mixing(lambda x: x.mT), nn.Conv1d(8, 3, 1)),
        ("0", "1", "2"),
        "channels last",
    ),
    "positions become channels": (
        lambda: nn.Sequential(nn.Conv1d(5, 8, 1), nn.Flatten(), nn.Linear(48, 3)),
        ("0", "1", "2"),
        r"'1' \(Flatten\) is named between.*units are mixed",
    ),
    "a named submodule": (lambda: Between(nn.ReLU()), "fc2", "units grow between two layers, and 'fc2' names one"),
    "a pattern": (lambda: Between(nn.ReLU()), "re:fc.", "name the first layer, the modules between in the order"),
    "no layers": (lambda: Between(nn.ReLU()), (), "give a list of submodules' names"),
    "one layer": (lambda: Between(nn.ReLU()), ("fc1",), "give a list of submodules' names"),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED.keys())
def test_where_units_cannot_be_added_says_what_to_do(case: tuple[Callable[[], nn.Module], Any, str]) -> None:
    net, place, message = case[0](), case[1], case[2]
    x = draw_normal(4, 5, 6) if isinstance(net, nn.Sequential) and "Conv1d" in repr(net) else draw_normal(4, 5)
    with pytest.raises(SlotError, match=message):
        esper.attach(net, {place: ["units_2"]}, x)
    assert not any(part._forward_pre_hooks for part in net.modules())


def test_layers_before_and_behind_a_pool_over_positions_get_units():
    host = nn.Sequential(nn.Linear(6, 8), Mixing(lambda x: x.mean(1)), nn.Linear(8, 3))
    model = esper.attach(host, {("0", "1", "2"): ["units_4"]}, torch.randn(4, 5, 6, generator=generator()))
    assert model.slots["2"].blueprints


def test_padding_in_the_example_input_is_refused() -> None:
    host, padding = TorchEncoder(nested=True).eval(), torch.zeros(3, 6, dtype=torch.bool)
    padding[1, 4:] = True
    place: Any = tuple(f"encoder.layers.0.{name}" for name in ("linear1", "dropout", "linear2"))
    with pytest.raises(SlotError, match="leave padding out of the example input"), torch.no_grad():
        esper.attach(host, {place: ["units_3"]}, (draw_normal(3, 6, 16), padding))


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ({("0", "1", "2"): "auto"}, "no blueprint for units is given .*: name one, such as 'units_8'"),
        ({("0", "1", "2"): ["mlp"]}, "no blueprint for units is given"),
        ({("0", "1", "2"): ["units"], "2": ["mlp"]}, "which already has a slot"),
    ],
)
def test_places_of_other_blueprints_are_refused(places: Any, message: str) -> None:
    with pytest.raises(SlotError, match=message):
        esper.attach(CASES["linear"][0](), places, draw_normal(4, 5))


def test_finding_the_units_leaves_the_host_as_it_was() -> None:
    net = nn.Sequential(nn.Linear(5, 8), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(8, 3)).train()
    net[2].eval()
    before, state = copy.deepcopy(net.state_dict()), torch.get_rng_state()
    esper.attach(net, {("0", "1", "2", "3"): ["units"]}, draw_normal(4, 5)).release()
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    assert [part.training for part in net] == [True, True, False, True]
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in net.modules())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_hosts_of_any_precision_are_compared(dtype: torch.dtype) -> None:
    net = nn.Sequential(nn.Linear(5, 64), nn.GELU("tanh"), nn.Hardtanh(-50, 50), nn.Linear(64, 3)).to(dtype)
    assert esper.attach(net, {("0", "1", "2", "3"): ["units_2"]}, draw_normal(4, 5).to(dtype)).slots["3"].site.hidden


TRANSFORMERS: dict[str, tuple[Callable[..., nn.Module], str, tuple[str, ...]]] = {
    "bert": (
        tiny_transformers.bert,
        "bert.encoder.layer.0",
        ("intermediate.dense", "intermediate.intermediate_act_fn", "output.dense"),
    ),
    "gpt_neox": (tiny_transformers.gpt_neox, "gpt_neox.layers.0.mlp", ("dense_h_to_4h", "act", "dense_4h_to_h")),
}


@pytest.mark.landing
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_a_wider_transformer_is_not_saved_by_its_configuration(name: str, tmp_path: Path) -> None:
    """Which has the former number of units."""
    make, path, names = TRANSFORMERS[name]
    x = torch.randint(0, 9, (2, 6), generator=generator(0))
    model = esper.attach(make().double().eval(), {tuple(f"{path}.{part}" for part in names): ["units_4"]}, x)
    grow(model)
    plain = merged(model)
    torch.testing.assert_close(plain(x).logits, model(x).logits, rtol=1e-10, atol=1e-10)
    with pytest.raises(KeyError, match="from_pretrained"):
        plain.save_pretrained(tmp_path)


@pytest.mark.landing
def test_transposed_weights_are_refused() -> None:
    place: Any = tuple(f"transformer.h.0.mlp.{name}" for name in ("c_fc", "act", "c_proj"))
    with pytest.raises(SlotError, match=r"'transformer.h.0.mlp.c_fc' \(Conv1D\) is not a plain"):
        esper.attach(tiny_transformers.gpt2().eval(), {place: ["units_3"]}, torch.randint(0, 9, (2, 6)))
