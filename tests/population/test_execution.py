"""Four ways to run networks: each does what torch does with one network after the other."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from esper.control.rules import Uniform
from esper.lifecycle.actions import Blend
from esper.numerics.modules import Stackable
from esper.population.evaluation import evaluate
from esper.population.execution import (
    FunctionalModule,
    can_merge,
    enable_merging,
    make_stacked_call,
    merge_networks,
    split_networks,
)
from esper.population.learning import Batch, train
from esper.population.parameters import ParameterLayout, SeedKind
from esper.population.population import NetworkSpec, Population, PopulationConfig
from esper.tasks.image_files import FIVE, FOUR, FULL, THREE, PhotoHost, PhotoSuite
from esper.tasks.registry import get_suite
from open_rules import open_rules
from population.scenes import (
    VALIDATION,
    Draws,
    advance_both,
    assert_equal_parameters,
    instances,
    networks,
    plan,
)
from reference_population import ReferencePopulation


class Host(nn.Module):
    """Nested parameters, one of them shared by two layers, and a buffer that is written to."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3))
        self.tied = nn.Linear(3, 3)
        self.tied.weight = self.inner[0].weight
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        return self.tied(self.inner(inputs)) + self.calls


def test_it_returns_what_functional_call_does_and_passes_gradients() -> None:
    host, inputs = Host(), torch.arange(6.0).view(2, 3)
    functional = FunctionalModule(copy.deepcopy(host))
    for scale in (1.0, 2.0):
        parameters = {name: (scale * own.detach()).requires_grad_() for name, own in host.named_parameters()}
        counts = {"calls": torch.tensor(scale)}, {"calls": torch.tensor(scale)}
        ours = functional(parameters, counts[0], inputs)
        theirs = functional_call(host, (parameters, counts[1]), (inputs,))
        assert torch.equal(ours, theirs)
        assert counts[0] == counts[1] == {"calls": scale + 1}
        assert torch.equal(functional(parameters, {"calls": torch.tensor(scale)}, inputs), theirs)
        gradients = [torch.autograd.grad(outputs.sum(), list(parameters.values())) for outputs in (ours, theirs)]
        assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))


def test_until_it_is_handed_anything_the_module_computes_with_what_it_had() -> None:
    host = Host()
    expected = copy.deepcopy(host)(torch.ones(2, 3))
    FunctionalModule(host)
    assert torch.equal(host(torch.ones(2, 3)), expected)


class Unstackable(nn.Module):
    """A host of which only its calls for one network are known to be right."""

    def __init__(self, host: nn.Module) -> None:
        super().__init__()
        self.host = host

    def forward(self, inputs: Tensor) -> Tensor:
        return self.host(inputs)


def hosts_of(name: str, count: int) -> tuple[nn.Module, list[nn.Module], Tensor]:
    suite = get_suite(name)
    chosen = suite.sample(count, "train", np.random.default_rng(3))
    inputs = torch.randn(count, 6, *suite.input_shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    template = suite.template().double()
    return template, [suite.host(one).double() for one in chosen], inputs


@pytest.mark.parametrize("name", ["tokens", "digits", "mnist1d_conv", "language"])
def test_stackable_hosts_equal_vmap_and_their_loop(name: str) -> None:
    template, hosts, inputs = hosts_of(name, 5)
    assert isinstance(template, Stackable)
    shape = ParameterLayout.from_module(template)
    values = torch.stack([shape.flatten_module(host) for host in hosts]).requires_grad_()
    buffers = {key: torch.stack([host.get_buffer(key) for host in hosts]) for key, _ in template.named_buffers()}
    direct = make_stacked_call(template)(shape.unflatten(values), buffers, inputs)
    under = {f"host.{key}": tensor for key, tensor in shape.unflatten(values).items()}
    held = {f"host.{key}": tensor for key, tensor in buffers.items()}
    mapped = make_stacked_call(Unstackable(template))(under, held, inputs)
    alone = torch.stack([host(own) for host, own in zip(hosts, inputs, strict=True)])
    torch.testing.assert_close(direct, mapped, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(direct, alone, rtol=1e-12, atol=1e-12)
    weights = torch.randn(direct.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    gradients = [torch.autograd.grad((output * weights).sum(), values)[0] for output in (direct, mapped)]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)


def test_a_population_of_unstackable_hosts_learns_alike() -> None:
    chosen = instances(8)
    shared = plan(open_rules(blends=tuple(Blend)))
    slots = tuple(f"host.{slot}" for slot in shared.slots)
    wrapped = [network._replace(host=Unstackable(network.host)) for network in networks(chosen)]
    mapped = Population(replace(shared, template=Unstackable(shared.template), slots=slots), wrapped)
    stacked, draws, grown = Population(shared, networks(chosen)), Draws(chosen), set[SeedKind]()
    for _ in range(6):
        actions = draws.actions(stacked.legal_actions())
        batches, held_back = [draws.batch() for _ in range(3)], draws.batch(VALIDATION)
        for population in (stacked, mapped):
            population.decide(actions)
            train(population, batches)
        ours, theirs = (evaluate(population, held_back) for population in (stacked, mapped))
        np.testing.assert_allclose(ours.loss, theirs.loss, rtol=1e-9)
        torch.testing.assert_close(stacked.flat.values, mapped.flat.values, rtol=1e-9, atol=1e-9)
        grown |= stacked.banks.keys()
    assert {kind.blend for kind in grown} == {*Blend}


TOLERANCE = {"rtol": 1e-9, "atol": 1e-9}
NETWORKS, EXAMPLES = 5, 6
IMAGE, SIGNAL, TOKENS = (2, 7, 6), (2, 11), (4, 3)


class Mixing(nn.Module):
    """Lets every example see all others."""

    def forward(self, features: Tensor) -> Tensor:
        return features - features.mean(0)


class Doubling(nn.Linear):
    """Not what its base class computes."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return 2 * super().forward(input)


class Scaling(nn.Module):
    """A parameter outside of any layer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, features: Tensor) -> Tensor:
        return self.scale * features


class Shifting(nn.Module):
    """A buffer, which stacks like a parameter."""

    shift: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("shift", torch.ones(3))

    def forward(self, features: Tensor) -> Tensor:
        return self.linear(features) + self.shift


class Transposing(nn.Module):
    """A linear layer over tokens whose batch is not the first axis."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, features: Tensor) -> Tensor:
        return self.linear(features.transpose(0, 1)).transpose(0, 1)


class Asking(nn.Module):
    """Looks for its own parameters, of which a population's host has none."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, features: Tensor) -> Tensor:
        return self.linear(features.to(next(self.parameters()).dtype))


class Twice(nn.Module):
    """One layer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = self.first

    def forward(self, features: Tensor) -> Tensor:
        return self.second(self.first(features).relu())


class Tied(nn.Module):
    """Two layers that share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight

    def forward(self, features: Tensor) -> Tensor:
        return self.second(self.first(features).relu())


MERGING: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "linear": (nn.Linear(3, 2), (3,)),
    "linear without bias, on tokens": (nn.Linear(3, 2, bias=False), TOKENS),
    "one layer under two names": (Twice(), (3,)),
    "layers that share a weight": (Tied(), (3,)),
    "conv1d": (nn.Conv1d(2, 3, 3), SIGNAL),
    "conv1d, strided, padded, dilated": (nn.Conv1d(2, 3, 3, stride=2, padding=2, dilation=2), SIGNAL),
    "conv1d without bias, same": (nn.Conv1d(2, 3, 3, padding="same", bias=False), SIGNAL),
    "conv1d in groups": (nn.Conv1d(2, 4, 3, groups=2), SIGNAL),
    "conv2d": (nn.Conv2d(2, 3, 3), IMAGE),
    "conv2d, oblong": (nn.Conv2d(2, 3, (3, 2), stride=(2, 1), padding=(0, 1), dilation=(1, 2)), IMAGE),
    "conv2d without bias, in groups": (nn.Conv2d(2, 4, 3, groups=2, bias=False), IMAGE),
    "chain": (nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 3)), IMAGE),
}
REFUSED: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "a buffer": (Shifting(), (3,)),
    "normalisation over the batch": (nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), (3,)),
    "examples mixed in training": (nn.BatchNorm1d(3, affine=False, track_running_stats=False), (3,)),
    "examples mixed": (nn.Sequential(nn.Linear(3, 3), Mixing()), (3,)),
    "chance": (nn.Sequential(nn.Linear(3, 3), nn.Dropout()), (3,)),
    "another layer's parameters": (nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3)), (3,)),
    "parameters of its own": (Scaling(), (3,)),
    "a subclass": (Doubling(3, 3), (3,)),
    "padding that is not zero": (nn.Conv1d(2, 3, 3, padding=1, padding_mode="circular"), SIGNAL),
    "a look at its own parameters": (Asking(), (3,)),
    "the batch not first": (Transposing(), TOKENS),
}


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("name", MERGING)
@pytest.mark.parametrize("networks", [1, NETWORKS])
def test_merged_hosts_equal_their_loop_in_values_and_gradients(name: str, networks: int) -> None:
    host, shape = MERGING[name]
    plain = copy.deepcopy(host).double()
    assert can_merge(plain, torch.zeros(2, *shape, dtype=torch.float64))
    host = copy.deepcopy(plain)
    enable_merging(host)
    call = FunctionalModule(host)
    weights = {key: drawn(networks, *own.shape).requires_grad_() for key, own in plain.named_parameters()}
    inputs = drawn(networks, EXAMPLES, *shape, seed=1)
    together = split_networks(call(weights, {}, merge_networks(inputs)), networks)
    rows = [{key: stacked[network] for key, stacked in weights.items()} for network in range(networks)]
    alone = torch.stack([functional_call(copy.deepcopy(plain), own, (x,)) for own, x in zip(rows, inputs, strict=True)])
    torch.testing.assert_close(together, alone, **TOLERANCE)
    direction = drawn(*alone.shape, seed=2)
    ours, theirs = (torch.autograd.grad((out * direction).sum(), list(weights.values())) for out in (together, alone))
    torch.testing.assert_close(ours, theirs, **TOLERANCE)
    torch.testing.assert_close(call(rows[0], {}, inputs[0]), alone[0], **TOLERANCE)


@pytest.mark.parametrize("name", REFUSED)
def test_hosts_that_cannot_merge_are_found_out(name: str) -> None:
    host, shape = REFUSED[name]
    before = torch.get_rng_state()
    assert not can_merge(host, torch.zeros(2, *shape))
    assert torch.equal(torch.get_rng_state(), before), "the trial took from the global generator"


def images() -> nn.Module:
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU()),
        nn.Sequential(nn.Conv2d(4, 4, 3, stride=2, padding=1), nn.ReLU()),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 3),
    )


def signals() -> nn.Module:
    return nn.Sequential(
        nn.Sequential(nn.Conv1d(1, 4, 5, stride=2, padding=2), nn.Tanh()),
        nn.Conv1d(4, 4, 3, padding="same", bias=False),
        nn.Flatten(),
        nn.Linear(16, 3),
    )


def photo_host(stages: tuple[str, ...]) -> PhotoHost:
    return PhotoHost(3, FULL, 10, stages, torch.Generator().manual_seed(0))


PHOTO_STAGES = (THREE, FIVE, FOUR, ("late",), THREE)
SHAPES = {"images": (1, 5, 5), "signals": (1, 8), "photos": (3, 32, 32)}
SPATIAL = ("norm", "conv1x1", "depthwise", "conv3x3", "gate")


def population_of(name: str, strategy: str) -> tuple[PopulationConfig, list[NetworkSpec]]:
    if name == "photos":
        hosts, template = [photo_host(stages) for stages in PHOTO_STAGES], photo_host(FIVE)
        slots, widths = PhotoSuite.sites, FULL
    else:
        build = images if name == "images" else signals
        hosts, template = [build() for _ in range(NETWORKS)], build()
        slots, widths = ("0", "1"), (4, 4)
    for seed, host in enumerate(hosts):
        with torch.no_grad():
            for parameter in host.parameters():
                parameter.copy_(drawn(*parameter.shape, seed=seed) / 2)
    shared = PopulationConfig(
        template,
        slots,
        SPATIAL,
        torch.zeros(2, *SHAPES[name]),
        rules=open_rules(cooldown=(1, 1, 1), min_training_steps=1, harm_tolerance=1.0, blends=tuple(Blend)),
        strategy=strategy,
        dtype=torch.float64,
    )
    return shared, [NetworkSpec(host, widths, 0.01 * (1 + seed), seed) for seed, host in enumerate(hosts)]


def batch_of(name: str, seed: int) -> Batch:
    labels = torch.randint(3, (NETWORKS, EXAMPLES), generator=torch.Generator().manual_seed(seed))
    return Batch(drawn(NETWORKS, EXAMPLES, *SHAPES[name], seed=seed), labels)


@pytest.mark.parametrize("name", ["images", "signals", pytest.param("photos", marks=pytest.mark.landing)])
@pytest.mark.parametrize("strategy", ["stacked", "looped"])
def test_growing_convolutional_populations_equal_a_loop_over_modules(name: str, strategy: str) -> None:
    shared, networks = population_of(name, strategy)
    assert can_merge(shared.template, shared.example_input)
    fast, slow = Population(shared, networks), ReferencePopulation(shared, networks)
    controller, grown = Uniform(), set[SeedKind]()
    state = controller.start(list(range(NETWORKS)))
    for decision in range(6):
        actions, state = controller.act(None, fast.legal_actions(), state)
        batches = [batch_of(name, 10 * decision + number) for number in range(2)]
        held_back = batch_of(name, 1000 + decision)
        measured = advance_both(fast, slow, actions, batches, held_back)
        assert_equal_parameters(fast, slow)
        losses = [F.cross_entropy(*pair) for pair in zip(slow.logits(held_back.inputs), held_back.labels, strict=True)]
        np.testing.assert_allclose(measured.loss, torch.stack(losses).numpy(), rtol=1e-9)
        shares, fast.shares_prefixes = fast.shares_prefixes, False
        separate = evaluate(fast, held_back)
        fast.shares_prefixes = shares
        np.testing.assert_allclose(measured.loss_contribution, separate.loss_contribution, rtol=1e-7, atol=1e-9)
        grown |= fast.banks.keys()
    assert len({kind.blueprint for kind in grown}) >= 4, "the test means to mix blueprints"
    assert {kind.blend for kind in grown} == {*Blend}, "and blends"
