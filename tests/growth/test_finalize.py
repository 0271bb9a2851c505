"""What `finalize` returns: an ordinary module that computes what the growing model does with its fossils."""

from __future__ import annotations

import copy
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from esper.errors import ExportError
from esper.growth.attach import attach
from esper.growth.blueprints.registry import Blueprint, Family
from esper.growth.fossils import trace
from esper.growth.model import GrowingModel
from esper.growth.persist import load, save
from esper.growth.seed import Seed
from esper.growth.site import Layout, Site
from esper.lifecycle.actions import Blend
from growth.blueprint_cases import CASES
from growth.growing import fossilize, generator, plant, random
from growth.plain_hosts import Convolutional, Passing, Tokenwise, classifier, seeded

BLENDED = [
    pytest.param(
        *case.values, tuple(Blend)[index % len(Blend)], id=f"{case.id}-{tuple(Blend)[index % len(Blend)].name}"
    )
    for index, case in enumerate(CASES)
]

WITHOUT_ESPER = """
import pickle, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "esper":
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Absent())
with open(sys.argv[1], "rb") as file:
    model, inputs, expected = pickle.load(file)
assert (model(inputs) - expected).abs().max() < 1e-6
loss = model(inputs).square().mean()
loss.backward()
assert all(parameter.grad is not None for parameter in model.parameters())
print(loss.item())
"""


def grown_classifier() -> GrowingModel:
    """With two fossils, one of which reads the network's input."""
    seeded()
    model = attach(classifier(), ["0", "2"], random(4, 5))
    fossilize(model, "0", "input_skip")
    fossilize(model, "2", "mlp", Blend.MULTIPLY)
    return model


def assert_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(("kind", "site", "blend"), BLENDED)
def test_every_blueprint_becomes_plain_at_every_layout(kind: type[Blueprint], site: Site, blend: Blend) -> None:
    seeded()
    place = nn.Conv1d(site.width, site.width, 1) if site.layout is Layout.SEQUENCE else nn.Identity()
    host = Passing(site.input_shape, site.shape, place)
    model = attach(host, {"place": [kind.name]}, random(4, *site.input_shape), causal=site.causal)
    bare = model(random(3, *site.input_shape))
    fossilize(model, "place", kind.name, blend)
    plain = model.finalize()
    assert not torch.allclose(plain(random(3, *site.input_shape)), bare, atol=1e-3)
    assert b"esper" not in pickle.dumps(plain)
    for size in (1, 7):
        inputs = random(size, *site.input_shape, seed=size)
        assert_close(plain(inputs), model(inputs))


@pytest.mark.parametrize("blend", Blend)
@pytest.mark.parametrize("blueprint", ["lowrank", "token_mix"])
def test_every_blend_becomes_plain(blueprint: str, blend: Blend) -> None:
    model = attach(Tokenwise(), {"first": [blueprint]}, random(3, 4, 5), causal=False)
    fossilize(model, "first", blueprint, blend)
    inputs = random(6, 4, 5)
    assert_close(model.finalize()(inputs), model(inputs))


@pytest.mark.parametrize("blueprint", ["attention", "token_conv", "gate", "input_skip"])
def test_the_length_may_vary_where_the_blueprint_allows_it(blueprint: str) -> None:
    model = attach(Tokenwise(), {"first": [blueprint]}, random(3, 4, 5), causal=False)
    fossilize(model, "first", blueprint)
    plain = model.finalize()
    for length in (2, 9):
        assert_close(plain(random(3, length, 5)), model(random(3, length, 5)))


def test_causal_attention_stays_causal_at_any_length() -> None:
    model = attach(Tokenwise(), {"first": ["attention"]}, random(3, 4, 5), causal=True)
    fossilize(model, "first", "attention")
    plain, inputs = model.finalize(), random(3, 9, 5)
    before = plain(inputs)
    assert_close(before, model(inputs))
    inputs[:, -1] += 1
    assert torch.equal(plain(inputs)[:, :-1], before[:, :-1])


@pytest.mark.parametrize("shape", [(2, 8, 5), (8, 1, 5)])
def test_another_length_is_refused_where_the_blueprint_does_not_allow_it(shape: tuple[int, ...]) -> None:
    model = attach(Tokenwise(), {"first": ["token_mix"]}, random(3, 4, 5), causal=False)
    fossilize(model, "first", "token_mix")
    with pytest.raises(RuntimeError, match="shape"):
        model.finalize()(random(*shape))


def test_without_fossils_it_is_a_copy_of_the_host() -> None:
    seeded()
    host = Convolutional()
    images = random(2, 1, 4, 4)
    expected = host(images)
    model = attach(host, ["block"], images)
    plant(model, "block", "conv3x3")
    plain = model.finalize(unfinished="drop")
    assert plain.state_dict().keys() == host.state_dict().keys()
    assert not re.search(b"esper|Fossil", pickle.dumps(plain))
    assert torch.equal(plain(images), expected)
    assert not torch.allclose(model(images), expected, atol=1e-3)  # the model itself keeps its seed


def test_released_hosts_are_themselves_again() -> None:
    seeded()
    host = Convolutional()
    images = random(2, 1, 4, 4)
    expected = host(images)
    model = attach(host, ["block"], images)
    plant(model, "block", "conv3x3")
    model.release()
    assert b"esper" not in pickle.dumps(host)
    assert torch.equal(host(images), expected)


def test_the_hosts_keys_stay_and_those_of_fossils_come_beside_them() -> None:
    model = grown_classifier()
    keys = model.finalize().state_dict().keys()
    assert keys > classifier().state_dict().keys()
    assert {"2.fossil_mlp.inner", "2.fossil_mlp.alpha", "0.fossil_input_skip.weight"} < keys
    assert len(keys) == len(model.state_dict())


def test_it_trains_on_with_batch_normalisation() -> None:
    seeded()
    model = attach(Convolutional(), ["block"], random(2, 1, 4, 4))
    fossilize(model, "block", "conv3x3", Blend.GATE)
    plain = model.finalize().train()
    before = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    plain(random(8, 1, 4, 4)).square().mean().backward()
    optimizer.step()
    same = {name for name, tensor in plain.state_dict().items() if torch.equal(tensor, before[name])}
    assert same == {"block.fossil_conv3x3.alpha"}
    model.train()(random(8, 1, 4, 4))
    assert_close(plain.norm.running_mean, model.host.norm.running_mean)
    plain.eval()
    assert torch.equal(plain(random(8, 1, 4, 4))[:2], plain(random(8, 1, 4, 4)[:2]))


def test_it_owns_its_parameters() -> None:
    model = grown_classifier()
    expected = model(random(3, 5))
    with torch.no_grad():
        for parameter in model.finalize().parameters():
            parameter.zero_()
    assert torch.equal(model(random(3, 5)), expected)


def test_copies_are_independent() -> None:
    plain = grown_classifier().finalize()
    expected = plain(random(3, 5))
    other = copy.deepcopy(plain)
    assert torch.equal(other(random(3, 5)), expected)
    with torch.no_grad():
        other[2].fossil_mlp.alpha.zero_()
        other[0].fossil_input_skip.weight.zero_()
    assert not torch.equal(other(random(3, 5)), expected)
    assert torch.equal(plain(random(3, 5)), expected)


def test_it_keeps_no_data() -> None:
    plain = grown_classifier().finalize()
    size = len(pickle.dumps(plain))
    plain(random(1000, 5).requires_grad_() * 2)  # neither a leaf nor small
    assert len(pickle.dumps(plain)) == size
    with pytest.raises(RuntimeError):
        plain(random(3, 4))
    assert len(pickle.dumps(plain)) == size


def test_the_type_of_numbers_may_change() -> None:
    model = grown_classifier()
    plain = model.finalize().double()
    assert_close(plain(random(3, 5).double()).float(), model(random(3, 5)))
    with torch.autocast("cpu", torch.bfloat16):
        assert plain.float()(random(3, 5)).dtype == model(random(3, 5)).dtype == torch.bfloat16


def test_it_compiles_as_one_graph() -> None:
    model = grown_classifier()
    compiled = torch.compile(model.finalize(), backend="eager", fullgraph=True)
    assert_close(compiled(random(3, 5)), model(random(3, 5)))


def test_the_input_may_come_by_keyword() -> None:
    model = attach(Tokenwise(), {"first": ["input_skip"]}, {"tokens": random(3, 4, 5), "scale": torch.tensor(2.0)})
    fossilize(model, "first", "input_skip")
    given = {"tokens": random(6, 4, 5), "scale": torch.tensor(0.5)}
    assert_close(model.finalize()(**given), model(**given))


def test_what_was_finalized_may_grow_again() -> None:
    once = grown_classifier().finalize()
    model = attach(once, ["0", "2"], random(4, 5))
    fossilize(model, "0", "input_skip", Blend.GATE)
    fossilize(model, "2", "mlp")
    twice = model.finalize()
    assert_close(twice(random(3, 5)), model(random(3, 5)))
    assert not torch.allclose(twice(random(3, 5)), grown_classifier()(random(3, 5)), atol=1e-3)
    assert {"2.fossil_mlp.inner", "2.fossil_mlp_.inner"} < twice.state_dict().keys()


def test_what_grew_is_shown_as_modules_with_names() -> None:
    plain = grown_classifier().finalize()
    count = sum(parameter.numel() for parameter in plain[2].fossil_mlp.parameters())
    assert f"(fossil_mlp): Identity(what grew: mlp, {count} parameters)" in str(plain)
    assert "(fossil_input_skip): Identity(what grew: input_skip" in str(copy.deepcopy(plain))
    assert "(fossil_mlp): Identity(what grew: mlp" in str(pickle.loads(pickle.dumps(plain)))


class Branches(nn.ModuleList):
    """Runs what it holds, side by side."""

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.stack([branch(inputs) for branch in self]).sum(0)


class Asking(nn.Module):
    """Runs what it holds, one after the other, in a way of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, inputs: Tensor) -> Tensor:
        for child in self.children():
            inputs = child(inputs).relu()
        return inputs


class Naming(nn.Module):
    """Runs what it holds by name."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.second(self.first(inputs).relu())


@pytest.mark.parametrize(
    "middle",
    [
        nn.Linear(5, 5),
        nn.Sequential(nn.Linear(5, 5), nn.ReLU()),
        Branches([nn.Linear(5, 5), nn.Linear(5, 5)]),
        Asking(),
        Naming(),
    ],
    ids=lambda module: type(module).__name__,
)
@pytest.mark.parametrize("blueprint", ["mlp", "input_skip"])
def test_whatever_a_fossil_follows_runs_it_once(middle: nn.Module, blueprint: str) -> None:
    host = nn.Sequential(nn.Linear(5, 5), copy.deepcopy(middle), nn.Linear(5, 3))
    model = attach(host, ["1"], random(4, 5))
    fossilize(model, "1", blueprint)
    plain = model.finalize()
    for one in (plain, copy.deepcopy(plain), pickle.loads(pickle.dumps(plain))):
        assert_close(one(random(3, 5)), model(random(3, 5)))
    assert any("fossil_" in name for name, _ in plain.named_parameters())


def test_layers_that_are_put_together_anew_keep_what_grew() -> None:
    model = attach(nn.Sequential(classifier(), nn.ReLU(), nn.Linear(3, 3)), ["0", "0.2", "2"], random(4, 5))
    for slot in ("0", "0.2", "2"):
        fossilize(model, slot, "mlp")
    plain = model.finalize()
    expected = model(random(3, 5))
    assert_close(nn.Sequential(*plain.children())(random(3, 5)), expected)
    parts = [*plain[0].children(), *list(plain.children())[1:]]
    assert_close(nn.Sequential(*parts)(random(3, 5)), expected)


def test_parts_that_read_the_networks_input_are_refused_without_it() -> None:
    plain = grown_classifier().finalize()
    with pytest.raises(KeyError, match="reads the input of the whole network, which has not been called"):
        nn.Sequential(*plain.children())(random(3, 5))
    with pytest.raises(KeyError, match="reads the input of the whole network"):
        plain[0](random(3, 5))


def test_a_fresh_host_and_the_saved_structure_take_the_state_of_a_plain_model(tmp_path: Path) -> None:
    model = grown_classifier()
    save(model, tmp_path)
    trained = model.finalize()
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.add_(0.1)
    again = load(tmp_path, classifier(), random(4, 5)).finalize()
    assert_close(again(random(3, 5)), model(random(3, 5)))
    again.load_state_dict(trained.state_dict())
    assert torch.equal(again(random(3, 5)), trained(random(3, 5)))


class Branching(Blueprint):
    """Looks at values, which no graph can."""

    name, family, layouts = "branching", Family.CHANNEL, frozenset({Layout.FEATURES})

    def forward(self, features: Tensor, inputs: Tensor, /) -> Tensor:
        return features if features.sum() > 0 else -features

    @classmethod
    def parameters_at(cls, site: Site) -> int:
        return 0

    @classmethod
    def flops_at(cls, site: Site) -> int:
        return 0


def test_a_blueprint_that_is_no_graph_is_named() -> None:
    site = Site(Layout.FEATURES, 3, (), (3,))
    with pytest.raises(ExportError, match="cannot trace blueprint 'branching'.*slot 'here'"):
        trace(Seed(Branching(site, generator()), site), site, "here")


def test_it_works_where_esper_cannot_be_imported(tmp_path: Path) -> None:
    model = grown_classifier()
    plain, inputs = model.finalize(), random(3, 5)
    file = tmp_path / "model.pickle"
    file.write_bytes(pickle.dumps((plain, inputs, model(inputs).detach())))
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    words = [sys.executable, "-c", WITHOUT_ESPER, str(file)]
    done = subprocess.run(words, check=False, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) > 0
