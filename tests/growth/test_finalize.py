"""What `finalize` returns: an ordinary module that computes what the growing model does with its fossils."""

import copy
import os
import pickle
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

import esper
from esper.errors import ConfigError, ExportError, SlotError
from esper.growth.attach import attach
from esper.growth.blueprints.registry import Blueprint
from esper.growth.finalize import trace_seed
from esper.growth.model import GrowingModel
from esper.growth.persist import load, save
from esper.growth.site import Layout, Site
from esper.growth.slot import Seed
from esper.lifecycle.actions import Blend
from factories import draw_normal, fossilize, generator, plant
from growth.blueprint_cases import CASES, Branching
from growth.plain_hosts import Convolutional, Passing, Tokenwise, classifier

BLENDED = [
    pytest.param(
        *case.values, tuple(Blend)[index % len(Blend)], id=f"{case.id}-{tuple(Blend)[index % len(Blend)].name}"
    )
    for index, case in enumerate(CASES)
]

WITHOUT_ESPER = """
import pickle, sys
sys.modules["esper"] = None  # every import of it fails
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
    torch.manual_seed(0)
    model = attach(classifier(), ["0", "2"], draw_normal(4, 5))
    fossilize(model, "0", "input_skip")
    fossilize(model, "2", "mlp", Blend.MULTIPLY)
    return model


def assert_close(computed: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(computed, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.landing
@pytest.mark.parametrize(("kind", "site", "blend"), BLENDED)
def test_every_blueprint_becomes_plain_at_every_layout(kind: type[Blueprint], site: Site, blend: Blend) -> None:
    torch.manual_seed(0)
    place = nn.Conv1d(site.width, site.width, 1) if site.layout is Layout.SEQUENCE else nn.Identity()
    host = Passing(site.input_shape, site.shape, place)
    model = attach(host, {"place": [kind.name]}, draw_normal(4, *site.input_shape), causal=site.causal)
    bare = model(draw_normal(3, *site.input_shape))
    fossilize(model, "place", kind.name, blend)
    plain = model.finalize()
    assert not torch.allclose(plain(draw_normal(3, *site.input_shape)), bare, atol=1e-3)
    assert b"esper" not in pickle.dumps(plain)
    for size in (1, 7):
        inputs = draw_normal(size, *site.input_shape, seed=size)
        assert_close(plain(inputs), model(inputs))


class Stages(nn.Module):
    """Runs all its children, and returns every output beside the last."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, tokens: Tensor) -> tuple[Tensor, list[Tensor]]:
        outputs: list[Tensor] = []
        for stage in self.children():
            tokens = stage(tokens)
            outputs.append(tokens)
        return tokens, outputs


class SelfAttention(nn.MultiheadAttention):
    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        return super().forward(tokens, tokens, tokens)


class AfterTuple(nn.Module):
    """Reads all that its layer returns."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        features, rest = self.layer(tokens)
        return self.head(features) + sum(part.mean() for part in rest)


TUPLES: dict[str, Callable[[], nn.Module]] = {
    "rnn": lambda: nn.RNN(8, 8, batch_first=True),
    "gru": lambda: nn.GRU(8, 8, batch_first=True),
    "lstm": lambda: nn.LSTM(8, 4, bidirectional=True, batch_first=True),
    "attention": lambda: SelfAttention(8, 2, batch_first=True),
    "a module that runs its children": Stages,
}


@pytest.mark.parametrize("blueprint", ["lowrank", "token_mix", "norm", "input_skip"])
@pytest.mark.parametrize("layer", TUPLES)
def test_what_grew_in_a_tuple_becomes_plain(layer: str, blueprint: str) -> None:
    torch.manual_seed(0)
    model = attach(AfterTuple(TUPLES[layer]()), {"layer": [blueprint]}, draw_normal(4, 5, 8))
    bare = model(draw_normal(3, 5, 8))
    fossilize(model, "layer", blueprint)
    plain = model.finalize()
    assert not torch.allclose(plain(draw_normal(3, 5, 8)), bare, atol=1e-3)
    for network in (plain, copy.deepcopy(plain), pickle.loads(pickle.dumps(plain))):
        for size in (1, 7):
            inputs = draw_normal(size, 5, 8, seed=size)
            assert_close(network(inputs), model(inputs))


@pytest.mark.parametrize("blueprint", ["attention", "token_conv", "gate", "input_skip"])
def test_the_length_may_vary_where_the_blueprint_allows_it(blueprint: str) -> None:
    model = attach(Tokenwise(), {"first": [blueprint]}, draw_normal(3, 4, 5), causal=False)
    fossilize(model, "first", blueprint)
    plain = model.finalize()
    for length in (2, 9):
        assert_close(plain(draw_normal(3, length, 5)), model(draw_normal(3, length, 5)))


def test_causal_attention_stays_causal_at_any_length() -> None:
    model = attach(Tokenwise(), {"first": ["attention"]}, draw_normal(3, 4, 5), causal=True)
    fossilize(model, "first", "attention")
    plain, inputs = model.finalize(), draw_normal(3, 9, 5)
    before = plain(inputs)
    assert_close(before, model(inputs))
    inputs[:, -1] += 1
    assert torch.equal(plain(inputs)[:, :-1], before[:, :-1])


@pytest.mark.parametrize("shape", [(2, 8, 5), (8, 1, 5)])
def test_another_length_is_refused_where_the_blueprint_does_not_allow_it(shape: tuple[int, ...]) -> None:
    model = attach(Tokenwise(), {"first": ["token_mix"]}, draw_normal(3, 4, 5), causal=False)
    fossilize(model, "first", "token_mix")
    with pytest.raises(RuntimeError, match="shape"):
        model.finalize()(draw_normal(*shape))


def test_without_fossils_it_is_a_copy_of_the_host_which_is_itself_again_when_released() -> None:
    torch.manual_seed(0)
    host = Convolutional()
    images = draw_normal(2, 1, 4, 4)
    expected = host(images)
    model = attach(host, ["block"], images)
    plant(model, "block", "conv3x3")
    plain = model.finalize(unfinished="drop")
    assert plain.state_dict().keys() == host.state_dict().keys()
    assert not re.search(b"esper|Fossil", pickle.dumps(plain))
    assert torch.equal(plain(images), expected)
    assert not torch.allclose(model(images), expected, atol=1e-3)  # the model itself keeps its seed
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
    torch.manual_seed(0)
    model = attach(Convolutional(), ["block"], draw_normal(2, 1, 4, 4))
    fossilize(model, "block", "conv3x3", Blend.GATE)
    plain = model.finalize().train()
    before = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    plain(draw_normal(8, 1, 4, 4)).square().mean().backward()
    optimizer.step()
    same = {name for name, tensor in plain.state_dict().items() if torch.equal(tensor, before[name])}
    assert same == {"block.fossil_conv3x3.alpha"}
    model.train()(draw_normal(8, 1, 4, 4))
    assert_close(plain.norm.running_mean, model.host.norm.running_mean)
    plain.eval()
    assert torch.equal(plain(draw_normal(8, 1, 4, 4))[:2], plain(draw_normal(8, 1, 4, 4)[:2]))


def test_models_and_copies_own_their_parameters() -> None:
    model, inputs = grown_classifier(), draw_normal(3, 5)
    plain = model.finalize()
    expected, other = model(inputs), copy.deepcopy(plain)
    assert torch.equal(other(inputs), plain(inputs))
    with torch.no_grad():
        for name in ("2.fossil_mlp.alpha", "0.fossil_input_skip.weight"):
            other.state_dict()[name].zero_()
    assert not torch.equal(other(inputs), plain(inputs))
    assert_close(plain(inputs), expected)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.zero_()
    assert torch.equal(model(inputs), expected)


def test_it_keeps_no_data() -> None:
    plain = grown_classifier().finalize()
    size = len(pickle.dumps(plain))
    plain(draw_normal(1000, 5).requires_grad_() * 2)  # neither a leaf nor small
    assert len(pickle.dumps(plain)) == size
    with pytest.raises(RuntimeError):
        plain(draw_normal(3, 4))
    assert len(pickle.dumps(plain)) == size


def test_the_type_of_numbers_may_change() -> None:
    model = grown_classifier()
    plain = model.finalize().double()
    assert_close(plain(draw_normal(3, 5).double()).float(), model(draw_normal(3, 5)))
    with torch.autocast("cpu", torch.bfloat16):
        assert plain.float()(draw_normal(3, 5)).dtype == model(draw_normal(3, 5)).dtype == torch.bfloat16


def test_it_compiles_as_one_graph() -> None:
    model = grown_classifier()
    compiled = torch.compile(model.finalize(), backend="eager", fullgraph=True)
    assert_close(compiled(draw_normal(3, 5)), model(draw_normal(3, 5)))


@pytest.mark.filterwarnings("ignore:'block_copy' in slot")
def test_a_copy_of_a_block_compiles_with_its_host_as_one_graph() -> None:
    model, features = copying(nn.Linear(4, 4), lambda block, features: block(features))
    compiled = torch.compile(model.finalize(), backend="eager", fullgraph=True)
    assert_close(compiled(features), model(features))


def test_the_input_may_come_by_keyword() -> None:
    model = attach(Tokenwise(), {"first": ["input_skip"]}, {"tokens": draw_normal(3, 4, 5), "scale": torch.tensor(2.0)})
    fossilize(model, "first", "input_skip")
    arguments = {"tokens": draw_normal(6, 4, 5), "scale": torch.tensor(0.5)}
    assert_close(model.finalize()(**arguments), model(**arguments))


def test_what_was_finalized_may_grow_again() -> None:
    once = grown_classifier().finalize()
    model = attach(once, ["0", "2"], draw_normal(4, 5))
    fossilize(model, "0", "input_skip", Blend.GATE)
    fossilize(model, "2", "mlp")
    twice = model.finalize()
    assert_close(twice(draw_normal(3, 5)), model(draw_normal(3, 5)))
    assert not torch.allclose(twice(draw_normal(3, 5)), grown_classifier()(draw_normal(3, 5)), atol=1e-3)
    assert {"2.fossil_mlp.inner", "2.fossil_mlp_.inner"} < twice.state_dict().keys()


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


class Naming(Asking):
    """Runs what it holds by name."""

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
    model = attach(host, ["1"], draw_normal(4, 5))
    fossilize(model, "1", blueprint)
    plain = model.finalize()
    for one in (plain, copy.deepcopy(plain), pickle.loads(pickle.dumps(plain))):
        assert_close(one(draw_normal(3, 5)), model(draw_normal(3, 5)))
    assert any("fossil_" in name for name, _ in plain.named_parameters())


def test_layers_that_are_put_together_anew_keep_what_grew() -> None:
    model = attach(nn.Sequential(classifier(), nn.ReLU(), nn.Linear(3, 3)), ["0", "0.2", "2"], draw_normal(4, 5))
    for slot in ("0", "0.2", "2"):
        fossilize(model, slot, "mlp")
    plain = model.finalize()
    expected = model(draw_normal(3, 5))
    assert_close(nn.Sequential(*plain.children())(draw_normal(3, 5)), expected)
    parts = [*plain[0].children(), *list(plain.children())[1:]]
    assert_close(nn.Sequential(*parts)(draw_normal(3, 5)), expected)


def test_parts_that_read_the_networks_input_are_refused_without_it() -> None:
    plain = grown_classifier().finalize()
    with pytest.raises(KeyError, match="reads the input of the whole network, which has not been called"):
        nn.Sequential(*plain.children())(draw_normal(3, 5))
    with pytest.raises(KeyError, match="reads the input of the whole network"):
        plain[0](draw_normal(3, 5))


def test_a_fresh_host_and_the_saved_structure_take_the_state_of_a_plain_model(tmp_path: Path) -> None:
    model = grown_classifier()
    save(model, tmp_path)
    trained = model.finalize()
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.add_(0.1)
    again = load(tmp_path, classifier(), draw_normal(4, 5)).finalize()
    assert_close(again(draw_normal(3, 5)), model(draw_normal(3, 5)))
    again.load_state_dict(trained.state_dict())
    assert torch.equal(again(draw_normal(3, 5)), trained(draw_normal(3, 5)))


def test_a_blueprint_that_is_no_graph_is_named() -> None:
    site = Site(Layout.FEATURES, 3, (), (3,))
    with pytest.raises(ExportError, match="cannot trace blueprint 'branching'.*slot 'here'"):
        trace_seed(Seed(Branching(site, generator()), site), site, "here")


@pytest.mark.landing
def test_it_works_where_esper_cannot_be_imported(tmp_path: Path) -> None:
    model = grown_classifier()
    plain, inputs = model.finalize(), draw_normal(3, 5)
    file = tmp_path / "model.pickle"
    file.write_bytes(pickle.dumps((plain, inputs, model(inputs).detach())))
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    words = [sys.executable, "-c", WITHOUT_ESPER, str(file)]
    done = subprocess.run(words, check=False, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) > 0


class Stochastic(nn.Module):
    """A block that drops out and gathers statistics."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.linear, self.norm, self.dropout = nn.Linear(width, width), nn.BatchNorm1d(width), nn.Dropout(0.5)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.dropout(self.norm(self.linear(inputs)).tanh())


class AskingStochastic(Stochastic):
    """Which may run whatever it holds, for all that is known."""

    def count(self) -> int:
        return len(list(self.children()))


def grown_stochastic(block: nn.Module, alpha: float = 0.5) -> GrowingModel:
    """In training mode, with a learned copy of the block."""
    torch.manual_seed(0)
    model = attach(nn.Sequential(nn.Linear(5, 6), block, nn.Linear(6, 3)), {"1": ["block_copy"]}, draw_normal(8, 5))
    plant(model, "1", "block_copy", alpha=alpha)
    model.slots["1"].fossilize()
    model.train()(draw_normal(8, 5))
    return model


IN_TURN = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5))


@pytest.mark.parametrize("block", [Stochastic(), IN_TURN], ids=lambda one: type(one).__name__)
@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.filterwarnings("ignore:'block_copy' in slot")
def test_a_copy_of_a_block_drops_out_and_gathers_statistics_in_the_plain_model(block: nn.Module, trained: bool) -> None:
    model = grown_stochastic(copy.deepcopy(block)).train(trained)
    plain = model.finalize()
    assert {part.training for part in plain.modules()} == {trained}
    plain.train()
    model.train()
    first, second = ([seeded_call(one, draw_normal(8, 5), seed=seed) for one in (model, plain)] for seed in (0, 1))
    assert torch.equal(*first)
    assert torch.equal(*second)
    assert not torch.equal(first[0], second[0])
    model.eval(), plain.eval()
    assert torch.equal(plain(draw_normal(8, 5)), model(draw_normal(8, 5)))


def seeded_call(network: nn.Module, *inputs: Tensor, seed: int) -> Tensor:
    torch.manual_seed(seed)
    return network(*inputs)


class Encoder(nn.Module):
    """Torch's own blocks, which drop out, with a mask or not."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.3, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, inputs: Tensor, padding: Tensor | None = None) -> Tensor:
        return self.encoder(inputs, src_key_padding_mask=padding)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.filterwarnings("ignore:'block_copy' in slot")
def test_a_copy_of_torchs_own_block_drops_out_and_takes_masks_in_the_plain_model(masked: bool) -> None:
    torch.manual_seed(0)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    arguments = (draw_normal(2, 5, 6), padding)
    model = attach(Encoder(), {"encoder.layers.0": ["block_copy"]}, arguments if masked else arguments[0])
    plant(model, "encoder.layers.0", "block_copy", alpha=0.5)
    model.slots["encoder.layers.0"].fossilize()
    plain = model.train().finalize()
    computed, expected = (seeded_call(one, *arguments, seed=1) for one in (plain, model))
    assert torch.equal(computed, expected)
    model.eval(), plain.eval()
    assert_close(plain(*arguments), model(*arguments))
    assert torch.equal(plain(*arguments), plain(*arguments))


def test_a_copy_of_a_block_that_may_run_its_children_is_refused() -> None:
    with pytest.raises(ExportError, match=r"counts with 0\.50 behind a module that runs all its children"):
        grown_stochastic(AskingStochastic()).finalize()


def updated(host: nn.Module, name: str) -> GrowingModel:
    """With a low-rank update that is not zero."""
    model = attach(host, {name: ["lora_4"]}, draw_normal(4, 5))
    fossilize(model, name, "lora_4")
    return model


def test_a_forward_that_copies_share_is_found_out() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(5, 6)
    original = layer.forward
    layer.forward = lambda inputs: original(inputs) + 0
    with pytest.raises(ExportError, match="added to the weight of '0'"):
        updated(nn.Sequential(layer, nn.ReLU()), "0").finalize()


@pytest.mark.parametrize(
    ("put", "freeze_host"),
    [
        (parametrizations.weight_norm, False),
        (parametrizations.weight_norm, True),
        (lambda layer: prune.l1_unstructured(layer, "weight", 0.5), True),
    ],
    ids=["weight norm", "weight norm, frozen", "pruning"],
)
def test_a_weight_that_is_no_parameter_any_more_is_refused(
    put: Callable[[nn.Module], nn.Module], freeze_host: bool
) -> None:
    model = esper.attach(classifier(), {"0": ["lora"]}, draw_normal(4, 5), freeze_host=freeze_host)
    fossilize(model, "0", "lora")
    cost = str(model.summary())
    put(model.host[0])
    assert str(model.summary()) == cost
    with pytest.raises(ExportError, match="the weight or bias of '0' is now computed from other tensors.*remove that"):
        model.finalize()


def test_an_update_of_a_model_without_an_example_is_added_with_a_warning() -> None:
    model = pickle.loads(pickle.dumps(updated(classifier(), "0")))
    with pytest.warns(UserWarning, match="whether the layer behind '0' alone reads its weight cannot be found out"):
        plain = model.finalize()
    assert_close(plain(draw_normal(3, 5)), model(draw_normal(3, 5)))


class Counting(nn.Module):
    """Draws random numbers and counts its calls, also in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 6)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, inputs: Tensor) -> dict[str, Tensor]:
        self.calls += 1
        return {
            "features": self.layer(inputs + torch.randn_like(inputs)),
            "order": inputs.argsort(),
            "calls": self.calls,
        }


def test_comparing_outputs_leaves_no_trace() -> None:
    torch.manual_seed(0)
    model = updated(Counting(), "layer")
    before, expected = model.calls.clone(), torch.random.get_rng_state()
    plain = model.train().finalize()
    assert model.calls == plain.calls == before
    assert torch.equal(torch.random.get_rng_state(), expected)
    assert plain.training
    assert model.host.layer.training


class Jumping(nn.Module):
    """Calls its blocks by number, and returns what ``end`` makes of that and the input."""

    def __init__(self, end: Callable[[Tensor, Tensor], object]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(2)])
        self.head, self.end = nn.Linear(5, 2000), end

    def forward(self, inputs: Tensor) -> object:
        return self.end(self.head(self.blocks[1](self.blocks[0](inputs))), inputs)


@pytest.mark.parametrize(
    "end",
    [
        lambda outputs, _: (outputs - 9).softmax(-1),
        lambda outputs, _: 1e-6 * outputs,
        lambda outputs, inputs: {"inputs": inputs * 1, "outputs": outputs},
        lambda outputs, inputs: [{"of": [inputs.sum(), outputs]}],
        lambda outputs, _: torch.cat([outputs, torch.full_like(outputs, -torch.inf)]),
    ],
    ids=["many classes", "small", "not the first", "nested", "masked"],
)
def test_blocks_that_are_not_run_in_turn_are_found_out_whatever_the_outputs(
    end: Callable[[Tensor, Tensor], object],
) -> None:
    torch.manual_seed(0)
    model = attach(Jumping(end), {"blocks.1": ["block_copy"]}, draw_normal(4, 5))
    plant(model, "blocks.1", "block_copy", alpha=1.0)
    model.slots["blocks.1"].fossilize()
    with pytest.raises(ExportError, match="not run as the next one"):
        model.finalize()


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32, torch.float64])
def test_numbers_that_are_coarse_may_be_rounded(kind: torch.dtype) -> None:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(3)]
    host = nn.Sequential(nn.Sequential(*blocks), nn.Linear(32, 50)).to(kind)
    model = attach(host, {"0.0": ["block_copy"], "1": ["lora_4"]}, draw_normal(20, 32).to(kind))
    for name, blueprint in (("0.0", "block_copy"), ("1", "lora_4")):
        plant(model, name, blueprint, alpha=1.0)
        model.slots[name].fossilize()
    plain, inputs = model.finalize(), draw_normal(20, 32, seed=3).to(kind)
    assert len(plain[0]) == 4
    difference = (plain(inputs) - model(inputs)).abs().max()
    assert difference <= 8 * torch.finfo(kind).eps * model(inputs).abs().max()
    if kind is torch.bfloat16:
        assert difference > 1e-3 * model(inputs).abs().max()  # or this were no test


class Mixed(nn.Module):
    """Takes two inputs of different types, and computes in a third."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layer = nn.Linear(5, 5), nn.Linear(5, 6).bfloat16()
        self.second = nn.Linear(4, 6, dtype=torch.float64)

    def forward(self, inputs: Tensor, others: Tensor) -> Tensor:
        return self.layer(self.first(inputs).bfloat16()).float() + self.second(others).float()


def test_arguments_of_several_types_keep_theirs() -> None:
    torch.manual_seed(0)
    arguments = (draw_normal(4, 5), draw_normal(4, 4).double())
    model = attach(Mixed(), {"layer": ["lora_4"]}, arguments)
    fossilize(model, "layer", "lora_4")
    torch.testing.assert_close(model.finalize()(*arguments), model(*arguments), rtol=0.0, atol=0.05)
    assert updated(classifier(), "0").double().finalize()(draw_normal(3, 5).double()).dtype == torch.float64


class Scaled(nn.Module):
    """A block with an argument beside its features."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, features: Tensor, scale: Tensor) -> Tensor:
        return features + scale * self.linear(features)


class ScaledByPlace(Scaled):
    def forward(self, *arguments: Tensor) -> Tensor:
        return super().forward(*arguments)


class Calling(nn.Module):
    """Calls a block in a way of its own."""

    def __init__(self, block: nn.Module, call: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.block, self.call = block, call

    def forward(self, features: Tensor) -> Tensor:
        return self.call(self.block, features)


def copying(block: nn.Module, call: Callable[[nn.Module, Tensor], Tensor]) -> tuple[GrowingModel, Tensor]:
    """With a copy of the block behind it, which counts by half."""
    features = draw_normal(3, 4)
    model = esper.attach(Calling(block, call), {"block": ["block_copy"]}, features).eval()
    model.slots["block"].germinate("block_copy", alpha=0.5)
    model.slots["block"].fossilize()
    return model, features


@pytest.mark.parametrize(
    ("block", "call"),
    [
        (ScaledByPlace, lambda block, features: block(features, features.abs())),
        (Scaled, lambda block, features: block(features, features.abs())),
        (Scaled, lambda block, features: block(features, scale=features.abs())),
        (Scaled, lambda block, features: block(features=features, scale=features.abs())),
    ],
    ids=["whatever", "place", "both", "keyword"],
)
def test_a_copy_of_a_block_is_called_as_the_block_is(
    block: type[nn.Module], call: Callable[[nn.Module, Tensor], Tensor]
) -> None:
    model, features = copying(block(), call)
    with pytest.warns(UserWarning, match="runs behind its block"):
        plain = model.finalize()
    assert torch.allclose(plain(features), model(features), atol=1e-6)
    with model.without_growth():
        assert not torch.allclose(plain(features), model(features), atol=1e-2)


def test_a_copy_of_a_block_that_is_called_in_another_order_is_found_out() -> None:
    """It is given what comes first, which is not its first argument."""
    model, _ = copying(Scaled(), lambda block, features: block(scale=features.abs(), features=features))
    with (
        pytest.warns(UserWarning, match="runs behind its block"),
        pytest.raises(ExportError, match="a copy of the block 'block' does not do what its seed did"),
    ):
        model.finalize()


# What `finalize` does with seeds that are neither fossilized nor pruned, in all ways in which they may live.


SITES: dict[str, tuple[nn.Module, Tensor]] = {
    "features": (nn.Linear(4, 4), draw_normal(3, 4)),
    "tokens": (nn.Linear(4, 4), draw_normal(3, 5, 4)),
    "sequence": (nn.Conv1d(4, 4, 3, padding=1), draw_normal(3, 4, 6)),
    "image": (nn.Conv2d(4, 4, 3, padding=1), draw_normal(3, 4, 6, 6)),
}


def planted(layout: str, blend: Blend, alpha: float) -> tuple[GrowingModel, Tensor]:
    """A model with one live seed that changes the output, and inputs; blueprints take turns."""
    host, inputs = SITES[layout]
    model = attach(nn.Sequential(copy.deepcopy(host)), ["0"], inputs)
    offered = model.slots["0"].blueprints
    plant(model, "0", offered[(3 * blend + 2 * (alpha == 1)) % len(offered)], blend, alpha)
    return model.eval(), inputs


@pytest.mark.parametrize("alpha", [1 / 3, 1.0])
@pytest.mark.parametrize("blend", Blend)
@pytest.mark.parametrize("layout", SITES)
def test_live_seeds_are_folded_in_as_they_are(layout: str, blend: Blend, alpha: float):
    model, inputs = planted(layout, blend, alpha)
    expected = model(inputs)
    with pytest.warns(UserWarning, match=rf"kept \w+ in '0' \(alpha {alpha:.2f}, contribution not measured\)"):
        plain = model.finalize()
    torch.testing.assert_close(plain(inputs), expected, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(model.finalize(unfinished="drop")(inputs), expected, atol=1e-4)


@pytest.mark.parametrize(
    ("alpha", "contribution", "kept"),
    [(0.5, None, True), (0.5, float("nan"), True), (0.5, 0.0, True), (0.5, -0.001, False), (0.0, 0.2, False)],
)
def test_seeds_stay_that_count_and_do_no_harm(alpha: float, contribution: float | None, kept: bool):
    model, inputs = planted("features", Blend.ADD, alpha)
    seed = model.seeds["0"]
    seed.contribution = contribution
    with pytest.warns(UserWarning, match=f"{'kept' if kept else 'dropped'} {seed.blueprint.name} in '0'") as warned:
        plain = model.finalize()
    assert len(warned) == 1
    assert warned[0].filename == __file__, "the warning points to who called finalize"
    assert torch.equal(plain(inputs), model.finalize(unfinished="drop")(inputs)) != kept


def test_a_model_with_unfinished_seeds_may_be_refused():
    model, inputs = planted("features", Blend.GATE, 0.5)
    with pytest.raises(SlotError, match=r"unfinished seeds: \w+ in '0' \(alpha 0.50.*finish\(\)"):
        model.finalize(unfinished="raise")
    with pytest.raises(ConfigError, match="unfinished is 'kept': give 'keep', 'drop' or 'raise'"):
        model.finalize(unfinished="kept")
    model.slots["0"].fossilize()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for plain in (model.finalize(), model.finalize(unfinished="drop"), model.finalize(unfinished="raise")):
            torch.testing.assert_close(plain(inputs), model(inputs), atol=1e-6, rtol=1e-6)
