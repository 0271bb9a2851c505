"""A frozen host stays what it was, to the bit, whatever grows on it."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import esper
from esper.errors import CheckpointError, SlotError
from esper.growth.model import GrowingModel
from factories import CLASSES, ResNet, draw_normal

SLOTS = {"stem": ["lora"], "layer1.conv1": ["lora_4"], "layer1": ["conv3x3", "block_copy"], "head": ["lora", "mlp"]}
PLANTED = {"stem": "lora", "layer1.conv1": "lora_4", "layer1": "block_copy", "head": "mlp"}


def images(count: int = 6, seed: int = 1) -> Tensor:
    return draw_normal(count, 3, 8, 8, seed=seed)


def trained() -> ResNet:
    """A host with statistics of its own."""
    torch.manual_seed(0)
    host = ResNet()
    host.train()
    host(images())
    return host.eval()


def attached(host: nn.Module | None = None, **options: object) -> GrowingModel:
    frozen = {"freeze_host": True, **options}
    return esper.attach(trained() if host is None else host, SLOTS, images(2), **frozen)


def grow(model: GrowingModel, steps: int = 5) -> GrowingModel:
    """With seeds of all kinds that have learned something."""
    optimizer = torch.optim.AdamW(model.parameter_groups(lr=0.01))
    model.link(optimizer)
    for name, blueprint in PLANTED.items():
        model.slots[name].germinate(blueprint, torch.Generator().manual_seed(2), alpha=0.5)
    learn(model, optimizer, steps)
    return model


def learn(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    model.train()
    for step in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images(seed=step)), torch.arange(6) % CLASSES).backward()
        optimizer.step()


def test_the_host_is_to_the_bit_what_it_was_after_any_training() -> None:
    before = trained()
    model = grow(attached())
    model.eval()
    assert not torch.allclose(model(images()), before(images()))
    with model.without_growth():
        assert torch.equal(model(images()), before(images()))
    assert not torch.allclose(model(images()), before(images()))
    state = before.state_dict()
    assert all(torch.equal(value, state[key]) for key, value in model.host.state_dict().items())


def attach_to_encoder() -> tuple[GrowingModel, nn.Module, Tensor]:
    """With a seed behind its layer, beside the host as it was."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(128, 4, 256, activation="gelu", norm_first=True, batch_first=True)
    host, tokens = nn.Sequential(nn.Linear(128, 128), layer).eval(), torch.randn(4, 16, 128)
    model = esper.attach(copy.deepcopy(host), {"1": ["mlp"]}, tokens, freeze_host=True)
    generator = torch.Generator().manual_seed(3)
    for parameter in model.slots["1"].germinate("mlp", alpha=1.0).parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model, host, tokens


GROWN = [attach_to_encoder, lambda: (grow(attached(), steps=1).eval(), trained(), images())]


@pytest.mark.landing
@pytest.mark.parametrize("make", GROWN)
def test_growth_is_out_of_sight_within_a_function_that_is_compiled(
    make: Callable[[], tuple[GrowingModel, nn.Module, Tensor]],
) -> None:
    torch.compiler.reset()
    model, host, inputs = make()

    @torch.compile(backend="eager")
    def compute(inputs: Tensor) -> Tensor:
        with model.without_growth():
            return model(inputs)

    with torch.no_grad():
        expected = model(inputs)
        assert torch.allclose(compute(inputs), host(inputs), atol=1e-5)
        assert torch.equal(model(inputs), expected)
        assert torch.allclose(torch.compile(model, backend="eager")(inputs), expected, atol=1e-5)


@pytest.mark.landing
@pytest.mark.parametrize("part", ["model in place", "model in a wrapper", "host", "layer"])
@pytest.mark.parametrize("make", GROWN)
def test_what_is_compiled_first_without_growth_has_it_afterwards(
    part: str, make: Callable[[], tuple[GrowingModel, nn.Module, Tensor]]
) -> None:
    torch.compiler.reset()
    model, host, inputs = make()
    compiled: nn.Module = model
    with torch.no_grad():
        expected = model(inputs)
        if part == "model in a wrapper":
            compiled = torch.compile(model, backend="eager")
        else:
            parts = {"model in place": model, "host": model.host, "layer": next(reversed(list(model.host.children())))}
            parts[part].compile(backend="eager")
        with model.without_growth():
            bare = compiled(inputs)
        grown = compiled(inputs)
        with model.without_growth():
            assert torch.equal(compiled(inputs), bare)
    assert torch.allclose(bare, host(inputs), atol=1e-5)
    assert torch.allclose(grown, expected, atol=1e-5)
    assert not torch.allclose(grown, bare, atol=1e-3)


# Torch's encoder has another path for layers with hooks.
@pytest.mark.parametrize(("make", "tolerance"), zip(GROWN, (1e-5, 0.0), strict=True))
def test_growth_comes_back_when_the_last_of_nested_blocks_ends(
    make: Callable[[], tuple[GrowingModel, nn.Module, Tensor]], tolerance: float
) -> None:
    model, host, inputs = make()
    with torch.no_grad():
        expected, bare = model(inputs), host(inputs)
        with model.without_growth():
            with model.without_growth(), model.slots.values()[0].disabled():
                torch.testing.assert_close(model(inputs), bare, rtol=0, atol=tolerance)
            torch.testing.assert_close(model(inputs), bare, rtol=0, atol=tolerance)
            with pytest.raises(SlotError, match="is switched off"):
                model.slots.values()[0].prune()
        assert torch.equal(model(inputs), expected)


def test_what_grew_follows_what_became_of_the_model_out_of_sight() -> None:
    model = grow(attached(), steps=1).train()
    with model.without_growth():
        model.eval().double()
    assert not any(module.training for module in model.modules())
    assert {one.dtype for one in model.parameters()} == {torch.float64}
    assert torch.equal(model(images().double()), model(images().double()))


def test_a_frozen_host_stays_at_rest_whoever_trains_it() -> None:
    host, before = trained(), trained()
    model = grow(attached(host)).train()
    host.train()
    model(images())
    host.get_submodule("layer1").train()
    host(images())
    assert not any(module.training for module in host.modules())
    model.eval()
    with model.without_growth():
        assert torch.equal(model(images()), before(images()))


class NormFirst(nn.Module):
    """A block that computes in bfloat16, and whose first parameter is of another type."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(4), nn.Linear(4, 4, dtype=torch.bfloat16)

    def forward(self, features: Tensor) -> Tensor:
        return self.linear(self.norm(features.float()).bfloat16())


def test_seeds_have_the_type_in_which_the_host_computes_there() -> None:
    inputs = torch.randn(2, 4).bfloat16()
    model = esper.attach(nn.Sequential(NormFirst(), nn.Linear(4, 4).bfloat16()), {"0": ["mlp"]}, inputs)
    model.slots["0"].germinate("mlp", alpha=1.0)
    assert model(inputs).dtype == torch.bfloat16
    host = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under = esper.attach(host, {"0": ["mlp"]}, torch.randn(2, 4))
    assert under.slots["0"].germinate("mlp").alpha.dtype == torch.float32


def test_hooks_keep_their_order_when_growth_was_out_of_sight() -> None:
    model, outputs = grow(attached(), steps=0), list[Tensor]()
    layer = model.host.get_submodule("layer1")
    first = layer.register_forward_hook(lambda _, inputs, output: outputs.append(output))
    with model.without_growth():
        layer.register_forward_hook(lambda _, inputs, output: outputs.append(output))
    model(images())
    first.remove()
    assert torch.equal(outputs[0], outputs[1])
    with model.without_growth():
        model(images())
    assert not torch.equal(outputs[1], outputs[2])


@pytest.mark.parametrize("change", ["save", "germinate", "prune", "finalize", "state_dict", "parameter_groups"])
def test_nothing_changes_while_growth_is_out_of_sight(change: str, tmp_path: Path) -> None:
    model = grow(attached(), steps=0)
    model.slots["head"].prune()
    changes = {
        "save": lambda: esper.save(model, tmp_path / "saved"),
        "germinate": lambda: model.slots["head"].germinate("mlp"),
        "prune": model.slots["layer1"].prune,
        "finalize": model.finalize,
        "state_dict": model.state_dict,
        "parameter_groups": model.parameter_groups,
    }
    with model.without_growth(), pytest.raises(SlotError, match="is switched off"):
        changes[change]()
    assert list(model.seeds) == ["stem", "layer1.conv1", "layer1"]


def test_gradients_of_former_training_are_gone() -> None:
    host = trained()
    host(images()).mean().backward()
    assert all(one.grad is None for one in attached(host).parameters())


def test_seeds_have_the_type_of_the_layer_that_they_follow() -> None:
    host = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(torch.bfloat16)
    host[1].float()
    host[1].register_forward_pre_hook(lambda _, inputs: inputs[0].float())
    model = esper.attach(host, {"0": ["mlp"], "1": ["lora_4"]}, torch.randn(2, 4).bfloat16(), freeze_host=True)
    for slot in model.slots.values():
        slot.germinate(slot.blueprints[0], alpha=1.0)
    assert model.seeds["0"].blueprint.parameters().__next__().dtype == torch.bfloat16
    assert model.seeds["1"].blueprint.parameters().__next__().dtype == torch.float32
    model(torch.randn(2, 4).bfloat16()).sum().backward()


def test_all_that_grew_has_learned() -> None:
    fresh, model = grow(attached(), steps=0), grow(attached())
    for (name, before), after in zip(fresh.slots.named_parameters(), model.slots.parameters(), strict=True):
        assert not torch.equal(before, after), name


@pytest.mark.parametrize("freeze_host", [True, ["layer1", "stem"], False])
@pytest.mark.parametrize("training", [True, False])
def test_a_host_that_is_let_go_is_in_the_mode_of_before_or_of_the_model(
    freeze_host: bool | list[str], training: bool
) -> None:
    host = trained().train()
    host.layer1.norm1.eval()
    modes = {name: part.training for name, part in host.named_modules()}
    model = attached(host, freeze_host=freeze_host)
    if not training:
        model.eval()
        modes = dict.fromkeys(modes, False)
    plain = model.finalize()
    model.release()
    for one in (plain, host):
        assert {name: part.training for name, part in one.named_modules()} == modes


def test_a_loop_runs_before_anything_has_grown() -> None:
    model = attached()
    optimizer = torch.optim.AdamW(model.parameter_groups(lr=0.01))
    before = model(images()).detach()
    learn(model, optimizer, 2)
    assert torch.equal(model(images()), before)


@pytest.mark.parametrize("named", [["stem", "layer1"], [r"re:stem|layer1"]])
def test_parts_are_frozen_by_name_or_pattern(named: list[str]) -> None:
    before, model = trained(), attached(freeze_host=named)
    model.link(optimizer := torch.optim.AdamW(model.parameter_groups(lr=0.01)))
    learn(model, optimizer, 3)
    state = before.state_dict()
    changed = {
        key.partition(".")[0] for key, value in model.host.state_dict().items() if not torch.equal(value, state[key])
    }
    assert changed == {"layer2", "head"}
    assert model.host.layer2.training
    assert not model.host.layer1.norm1.training


def test_parts_by_name_are_all_of_a_host_only_if_nothing_is_left() -> None:
    def norms() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False), nn.Dropout(0.5), nn.Linear(4, 2))

    x = torch.randn(8, 4)
    for names, whole in ((["0", "3"], False), (["0", "1", "3"], False), (["0", "1", "2", "3"], True)):
        model = esper.attach(norms(), {"0": ["mlp"]}, x, freeze_host=names)
        assert model.frozen.holds_all(model.host) == whole
    model = esper.attach(norms(), {"0": ["mlp"]}, x, freeze_host=True)
    assert model.frozen.holds_all(model.host)
    model.requires_grad_(True)
    assert not model.frozen.holds_all(model.host)


def test_what_a_module_keeps_besides_tensors_must_be_the_same(tmp_path: Path) -> None:
    class Noted(nn.Linear):
        def __init__(self, note: str) -> None:
            super().__init__(4, 2)
            nn.init.ones_(self.weight), nn.init.zeros_(self.bias)
            self.note = note

        def get_extra_state(self) -> str:
            return self.note

        def set_extra_state(self, state: str) -> None:
            self.note = state

    x = torch.randn(3, 4)
    model = esper.attach(nn.Sequential(Noted("a")), {"0": ["mlp"]}, x, freeze_host=True)
    model.slots["0"].germinate("mlp", alpha=1.0)
    esper.save(model, tmp_path)
    assert torch.equal(esper.load(tmp_path, nn.Sequential(Noted("a")), x)(x), model(x))
    with pytest.raises(CheckpointError, match="different values"):
        esper.load(tmp_path, nn.Sequential(Noted("b")), x)


@pytest.mark.parametrize("wrong", [3, "stem", [1], ["sten"], [""], ["re:nothing"], None])
def test_what_is_no_part_is_refused(wrong: object) -> None:
    host = trained()
    with pytest.raises(SlotError, match="freeze_host|submodule"):
        attached(host, freeze_host=wrong)
    assert all(parameter.requires_grad for parameter in host.parameters())


def test_only_what_grew_is_saved_and_only_its_own_host_gets_it_back(tmp_path: Path) -> None:
    model = grow(attached()).eval()
    esper.save(model, tmp_path)
    seeds = sum(value.numel() * value.element_size() for value in model.slots.state_dict().values())
    size = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    assert seeds <= size < seeds + 8000
    loaded = esper.load(tmp_path, trained(), images(2)).eval()
    assert torch.equal(loaded(images()), model(images()))
    assert loaded.frozen.names == model.frozen.names
    other = trained()
    with torch.no_grad():
        other.head.bias[0] += 1e-6
    with pytest.raises(CheckpointError, match="different values"):
        esper.load(tmp_path, other, images(2))
    assert all(parameter.requires_grad for parameter in other.parameters())


def test_a_part_that_is_frozen_is_not_saved_and_the_rest_is(tmp_path: Path) -> None:
    model = attached(freeze_host=["stem"])
    model.link(optimizer := torch.optim.AdamW(model.parameter_groups(lr=0.01)))
    learn(model, optimizer, 2)
    esper.save(model.eval(), tmp_path)
    assert torch.equal(esper.load(tmp_path, trained(), images(2)).eval()(images()), model(images()))


@pytest.mark.filterwarnings("ignore:'block_copy' in slot")
def test_copies_and_plain_models_compute_the_same() -> None:
    model = grow(attached()).eval()
    for seed in model.seeds.values():
        seed.fossilized = True
    expected = model(images())
    assert torch.equal(copy.deepcopy(model)(images()), expected)
    plain = model.finalize()
    assert isinstance(plain, ResNet)
    torch.testing.assert_close(plain(images()), expected, rtol=1e-6, atol=1e-6)
