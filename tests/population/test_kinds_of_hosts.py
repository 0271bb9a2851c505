"""Hosts that normalise over a batch, drop out or keep buffers form populations too; a layer that cannot is named."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.profiler import ProfilerActivity, profile

from esper.control.rules import Uniform
from esper.errors import TaskError
from esper.lifecycle.actions import Blend, Op, make_action, make_wait_actions
from esper.lifecycle.rules import Isolation
from esper.lifecycle.table import Stage
from esper.population.evaluation import evaluate
from esper.population.forward import find_fastest_strategy
from esper.population.host_checks import draws_in_training
from esper.population.learning import Batch, start_training, train
from esper.population.population import NetworkSpec, Population, PopulationConfig, Strategy
from open_rules import open_rules
from population.scenes import (
    advance_both,
    assert_equal_parameters,
    assert_same_state,
    record_measurements,
    state_of,
)
from reference_population import ReferencePopulation

WIDTH, NETWORKS, EXAMPLES, CLASSES = 4, 4, 8, 3
Build = Callable[[], nn.Module]


class Noise(nn.Module):
    """Draws by torch, in training."""

    def forward(self, features: Tensor) -> Tensor:
        return features + torch.randn_like(features) if self.training else features


class Functional(nn.Module):
    """Dropout as a function."""

    def forward(self, features: Tensor) -> Tensor:
        return F.dropout(features, 0.3, self.training)


class LayerDrop(nn.Module):
    """Left out at random as a whole: Python code that depends on a value."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, features: Tensor) -> Tensor:
        return features if self.training and torch.rand(()) < 0.5 else self.linear(features)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(1, WIDTH, num_layers=2, dropout=0.3, batch_first=True)

    def forward(self, features: Tensor) -> Tensor:
        return self.gru(features.unsqueeze(-1))[0][:, -1]


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, WIDTH, dropout=0.3, batch_first=True)

    def forward(self, features: Tensor) -> Tensor:
        return self.layer(features.unsqueeze(1)).squeeze(1)


DRAWING: dict[str, Build] = {
    "dropout": lambda: nn.Dropout(0.3),
    "alpha dropout": lambda: nn.AlphaDropout(0.3),
    "dropout of whole channels": lambda: nn.Dropout1d(0.3),
    "alpha dropout of whole channels": lambda: nn.FeatureAlphaDropout(0.3),
    "randomised slopes": nn.RReLU,
    "dropout as a function": Functional,
    "noise": Noise,
    "a layer that is left out at random": LayerDrop,
    "dropout between recurrent layers": Recurrent,
    "attention with dropout": Attending,
    "dropout and batch normalisation": lambda: nn.Sequential(nn.Dropout(0.3), nn.BatchNorm1d(WIDTH)),
}


class Mixing(nn.Module):
    """Attention by torch's function, which has fused kernels; its norm makes vmap needed."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, features: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norm(features)).view(len(features), 1, 2, 3 * WIDTH // 2).chunk(3, -1)
        return F.scaled_dot_product_attention(query, key, value, is_causal=True).flatten(1)


class Counting(nn.Module):
    """Reads a buffer as a Python number, which vmap cannot."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, features: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return features / (1 + float(self.calls) % 3)


KEEPING: dict[str, Build] = {
    "batch normalisation": lambda: nn.BatchNorm1d(WIDTH),
    "batch normalisation without running statistics": lambda: nn.BatchNorm1d(WIDTH, track_running_stats=False),
    "batch normalisation with a cumulative average": lambda: nn.BatchNorm1d(WIDTH, momentum=None),
    "spectral norm": lambda: spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "spectral norm by hooks": lambda: nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "weight norm": lambda: weight_norm(nn.Linear(WIDTH, WIDTH)),
    "group normalisation": lambda: nn.GroupNorm(2, WIDTH),
    "no dropout": lambda: nn.Dropout(0.0),
    "attention": Mixing,
    "a number that is read": Counting,
}


def build_host(layer: Build) -> nn.Module:
    return nn.Sequential(
        nn.Linear(2, WIDTH), layer(), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES)
    )


def configure(
    layer: Build, *, strategy: Strategy = "stacked", isolation: Isolation = Isolation.NONE, rate: float = 0.05
) -> tuple[PopulationConfig, list[NetworkSpec]]:
    """Different networks with one layer of that kind, made from a seed."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        hosts = [build_host(layer) for _ in range(NETWORKS)]
    rules = open_rules(
        cooldown=(1, 1, 1), min_training_steps=1, harm_tolerance=1.0, isolation=isolation, blends=tuple(Blend)
    )
    config = PopulationConfig(
        copy.deepcopy(hosts[0]),
        ("2", "4"),
        ("mlp", "gate", "norm", "input_skip"),
        torch.zeros(2, 2),
        rules=rules,
        strategy=strategy,
        dtype=torch.float64,
    )
    return config, [NetworkSpec(host, (WIDTH, WIDTH), rate, seed) for seed, host in enumerate(hosts)]


def draw_batch(seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(NETWORKS, EXAMPLES, 2, generator=generator, dtype=torch.float64)
    return Batch(inputs, torch.randint(CLASSES, (NETWORKS, EXAMPLES), generator=generator))


def choose(batch: Batch, networks: slice) -> Batch:
    return Batch(batch.inputs[networks], batch.labels[networks])


def plant(networks: range) -> np.ndarray:
    """Network 1 plants; in the others nothing grows, so that whether there is an isolated pass depends on it."""
    actions = make_wait_actions(len(networks))
    for row, network in enumerate(networks):
        if network == 1:
            actions[row] = make_action(Op.GERMINATE, slot=0)
    return actions


@pytest.mark.parametrize("isolation", [Isolation.NONE, Isolation.SHADOW])
@pytest.mark.parametrize("name", DRAWING)
@pytest.mark.few(4)
def test_what_a_host_draws_is_its_own(name: str, isolation: Isolation) -> None:
    config, networks = configure(DRAWING[name], isolation=isolation)
    before = torch.get_rng_state()
    whole = Population(config, networks)
    assert whole.strategy == "looped"
    in_parts = Population(replace(config, networks_per_pass=3), networks)
    alone = [Population(config, [network]) for network in networks]
    pieces = [(whole, slice(0, NETWORKS)), (in_parts, slice(0, NETWORKS))]
    pieces += [(population, slice(row, row + 1)) for row, population in enumerate(alone)]
    for decision in range(3):
        for population, rows in pieces:
            chosen = range(rows.start, rows.stop)
            population.decide(plant(chosen) if decision == 0 else make_wait_actions(len(chosen)))
            report = train(population, [choose(draw_batch(10 * decision + number), rows) for number in range(2)])
            record_measurements(population, report, evaluate(population, choose(draw_batch(99), rows)))
        torch.randn(5)  # somebody else draws meanwhile
    if isolation is Isolation.SHADOW:
        assert (whole.table.stage == Stage.TRAINING).any(), "the test means to have an isolated pass"
    for row, population in enumerate(alone):
        assert_same_state(state_of(whole, row), state_of(population, 0))
        assert_same_state(state_of(in_parts, row), state_of(population, 0))
    torch.set_rng_state(before)


@pytest.mark.parametrize("name", DRAWING)
@pytest.mark.few(4)
def test_every_network_and_every_step_draws_anew(name: str) -> None:
    # The same network four times, and one minibatch again and again, from which it does not learn.
    config, networks = configure(DRAWING[name], rate=0.0)
    equal = [networks[0]._replace(seed=seed) for seed in range(NETWORKS)]
    population, batch = Population(config, equal), draw_batch(0)
    batch = Batch(batch.inputs[:1].expand(NETWORKS, -1, -1), batch.labels[:1].expand(NETWORKS, -1))
    state = torch.get_rng_state()
    losses = np.stack([start_training(population, [batch]).fetch().loss for _ in range(4)])
    assert torch.equal(torch.get_rng_state(), state), "training took from the global generator"
    # A few masks of few entries may be equal by chance.
    assert len(np.unique(losses)) >= (2 if name == "a layer that is left out at random" else 12)
    again = Population(config, equal)
    np.testing.assert_array_equal(losses, np.stack([train(again, [batch]).loss for _ in range(4)]))


@pytest.mark.parametrize("strategy", ["stacked", "looped"])
@pytest.mark.parametrize("name", KEEPING)
@pytest.mark.few(4)
def test_hosts_with_buffers_equal_a_loop_over_modules(name: str, strategy: Strategy) -> None:
    config, networks = configure(KEEPING[name], strategy=strategy)
    fast, slow = Population(config, networks), ReferencePopulation(config, networks)
    controller = Uniform()
    states = controller.start(list(range(NETWORKS)))
    for decision in range(6):
        actions, states = controller.act(None, fast.legal_actions(), states)
        batches = [draw_batch(10 * decision + number) for number in range(2)]
        held_back = draw_batch(1000 + decision)
        measured = advance_both(fast, slow, actions, batches, held_back)
        assert_equal_parameters(fast, slow, 1e-6)
        losses = [F.cross_entropy(*pair) for pair in zip(slow.logits(held_back.inputs), held_back.labels, strict=True)]
        np.testing.assert_allclose(measured.loss, torch.stack(losses).numpy(), rtol=1e-6)
    assert {kind.blend for kind in fast.banks} == {*Blend}, "the test means to grow seeds of all blends"


def test_attention_of_all_networks_is_one_operation() -> None:
    """vmap has no rule for fused attention, and would compute it network by network."""
    config, networks = configure(KEEPING["attention"])
    counts: list[dict[str, int]] = []
    for number in (2, NETWORKS):
        population = Population(config, networks[:number])
        batch = choose(draw_batch(0), slice(0, number))
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            train(population, [batch])
        counts.append({event.key: event.count for event in profiler.key_averages() if "attention" in event.key})
    assert counts[0] == counts[1]
    assert not any("flash" in name or "efficient" in name for name in counts[0])


@pytest.mark.parametrize("name", ["batch normalisation", "dropout"])
def test_timing_both_strategies_leaves_no_trace(name: str) -> None:
    population = Population(*configure({**DRAWING, **KEEPING}[name]))
    before, state = [state_of(population, row) for row in range(NETWORKS)], torch.get_rng_state()
    chosen = find_fastest_strategy(population, draw_batch(0).inputs)
    assert chosen == "looped" or name not in DRAWING
    for row, expected in enumerate(before):
        assert_same_state(state_of(population, row), expected)
    assert torch.equal(torch.get_rng_state(), state)


class Restless(nn.Module):
    """Draws in any mode."""

    def forward(self, features: Tensor) -> Tensor:
        return F.dropout(features, 0.3)


class Private(nn.Module):
    """Draws from a generator that all networks would share."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)

    def __deepcopy__(self, _: object) -> Private:
        return Private()

    def forward(self, features: Tensor) -> Tensor:
        return features + torch.rand(features.shape, generator=self.generator).to(features)


class Numpy(nn.Module):
    def forward(self, features: Tensor) -> Tensor:
        return features * np.random.rand()  # noqa: NPY002


class Python(nn.Module):
    def forward(self, features: Tensor) -> Tensor:
        return features * random.random()


class Averaging(nn.Module):
    """Keeps an average that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.average = torch.zeros(())

    def forward(self, features: Tensor) -> Tensor:
        self.average = 0.9 * self.average + 0.1 * features.detach().mean()
        return features - self.average


class Replacing(nn.Module):
    """Puts a new tensor in the place of its buffer."""

    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(()))

    def forward(self, features: Tensor) -> Tensor:
        if self.training:
            self.average = 0.9 * self.average + 0.1 * features.detach().mean()
        return features - self.average


REFUSED: dict[str, tuple[Build, str]] = {
    "noise in any mode": (Restless, r"layer '1' \(Restless\) draws random numbers in evaluation mode.*training mode"),
    "a generator": (Private, r"layer '1' \(Private\) computes something else in a second pass.*without a generator"),
    "numpy": (Numpy, r"layer '1' \(Numpy\) draws from a global generator of numpy or Python.*draw by torch"),
    "Python": (Python, r"layer '1' \(Python\) draws from a global generator of numpy or Python.*draw by torch"),
    "a state": (Averaging, r"layer '1' \(Averaging\) computes something else.*keep what changes in buffers"),
    "a replaced buffer": (Replacing, r"buffer '1.average', which would be lost: write into the buffer"),
    "a failure": (
        lambda: nn.Sequential(nn.Unflatten(1, (WIDTH, 1)), nn.InstanceNorm1d(WIDTH)),
        "the host fails in evaluation mode on 3 random examples: ValueError: Expected more than 1 spatial element",
    ),
    "a failure in training": (
        lambda: nn.Sequential(
            nn.Flatten(0),
            nn.Unflatten(0, (1, -1)),
            nn.BatchNorm1d(3 * WIDTH),
            nn.Unflatten(1, (3, -1)),
            nn.Flatten(0, 1),
        ),
        "the host fails in training mode on 3 random examples: ValueError: Expected more than 1 value per channel",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_host_that_no_population_can_run_is_refused_by_its_layer(name: str) -> None:
    layer, message = REFUSED[name]
    state = torch.get_rng_state()
    with pytest.raises(TaskError, match=message):
        Population(*configure(layer))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("name", [*DRAWING, *KEEPING])
def test_checking_a_host_changes_nothing(name: str) -> None:
    host = build_host({**DRAWING, **KEEPING}[name])
    before, state = copy.deepcopy(host.state_dict()), torch.get_rng_state()
    assert draws_in_training(host, torch.zeros(2, 2)) == (name in DRAWING)
    assert all(torch.equal(value, before[key]) for key, value in host.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert host.training


def test_tiny_groups_amplify_rounding_alike_in_both_ways() -> None:
    """A group of two channels is normalised to about -1 and 1: its gradient is 300-fold where they nearly agree.

    So rounding grows in training, whichever way is taken; neither is nearer to the exact gradients than the other.
    """
    config, networks = configure(lambda: nn.GroupNorm(WIDTH // 2, WIDTH), rate=1.0)
    sgd = config.optimizer.model_copy(update={"name": "sgd", "momentum": 0.0})
    errors: dict[str, float] = {}
    exact = Population(replace(config, optimizer=sgd), networks)
    train(exact, [draw_batch(0)])
    for strategy in ("stacked", "looped"):
        rounded = replace(config, optimizer=sgd, strategy=strategy, dtype=torch.float32)
        population, batch = Population(rounded, networks), draw_batch(0)
        train(population, [Batch(batch.inputs.float(), batch.labels)])
        errors[strategy] = float((population.host.values - exact.host.values).detach().abs().max())
    assert 0.3 < errors["stacked"] / errors["looped"] < 3
