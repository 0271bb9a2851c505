"""`save` and `load`: what grew comes back as it was, and files that lie are refused."""

import copy
import hashlib
import json
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load as decode
from safetensors.torch import save as encode
from torch import nn

import tiny_transformers
from esper.errors import CheckpointError, SlotError
from esper.growth import persist
from esper.growth.attach import attach
from esper.growth.model import GrowingModel
from esper.growth.persist import load, save
from esper.lifecycle.actions import Blend
from esper.serialization import Manifest, StateFormat
from factories import Host, draw_normal, every_host, fossilize, plant
from growth.plain_hosts import Convolutional, Tokenwise

TOPOLOGY = "model.json"
Damage = Callable[[dict[str, Any]], object]


def grown() -> GrowingModel:
    """With a fossil and a live seed."""
    torch.manual_seed(0)
    model = attach(Convolutional(), {"stem": ["norm"], "norm": "auto"}, images())
    fossilize(model, "norm", "conv3x3", Blend.GATE).contribution = 0.25
    plant(model, "stem", "norm", Blend.MULTIPLY, alpha=0.4)
    return model


def images(count: int = 4) -> torch.Tensor:
    return draw_normal(count, 1, 5, 6)


def fresh() -> Convolutional:
    torch.manual_seed(1)
    return Convolutional()


def tensors_file(folder: Path) -> Path:
    (found,) = folder.glob("tensors-*.safetensors")
    return found


def rewrite(folder: Path, damage: Damage) -> None:
    """Damage the topology."""
    content = json.loads((folder / TOPOLOGY).read_text())
    damage(content)
    (folder / TOPOLOGY).write_text(json.dumps(content))


def put(folder: Path, data: bytes) -> None:
    """Put tensors with a topology that vouches for them."""
    sha256 = hashlib.sha256(data).hexdigest()
    tensors_file(folder).unlink()
    (folder / f"tensors-{sha256[:16]}.safetensors").write_bytes(data)
    rewrite(folder, lambda content: content.update(tensors_sha256=sha256, tensors_bytes=len(data)))


def test_what_was_saved_comes_back(tmp_path: Path) -> None:
    model = grown()
    model.slots["norm"].enabled = False
    model(images())  # batch statistics move
    save(model, tmp_path / "new" / "folder")
    other = load(tmp_path / "new" / "folder", fresh(), images())
    for mode in (True, False):
        assert torch.equal(other.train(mode)(images()), model.train(mode)(images()))
    assert other.state_dict().keys() == model.state_dict().keys()
    assert other.host_parameters == model.host_parameters
    for slot, again in zip(model.slots.values(), other.slots.values(), strict=True):
        assert again.name == slot.name
        assert (again.site, again.blueprints, again.enabled) == (slot.site, slot.blueprints, slot.enabled)
        assert again.seed.fossilized == slot.seed.fossilized
        assert again.seed.blend is slot.seed.blend
        assert again.seed.contribution == slot.seed.contribution


def test_it_goes_on_learning_with_the_moments_of_what_grew(tmp_path: Path) -> None:
    def optimizer_of(model: GrowingModel) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(model.parameter_groups(lr=0.01))
        model.link(optimizer)
        return optimizer

    def learn(model: GrowingModel, optimizer: torch.optim.Optimizer, steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            model(images()).square().mean().backward()
            optimizer.step()

    model = grown()
    model.slots["stem"].prune()
    optimizer = optimizer_of(model)
    learn(model, optimizer, 2)
    plant(model, "stem", "norm")  # grows while the optimizer runs
    learn(model, optimizer, 2)
    save(model, tmp_path)
    other = load(tmp_path, fresh(), images())
    resumed = optimizer_of(other)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert len(resumed.state) == len(list(other.parameters()))
    learn(model, optimizer, 2)
    learn(other, resumed, 2)
    for name, tensor in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor), name
    other.slots["stem"].prune()
    other.slots["stem"].germinate("norm")  # the slot's own group takes it
    learn(other, resumed, 1)


def test_input_reading_seeds_and_other_types_of_numbers_come_back(tmp_path: Path) -> None:
    model = attach(Tokenwise().double(), {"first": ["input_skip"]}, draw_normal(3, 4, 5).double())
    fossilize(model, "first", "input_skip")
    save(model, tmp_path)
    other = load(tmp_path, Tokenwise().double(), draw_normal(3, 4, 5).double())
    inputs = draw_normal(7, 4, 5).double()
    assert torch.equal(other(inputs), model(inputs))
    with pytest.raises(CheckpointError, match="is torch.float64 .* and torch.float32"):
        load(tmp_path, Tokenwise(), draw_normal(3, 4, 5))


def test_what_nobody_learns_in_a_copy_of_a_block_comes_back(tmp_path: Path) -> None:
    """Whatever the host is like that it is loaded on."""

    def host(*, fixed: bool) -> nn.Module:
        net = nn.Sequential(nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)), nn.Linear(4, 2))
        net.get_parameter("0.0.weight").requires_grad_(not fixed)
        return net

    model = attach(host(fixed=True), {"0": ["block_copy"]}, draw_normal(3, 4))
    model.slots["0"].germinate("block_copy", alpha=1.0)
    save(model, tmp_path)
    other = load(tmp_path, host(fixed=False), draw_normal(3, 4))
    seed = other.slots["0"].seed
    seed.requires_grad_(True)
    for one, again in zip(model.slots.parameters(), other.slots.parameters(), strict=True):
        assert again.requires_grad == one.requires_grad
    assert not other.slots["0"].get_parameter("occupant.blueprint.block.0.weight").requires_grad


def test_saving_again_replaces_and_leaves_one_model(tmp_path: Path) -> None:
    model = grown()
    save(model, tmp_path)
    before = tensors_file(tmp_path)
    model.slots["stem"].prune()
    save(model, tmp_path)
    assert tensors_file(tmp_path) != before
    assert {path.name for path in tmp_path.iterdir()} == {TOPOLOGY, tensors_file(tmp_path).name}
    assert torch.equal(load(tmp_path, fresh(), images())(images()), model(images()))


def test_a_save_that_ends_before_the_topology_leaves_the_old_model(tmp_path: Path) -> None:
    model = grown()
    save(model, tmp_path)
    expected = model.train(False)(images())
    model.slots["stem"].prune()
    (tmp_path / f".{TOPOLOGY}.partial").mkdir()  # so the second file cannot be written
    with pytest.raises(CheckpointError, match="not saved"):
        save(model, tmp_path)
    assert torch.equal(load(tmp_path, fresh(), images()).train(False)(images()), expected)


def test_two_that_save_into_one_folder_leave_one_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process saves, or tries to, between the two files of the first."""
    model, other = grown(), attach(fresh(), {"stem": ["norm"]}, images())
    thread = threading.Thread(target=save, args=(other, tmp_path))
    write = persist.write_atomically

    def interrupt(path: Path, content: bytes | str) -> None:
        if path.name == TOPOLOGY and thread.ident is None:
            thread.start()
            thread.join(0.3)  # it ends only if nothing keeps it out
        write(path, content)

    monkeypatch.setattr(persist, "write_atomically", interrupt)
    save(model, tmp_path)
    thread.join()
    loaded = load(tmp_path, fresh(), images())
    assert torch.equal(loaded(images()), other(images()))


@pytest.mark.parametrize("name", ["a\0b", "\ud800", ""])
def test_a_name_that_no_folder_can_have_is_one_sentence(name: str) -> None:
    for call in (lambda: save(grown(), name), lambda: load(name, fresh(), images())):
        with pytest.raises(CheckpointError, match="give the path of a folder"):
            call()


def test_a_model_that_is_replaced_while_it_is_loaded_gives_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, other = grown(), attach(fresh(), {"stem": ["norm"]}, images())
    save(model, tmp_path)
    read = StateFormat.read_tensors

    def interrupt(self: StateFormat[Any], path: Path, manifest: Manifest) -> dict[str, torch.Tensor]:
        monkeypatch.undo()
        save(other, tmp_path)
        return read(self, path, manifest)

    monkeypatch.setattr(StateFormat, "read_tensors", interrupt)
    loaded = load(tmp_path, fresh(), images())
    assert torch.equal(loaded(images()), other(images()))


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"model\.json is missing: give a folder written by esper\.save"):
        load(tmp_path, fresh(), images())
    (tmp_path / TOPOLOGY).write_text('{"format": "esper-checkpoint"}')
    with pytest.raises(CheckpointError, match="does not describe a growing model"):
        load(tmp_path, fresh(), images())


def first_slot(**changes: Any) -> Damage:
    return lambda content: content["slots"][0].update(changes)


def first_seed(**changes: Any) -> Damage:
    return lambda content: content["slots"][0]["seed"].update(changes)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda content: content.update(version=6),
            "format version 6, this Esper reads 7: use the Esper that wrote it",
        ),
        (lambda content: content.update(unknown=1), "corrupt at unknown"),
        (lambda content: content.update(slots=[]), "only the saved model has 'slots.norm"),
        (lambda content: content.update(slots=content["slots"] * 2), "is taken"),
        (lambda content: content.update(tensors_sha256="../../etc"), "corrupt at tensors_sha256"),
        (lambda content: content.update(tensors_bytes=3), "corrupt"),
        (first_slot(name="nowhere"), "no submodule 'nowhere'"),
        (first_slot(name="re:.*"), "no submodule 're:"),
        (first_slot(blueprints=[]), "no blueprint was named"),
        (first_slot(blueprints=["nothing"]), "unknown blueprint 'nothing'"),
        (lambda content: content["slots"][0]["site"].update(width=9), "width 9 when it was saved, but now has"),
        (lambda content: content["slots"][0]["site"].update(layout="cube"), "corrupt at slots.0.site.layout"),
        (first_seed(blueprint="nothing"), "unknown blueprint 'nothing'"),
        (first_seed(blueprint="attention"), "'attention' does not support"),
        (first_seed(blend="whirl"), r"corrupt at slots\.0\.seed\.blend"),
        (first_seed(blend="gate"), "only the model built here has 'slots.stem.occupant.gate.bias'"),
        (first_seed(fixed=["nothing"]), "has no parameter 'nothing'"),
        (first_seed(contribution=float("nan")), r"corrupt at slots\.0\.seed\.contribution"),
        (first_seed(contribution=float("-inf")), r"corrupt at slots\.0\.seed\.contribution"),
        (first_seed(contribution="much"), r"corrupt at slots\.0\.seed\.contribution"),
        (lambda content: content["slots"][0]["site"].update(width=-1), r"corrupt at slots\.0\.site\.width"),
        (lambda content: content["slots"][0]["site"].update(extent=[float("nan")]), r"corrupt at slots\.0\.site\.ext"),
        (lambda content: content["slots"][0]["site"].update(input_shape=[-1]), r"corrupt at slots\.0\.site\.input"),
        (lambda content: content.update(tensors_bytes=-1), "corrupt at tensors_bytes"),
        (lambda content: content.update(version=float("nan")), "does not describe"),
        (first_slot(seed=None), "only the saved model has 'slots.stem.occupant"),
    ],
)
def test_a_topology_that_lies_is_refused_and_leaves_the_host_as_it_was(
    tmp_path: Path, damage: Damage, message: str
) -> None:
    save(grown(), tmp_path)
    rewrite(tmp_path, damage)
    host = fresh()
    expected = host.eval()(images())
    with pytest.raises(CheckpointError, match=message) as caught:
        load(tmp_path, host, images())
    assert "\n" not in str(caught.value)
    assert torch.equal(host.eval()(images()), expected)
    assert b"esper" not in pickle.dumps(host)


@pytest.mark.parametrize("alpha", [float("nan"), float("inf"), -0.5, 7.0])
def test_weights_of_seeds_that_cannot_be_set_are_refused(tmp_path: Path, alpha: float) -> None:
    model = grown()
    slot = next(slot for slot in model.slots.values() if slot.seed is not None and not slot.seed.fossilized)
    with pytest.raises(SlotError, match="give a weight: a number from 0 to 1"):
        slot.set_alpha(alpha)
    slot.seed.alpha.fill_(alpha)
    save(model, tmp_path)
    host = fresh()
    with pytest.raises(CheckpointError, match=r"occupant\.alpha' is .* weights of seeds are numbers from 0 to 1"):
        load(tmp_path, host, images())
    assert b"esper" not in pickle.dumps(host)


@pytest.mark.parametrize("contribution", [float("nan"), float("inf"), None, -0.25])
def test_a_contribution_that_was_not_measured_is_saved_as_none(tmp_path: Path, contribution: float | None) -> None:
    model = grown()
    seed = next(iter(model.seeds.values()))
    seed.contribution = contribution
    save(model, tmp_path)
    loaded = next(iter(load(tmp_path, fresh(), images()).seeds.values()))
    assert loaded.contribution == (contribution if contribution == -0.25 else None)


def test_tensors_that_lie_are_refused(tmp_path: Path) -> None:
    save(grown(), tmp_path)
    content = tensors_file(tmp_path).read_bytes()
    tensors = decode(content)
    name = "host.stem.weight"
    damages = {
        "is not a safetensors file": pickle.dumps({"x": 1}),
        "only the model built here has 'host.stem.weight'": encode({n: t for n, t in tensors.items() if n != name}),
        "only the saved model has 'more'": encode({**tensors, "more": torch.zeros(1)}),
        "is torch.float16": encode({**tensors, name: tensors[name].half()}),
        r"\(4, 9\) in the saved model": encode({**tensors, name: tensors[name].flatten(1).clone()}),
    }
    for message, data in damages.items():
        put(tmp_path, data)
        with pytest.raises(CheckpointError, match=message):
            load(tmp_path, fresh(), images())
    put(tmp_path, content)
    tensors_file(tmp_path).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(CheckpointError, match="torn or corrupt"):
        load(tmp_path, fresh(), images())
    tensors_file(tmp_path).unlink()
    with pytest.raises(CheckpointError, match="is missing"):
        load(tmp_path, fresh(), images())


@settings(max_examples=30)
@given(st.data())
def test_any_damaged_byte_is_refused_in_one_sentence_or_harmless(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("saved")
    model = grown().eval()
    save(model, folder)
    path = data.draw(st.sampled_from([folder / TOPOLOGY, tensors_file(folder)]))
    content = bytearray(path.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] ^= data.draw(st.integers(1, 255))
    path.write_bytes(bytes(content[: data.draw(st.sampled_from([len(content), place]))]))
    if path.name == TOPOLOGY and loads(folder):
        return  # a flag, a figure or a name may have another valid value
    with pytest.raises(CheckpointError) as caught:
        load(folder, fresh(), images())
    assert "\n" not in str(caught.value)


def loads(folder: Path) -> bool:
    try:
        load(folder, fresh(), images())
    except CheckpointError:
        return False
    return True


class Rotary(nn.Module):
    """With angles that its state dict lacks, and whose base is no attribute."""

    def __init__(self, base: float) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("angles", base ** -torch.arange(8.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x * self.angles)


def make(**changes: Any) -> nn.Sequential:
    options = {"base": 100.0, "eps": 1e-5, "heads": 2, "activation": nn.ReLU, "padding": 1, **changes}
    torch.manual_seed(0)
    attention = nn.TransformerEncoderLayer(8, options["heads"], 8, batch_first=True)
    norm = nn.LayerNorm(8, eps=options["eps"])
    return nn.Sequential(Rotary(options["base"]), attention, norm, options["activation"](), nn.Linear(8, 3))


CHANGES: dict[str, Any] = {"base": 200.0, "eps": 1e-3, "heads": 4, "activation": nn.GELU}


@pytest.mark.parametrize("freeze", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_a_host_with_equal_tensors_that_computes_something_else_is_refused(
    change: str, freeze: bool, tmp_path: Path
) -> None:
    x = torch.randn(2, 3, 8)
    model = attach(make(), {"4": ["mlp"]}, x, freeze_host=freeze)
    plant(model, "4", "mlp")
    save(model, tmp_path)
    other = make(**{change: CHANGES[change]})
    assert all(map(torch.equal, other.state_dict().values(), make().state_dict().values()))
    with pytest.raises(CheckpointError, match="was saved with a host of other settings"):
        load(tmp_path, other, x)
    assert torch.equal(load(tmp_path, make(), x).eval()(x), model.eval()(x))


@pytest.mark.landing
@pytest.mark.parametrize("freeze", [False, True])
@pytest.mark.parametrize("change", [{"rope_theta": 500.0}, {"rms_norm_eps": 1e-2}])
def test_a_language_model_of_another_configuration_is_refused(
    change: dict[str, Any], freeze: bool, tmp_path: Path
) -> None:
    host = tiny_transformers.llama()
    x = {"input_ids": torch.arange(16).view(2, 8)}
    model = attach(copy.deepcopy(host), {"model.layers.0": ["mlp"]}, x, freeze_host=freeze)
    save(model, tmp_path)
    other = tiny_transformers.llama(**change)
    other.load_state_dict(host.state_dict())
    with pytest.raises(CheckpointError, match="was saved with a host of other settings"):
        load(tmp_path, other, x)


@every_host
def test_a_host_that_is_built_alike_is_loaded_in_either_mode_and_another_type(host: Host, tmp_path: Path) -> None:
    model = host.attached()
    save(model, tmp_path)
    fresh = host.make().eval()
    fresh(**host.arguments()) if isinstance(host.arguments(), dict) else fresh(host.arguments())
    load(tmp_path, fresh, host.arguments())
