"""Blueprints that are made for a layer: low-rank updates of its weight, and copies of a block."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune
from torch.utils.flop_counter import FlopCounterMode

import esper
from esper.errors import ExportError, SlotError
from esper.growth.blueprints.blocks import BlockCopy
from esper.growth.blueprints.lora import LoRA
from esper.growth.blueprints.registry import get, names
from esper.growth.model import GrowingModel
from esper.lifecycle.actions import Blend
from factories import TransformerBlock

RANKS = [name for name in names() if issubclass(get(name), LoRA)]
WIDTH = 6


class Net(nn.Module):
    """A layer whose input is not the network's."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.scale = nn.Parameter(torch.full((1,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x * self.scale).flatten(1)


LAYERS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "linear": lambda: (nn.Linear(WIDTH, 5), torch.randn(3, WIDTH)),
    "no bias": lambda: (nn.Linear(WIDTH, 5, bias=False), torch.randn(3, WIDTH)),
    "tokens": lambda: (nn.Linear(WIDTH, 5), torch.randn(3, 4, WIDTH)),
    "rows and columns": lambda: (nn.Linear(WIDTH, 5), torch.randn(3, 4, 7, WIDTH)),
    "signals": lambda: (nn.Conv1d(WIDTH, 5, 3, stride=2, padding=1, dilation=2), torch.randn(3, WIDTH, 9)),
    "images": lambda: (nn.Conv2d(WIDTH, 5, (3, 1), stride=2, padding=(1, 0)), torch.randn(3, WIDTH, 8, 7)),
    "padded to the same": lambda: (nn.Conv2d(WIDTH, 5, 3, padding="same"), torch.randn(3, WIDTH, 8, 7)),
}


def updated(layer: str, blueprint: str = "lora", alpha: float = 0.7) -> tuple[GrowingModel, Tensor]:
    """With an update that is not zero."""
    torch.manual_seed(0)
    made, x = LAYERS[layer]()
    model = esper.attach(Net(made), {"layer": [blueprint]}, x)
    seed = model.slots["layer"].germinate(blueprint, torch.Generator().manual_seed(1), alpha=alpha)
    assert torch.equal(model(x), model.host.layer(x * 2).flatten(1))
    nn.init.normal_(seed.blueprint.outer, generator=torch.Generator().manual_seed(2))
    return model, x


@pytest.mark.parametrize("layer", LAYERS)
def test_what_it_costs_is_what_it_has(layer: str) -> None:
    model, x = updated(layer)
    site, seed = model.slots["layer"].site, model.seeds["layer"]
    assert seed.parameter_count == LoRA.cost_at(site).parameters
    with FlopCounterMode(display=False) as counter:
        seed.blueprint(x, x)
    assert len(x) * LoRA.cost_at(site).flops == counter.get_total_flops() > 0


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("blueprint", RANKS)
def test_it_is_merged_into_the_weight(layer: str, blueprint: str) -> None:
    model, x = updated(layer, blueprint)
    model.seeds["layer"].fossilized = True
    plain = model.finalize()
    assert plain.state_dict().keys() == model.host.state_dict().keys()
    expected = model(x)
    size = float(expected.detach().abs().max())
    torch.testing.assert_close(plain(x) / size, expected / size, rtol=1e-6, atol=1e-6)
    assert not torch.equal(plain.layer.weight, model.host.layer.weight)


def test_names_say_the_rank() -> None:
    assert {get(name).rank for name in RANKS} == {1, 2, 4, 8, 16, 32, 64}
    assert all(name == "lora" or name == f"lora_{get(name).rank}" for name in RANKS)
    assert get("lora") is LoRA
    assert LoRA.rank == 8


def test_an_update_of_a_shared_weight_is_refused_until_it_is_untied() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(9, WIDTH)
            self.head = nn.Linear(WIDTH, 9, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, indices: Tensor) -> Tensor:
            return self.head(self.embedding(indices))

    indices = torch.randint(9, (3, 4))
    model = esper.attach(Tied(), {"head": ["lora"]}, indices)
    seed = model.slots["head"].germinate("lora", alpha=1.0)
    nn.init.normal_(seed.blueprint.outer)
    model.slots["head"].fossilize()
    with pytest.raises(
        ExportError, match="'lora' in slot 'head' cannot change only one of embedding.weight and head.weight"
    ):
        model.finalize()
    model.host.head.weight = nn.Parameter(model.host.head.weight.detach().clone())
    plain = model.finalize()
    torch.testing.assert_close(plain(indices), model(indices))
    assert torch.equal(plain.embedding.weight, model.host.embedding.weight)


@pytest.mark.parametrize("readers", [("0", "2"), ("0", "4")], ids=["both layers", "one layer and another"])
def test_units_between_layers_that_share_a_weight_are_refused(readers: tuple[str, str]) -> None:
    net = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
    first, second = (net.get_submodule(name) for name in readers)
    second.weight = first.weight
    x = torch.randn(4, 6)
    model = esper.attach(net, {("0", "1", "2"): ["units_4"]}, x)
    model.slots["2"].germinate("units_4", alpha=1.0)
    model.slots["2"].fossilize()
    with pytest.raises(ExportError, match="which share a weight"):
        model.finalize()
    second.weight = nn.Parameter(second.weight.detach().clone())
    torch.testing.assert_close(model.finalize()(x), model(x))


class Tripled(nn.Linear):
    def forward(self, inputs: Tensor) -> Tensor:
        return 3 * super().forward(inputs)


def pruned(layer: nn.Linear) -> nn.Linear:
    return prune.l1_unstructured(layer, "weight", amount=0.5)


def hooked(layer: nn.Linear) -> nn.Linear:
    layer.register_forward_hook(lambda _, arguments, output: 3 * output)
    return layer


def wrapped(layer: nn.Linear) -> nn.Linear:
    original = layer.forward
    layer.forward = lambda x, scale=2.0: scale * original(x)
    return layer


def emptied(layer: nn.Linear) -> nn.Linear:
    weight = layer.weight.detach().clone()
    del layer.weight
    layer.forward = lambda x: x @ weight.T
    return layer


WITHOUT_WEIGHT: dict[str, Callable[[nn.Linear], nn.Module]] = {
    "own forward": lambda _: Tripled(WIDTH, WIDTH),
    "weight norm": parametrizations.weight_norm,
    "old weight norm": nn.utils.weight_norm,
    "pruned": pruned,
    "hooked": hooked,
    "wrapped": wrapped,
    "emptied": emptied,
    "norm": lambda _: nn.BatchNorm1d(WIDTH),
    "groups": lambda _: nn.Conv1d(WIDTH, WIDTH, 3, groups=2),
    "circular": lambda _: nn.Conv1d(WIDTH, WIDTH, 3, padding=1, padding_mode="circular"),
}


@pytest.mark.parametrize("make", WITHOUT_WEIGHT.values(), ids=WITHOUT_WEIGHT)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_layers_without_a_weight_to_update_get_no_lora_and_other_blueprints(
    make: Callable[[nn.Linear], nn.Module],
) -> None:
    host = Net(make(nn.Linear(WIDTH, WIDTH)))
    x = torch.randn(3, WIDTH, 5) if isinstance(host.layer, nn.Conv1d) else torch.randn(3, WIDTH)
    with pytest.raises(SlotError, match="'lora' does not support"):
        esper.attach(host, {"layer": ["lora"]}, x)
    esper.attach(host, {"layer": "auto"}, x)


def test_hooks_that_change_no_output_are_no_hindrance() -> None:
    layer, outputs = nn.Linear(WIDTH, WIDTH), list[Tensor]()
    layer.register_forward_pre_hook(lambda _, arguments: 2 * arguments[0])
    layer.register_forward_hook(lambda _, arguments, output: outputs.append(output))
    x = torch.randn(3, WIDTH)
    model = esper.attach(Net(layer), {"layer": ["lora"]}, x)
    nn.init.normal_(model.slots["layer"].germinate("lora", alpha=1.0).blueprint.outer)
    model.slots["layer"].fossilize()
    torch.testing.assert_close(model.finalize()(x), model(x), rtol=1e-5, atol=1e-5)


def test_auto_offers_what_is_made_for_features() -> None:
    model = esper.attach(Net(nn.Linear(WIDTH, WIDTH)), {"layer": "auto"}, torch.randn(3, WIDTH))
    assert not {"lora", "block_copy"} & set(model.slots["layer"].blueprints)


@pytest.mark.parametrize("blend", [Blend.GATE, Blend.MULTIPLY])
def test_they_only_add(blend: Blend) -> None:
    model = esper.attach(Net(nn.Linear(WIDTH, WIDTH)), {"layer": ["lora", "block_copy"]}, torch.randn(3, WIDTH))
    for name in ("lora", "block_copy"):
        with pytest.raises(SlotError, match="only adds"):
            model.slots["layer"].germinate(name, blend=blend)
    assert not model.seeds


def test_equal_to_peft() -> None:
    """The same initial values, data and optimizer: losses agree within rounding."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, 4))
    x, y = torch.randn(32, WIDTH), torch.randint(4, (32,))
    model = esper.attach(nn.Sequential(*net), {"0": ["lora_4"], "2": ["lora_4"]}, x, freeze_host=True)
    state = {key: value.clone() for key, value in net.state_dict().items()}
    other = nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, 4))
    other.load_state_dict(state)
    theirs = peft.get_peft_model(other, peft.LoraConfig(r=4, lora_alpha=8, target_modules=["0", "2"]))
    for name in ("0", "2"):
        seed = model.slots[name].germinate("lora_4", alpha=1.0)
        with torch.no_grad():
            seed.blueprint.inner.copy_(theirs.base_model.model.get_submodule(name).lora_A["default"].weight)
    losses = [learn(one, x, y) for one in (model, theirs)]
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=1e-6)
    assert losses[0][-1] < losses[0][0] - 0.1


def learn(network: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    optimizer = torch.optim.AdamW([one for one in network.parameters() if one.requires_grad], lr=0.01)
    losses: list[Tensor] = []
    for _ in range(30):
        optimizer.zero_grad()
        losses.append(F.cross_entropy(network(x), y))
        losses[-1].backward()
        optimizer.step()
    return torch.stack(losses).detach()


class Stack(nn.Module):
    """Blocks in a list, which is gone through in turn."""

    def __init__(self, *, container: type = nn.ModuleList) -> None:
        super().__init__()
        blocks = [TransformerBlock(WIDTH, causal=False) for _ in range(3)]
        self.blocks = container(blocks) if container is nn.ModuleList else container(*blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def tokens() -> Tensor:
    return torch.randn(3, 4, WIDTH, generator=torch.Generator().manual_seed(3))


def copied(host: nn.Module, *blocks: str, alpha: float = 1.0) -> GrowingModel:
    """With learned copies of these blocks, and something small after the second block."""
    model = esper.attach(host, {name: ["block_copy"] for name in blocks} | {"blocks.1.mlp": ["mlp"]}, tokens())
    model.slots["blocks.1.mlp"].germinate("mlp", alpha=1.0)
    for name in blocks:
        model.slots[name].germinate("block_copy", alpha=alpha)
    with torch.no_grad():
        for parameter in model.slots.parameters():
            parameter.add_(torch.randn(parameter.shape) / 10)
    for seed in model.seeds.values():
        seed.fossilized = True
    return model


def test_a_copy_is_nothing_at_alpha_zero_and_a_second_block_at_one() -> None:
    host = Stack()
    model = esper.attach(host, {"blocks.1": ["block_copy"]}, tokens())
    before = model(tokens())
    seed = model.slots["blocks.1"].germinate("block_copy")
    assert torch.equal(model(tokens()), before)
    seed.alpha.fill_(1.0)
    blocks, found = host.blocks, model(tokens())
    model.release()
    assert torch.equal(found, blocks[2](blocks[1](blocks[1](blocks[0](tokens())))))
    assert not torch.equal(found, before)


def test_it_counts_and_costs_what_its_block_does() -> None:
    model = esper.attach(Stack(), {"blocks.0": ["block_copy"]}, tokens())
    site = model.slots["blocks.0"].site
    block = sum(parameter.numel() for parameter in model.host.blocks[0].parameters())
    assert BlockCopy.cost_at(site).parameters == block
    assert model.host_flops == 3 * BlockCopy.cost_at(site).flops > 0


def test_what_grew_within_a_block_is_not_copied() -> None:
    model = esper.attach(Stack(), {"blocks.0.mlp": ["mlp"], "blocks.0": ["block_copy"]}, tokens())
    model.slots["blocks.0.mlp"].germinate("mlp", alpha=1.0)
    seed = model.slots["blocks.0"].germinate("block_copy")
    assert seed.parameter_count == sum(parameter.numel() for parameter in model.host.blocks[0].parameters())
    nn.init.ones_(model.seeds["blocks.0.mlp"].blueprint.outer)
    bare = model.host.blocks[0].mlp[2].weight
    assert torch.equal(seed.blueprint.block.mlp[2].weight, bare)
    x = tokens()
    with model.without_growth():
        expected = model.host.blocks[0](x)
    torch.testing.assert_close(seed.blueprint.block(x), expected)


@pytest.mark.parametrize("container", [nn.ModuleList, nn.Sequential])
@pytest.mark.parametrize("blocks", [("blocks.0",), ("blocks.2",), ("blocks.0", "blocks.1", "blocks.2")])
def test_the_plain_model_is_deeper(container: type, blocks: tuple[str, ...]) -> None:
    model = copied(Stack(container=container), *blocks)
    plain = model.finalize()
    assert len(plain.blocks) == 3 + len(blocks)
    assert all(type(block) is TransformerBlock for block in plain.blocks)
    torch.testing.assert_close(plain(tokens()), model(tokens()), rtol=1e-4, atol=1e-5)
    assert len(model.host.blocks) == 3


class Scaled(nn.Module):
    """A block with a scale that its owner has fixed, and one of whole numbers, if it is quantised."""

    def __init__(self, quantised: bool = False) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(WIDTH), requires_grad=False)
        if quantised:
            self.weight = nn.Parameter(torch.ones(WIDTH, WIDTH, dtype=torch.int8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        inner = x @ self.weight.to(x.dtype) if hasattr(self, "weight") else x
        return x + self.scale * self.linear(inner)


@pytest.mark.parametrize("blueprint", ["block_copy", "block_zero"])
def test_quantised_blocks_are_not_served(blueprint: str) -> None:
    with pytest.raises(SlotError, match=f"'{blueprint}' does not support"):
        esper.attach(nn.Sequential(Scaled(quantised=True)), {"0": [blueprint]}, tokens())


def learning(module: nn.Module) -> dict[str, bool]:
    return {name: parameter.requires_grad for name, parameter in module.named_parameters()}


@pytest.mark.parametrize("freeze_host", [False, True])
def test_what_is_fixed_in_a_block_is_fixed_in_its_copy(freeze_host: bool) -> None:
    model = esper.attach(nn.Sequential(Scaled()), {"0": ["block_copy"]}, tokens(), freeze_host=freeze_host)
    seed = model.slots["0"].germinate("block_copy", alpha=1.0)
    expected = {"scale": False, "linear.weight": True, "linear.bias": True}
    assert learning(seed.blueprint.block) == expected
    seed.requires_grad_(False)
    assert not any(learning(seed).values())
    seed.requires_grad_(True)  # as a grower does
    assert learning(copy.deepcopy(seed).blueprint.block) == expected
    seed.fossilized = True
    plain = model.finalize()
    assert [learning(block) for block in plain] == [expected, expected]


@pytest.mark.parametrize("freeze_host", [False, True])
def test_a_copy_of_a_block_that_is_fixed_as_a_whole_learns(freeze_host: bool) -> None:
    host = nn.Sequential(Scaled().requires_grad_(False))
    model = esper.attach(host, {"0": ["block_copy"]}, tokens(), freeze_host=freeze_host)
    assert all(learning(model.slots["0"].germinate("block_copy")).values())


def test_what_became_free_after_slots_were_attached_learns_in_a_copy() -> None:
    model = esper.attach(nn.Sequential(Scaled()), {"0": ["block_copy"]}, tokens())
    model.host[0].scale.requires_grad_(True)
    assert all(learning(model.slots["0"].germinate("block_copy")).values())


def test_what_a_zero_block_sets_to_zero_learns_even_if_it_is_fixed_in_the_block() -> None:
    model = esper.attach(nn.Sequential(Scaled()), {"0": ["block_zero"]}, tokens())
    block = model.slots["0"].germinate("block_zero", alpha=1.0).blueprint.block
    assert torch.equal(model(tokens()), model.host[0](tokens()))
    ends = [name for name, parameter in block.named_parameters() if not parameter.any()]
    assert ends == ["scale"]
    assert learning(block)["scale"]


class Mixed(nn.Module):
    """Linear in bfloat16, normalised in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16), nn.LayerNorm(WIDTH)
        self.register_buffer("shift", torch.full((), 1 / 3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x.float() + self.shift).to(self.linear.weight.dtype))


def types(module: nn.Module) -> list[torch.dtype]:
    return [tensor.dtype for tensor in module.state_dict().values()]


def test_a_copy_has_the_types_of_its_block() -> None:
    x = tokens().bfloat16()
    model = esper.attach(nn.Sequential(Mixed()), {"0": ["block_copy"]}, x, freeze_host=True)
    average, block = copy.deepcopy(model).double(), model.host[0]
    nn.init.constant_(block.norm.weight, 1 / 3)
    model.mirror(average)
    seed = model.slots["0"].germinate("block_copy", alpha=1.0)
    assert types(seed.blueprint.block) == types(block) == types(Mixed())
    assert all(torch.equal(one, seed.blueprint.block.state_dict()[key]) for key, one in block.state_dict().items())
    assert torch.equal(model(x), block.forward(block.forward(x)))
    assert set(types(average.seeds["0"])) == {torch.float64}


def test_what_changes_its_shape_has_no_copy() -> None:
    with pytest.raises(SlotError, match="'block_copy' does not support"):
        esper.attach(Net(nn.Linear(WIDTH, 5)), {"layer": ["block_copy"]}, torch.randn(3, WIDTH))


class Penalised(Net):
    """Reads its layer's weight elsewhere, too, in some modes: here as a penalty that is added to the outputs."""

    def __init__(self, layer: nn.Module, modes: set[bool]) -> None:
        super().__init__(layer)
        self.modes, self.drop = modes, nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        outputs = self.drop(super().forward(x))
        if self.training in self.modes:
            outputs = outputs + self.layer.weight.square().sum()
        return F.dropout(outputs, 0.2, self.training)


@pytest.mark.parametrize("freeze", [False, True])
@pytest.mark.parametrize("modes", [set[bool](), {True}, {False}, {True, False}], ids=str)
@pytest.mark.parametrize("layer", LAYERS)
def test_a_weight_that_is_read_elsewhere_in_either_mode_takes_no_update(
    layer: str, modes: set[bool], freeze: bool
) -> None:
    torch.manual_seed(0)
    made, x = LAYERS[layer]()
    model = esper.attach(Penalised(made, modes), {"layer": ["lora"]}, x, freeze_host=freeze).train()
    nn.init.normal_(model.slots["layer"].germinate("lora", alpha=1.0).blueprint.outer)
    model.slots["layer"].fossilize()
    before = [module.training for module in model.modules()]
    if modes:
        with pytest.raises(ExportError, match="something else reads that weight"):
            model.finalize()
    else:
        plain = model.finalize().eval()
        assert torch.allclose(plain(x), model.eval()(x), atol=1e-4)
        model.train()
    assert [module.training for module in model.modules()] == before


def test_a_model_that_the_example_does_not_fit_in_training_is_finalized() -> None:
    class NeedsLabels(Net):
        def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
            if self.training and labels is None:
                raise ValueError
            return super().forward(x)

    x = torch.randn(3, WIDTH)
    model = esper.attach(NeedsLabels(nn.Linear(WIDTH, 5)), {"layer": ["lora"]}, x)
    nn.init.normal_(model.slots["layer"].germinate("lora", alpha=1.0).blueprint.outer)
    model.slots["layer"].fossilize()
    assert torch.allclose(model.finalize().eval()(x), model.eval()(x), atol=1e-5)
