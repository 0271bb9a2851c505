"""What a host with many slots costs: medians for S slots of which every second one holds a live seed, against S.

`python benchmarks/many_slots.py` prints two tables of milliseconds of one processor, one for a population of 8 networks
and one for an ordinary model with a grower, and how each part grows: the exponent of S over the upper half of its
range. Sizes take turns.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))


from zoo.training import Score

from esper.control.controller import Actions
from esper.control.policy import Policy, PolicySettings
from esper.control.rules import ActionBuilder
from esper.engine.observation import MaskTensors, Observation, list_features, make_mask_tensors
from esper.grower.evaluation import measure_model
from esper.grower.grower import Grower
from esper.grower.scores import parse_metrics
from esper.growth.attach import attach
from esper.lifecycle.rules import ActionMasks
from esper.lifecycle.table import SeedMeasurements
from esper.numerics.modules import Linear, Stackable
from esper.population.evaluation import evaluate
from esper.population.forward import forward, select_blended
from esper.population.learning import Batch, train
from esper.population.population import Population
from esper.rl.episodes import Episodes
from esper.tasks.datasets import DigitsSuite
from esper.train.workers import prepare_process
from open_rules import OPEN_RULES

SIZES = (4, 8, 16, 32, 64, 100)
UPPER_HALF = len(SIZES) // 2
NETWORKS, WIDTH = 8, 8
MINIBATCHES = 4
"""In one call of `train`."""
STEPS = 8
"""Decisions in one update of the policy."""
MODEL_WIDTH, CLASSES, BATCH = 16, 10, 64
"""Of the ordinary model and its data."""
ROUNDS = 5
SAMPLE = 0.01
"""Seconds that short parts are repeated for."""
CPU = torch.device("cpu")
Parts = Mapping[str, Callable[[], object]]
Seconds = NDArray[np.float64]


class DeepHost(Stackable):
    """Features ``[..., B, D]`` through narrow ReLU layers, without skips, to logits; ``layers.i`` are sites."""

    def __init__(self, features: int, widths: Sequence[int], classes: int, generator: torch.Generator) -> None:
        super().__init__()
        sizes = pairwise((features, *widths))
        self.layers = nn.Sequential(*(nn.Sequential(Linear(*size, generator), nn.ReLU()) for size in sizes))
        self.head = Linear(widths[-1], classes, generator)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.layers(inputs))


class DeepSuite(DigitsSuite):
    """Digits with as many layers and slots as asked for."""

    batches_per_step = MINIBATCHES
    batch_size = 32
    validation_size = 64

    def __init__(self, slots: int) -> None:
        self.sites = tuple(f"layers.{slot}" for slot in range(slots))
        self.host_widths = ((WIDTH,) * slots,)

    def build_host(self, widths: tuple[int, ...], generator: torch.Generator) -> DeepHost:
        return DeepHost(self.input_shape[0], widths, self.classes, generator)


class Planter:
    """Germinates in random free slots, until ``wanted`` of them are taken; then it waits."""

    name = "planter"

    def __init__(self, wanted: int, rng: np.random.Generator) -> None:
        self._left = wanted
        self._rng = rng

    def start(self, seeds: Sequence[int]) -> None:
        """No state."""

    def act(self, observation: Observation | None, masks: ActionMasks, state: None) -> tuple[Actions, None]:
        """One decision per network."""
        decisions = ActionBuilder(masks)
        if self._left:
            self._left -= 1
            possible = masks.blueprint.reshape(masks.environments, -1)
            drawn = np.where(possible, self._rng.random(possible.shape), -1.0).argmax(1)
            slot, blueprint = np.divmod(drawn, masks.blueprint.shape[2])
            decisions.germinate(slot, blueprint, np.ones(masks.environments, np.bool_))
        return decisions.actions, None


def population_parts(slots: int) -> Parts:
    """What a decision of a population consists of, each part ready to be timed."""
    suite, rng = DeepSuite(slots), np.random.default_rng(slots)
    episodes = Episodes(suite, suite.sample(NETWORKS, "train", rng), OPEN_RULES)
    population = episodes.population
    grow(population, Planter(slots // 2, rng))
    policy = Policy(list_features(False).spec, PolicySettings(advice=None), torch.Generator().manual_seed(0))
    observation, masks = episodes.observe(), episodes.legal_actions()
    tensors, memory = make_mask_tensors(masks, CPU), policy.initial_state(NETWORKS)
    actions, _ = Planter(1, rng).act(None, masks, None)
    batches = [minibatch(suite, episodes.validation, rng) for _ in range(MINIBATCHES)]
    grown = population.state

    def decide() -> None:
        population.state = grown
        population.decide(actions)
        population.state = grown

    return {
        "masks": lambda: make_mask_tensors(episodes.legal_actions(), CPU),
        "observation": episodes.observe,
        "policy, a decision": lambda: policy.act(observation, tensors, memory),
        "policy, an update": updating(policy, observation, tensors, torch.from_numpy(actions)),
        "attention, an update": attending(policy, slots),
        "lifecycle, a decision": decide,
        "training, a minibatch": lambda: train(population, batches),
        "validation, plain": lambda: plain_validation(population, episodes.validation),
        "validation, all counterfactuals": lambda: evaluate(population, episodes.validation),
    }


PER_CALL = {"policy, an update": STEPS, "attention, an update": STEPS, "training, a minibatch": MINIBATCHES}
"""By how much a part's time is divided."""


def grow(population: Population, planter: Planter) -> None:
    """Fill slots, and let the seeds blend in."""
    everywhere = np.ones(population.table.stage.shape, np.bool_)
    sound = replace(
        SeedMeasurements.none(*everywhere.shape),
        probed=everywhere,
        gradient_healthy=everywhere,
        contribution=everywhere.astype(np.float32),
    )
    for _ in range(population.table.slots):
        population.measurements = sound
        actions, _ = planter.act(None, population.legal_actions(), None)
        population.decide(actions)
    population.measurements = sound


def minibatch(suite: DeepSuite, examples: Batch, rng: np.random.Generator) -> Batch:
    """Some of the ``examples``."""
    rows = torch.from_numpy(rng.permutation(examples.labels.shape[1])[: suite.batch_size])
    return Batch(examples.inputs[:, rows], examples.labels[:, rows])


def updating(policy: Policy, observation: Observation, masks: MaskTensors, actions: Tensor) -> Callable[[], object]:
    """Forward and backward pass of the policy over some decisions."""

    def repeated(part: Tensor) -> Tensor:
        return part.expand(STEPS, *part.shape).contiguous()

    observations = Observation(*map(repeated, observation))
    stored, taken = MaskTensors(*map(repeated, masks)), repeated(actions)

    def update() -> None:
        found = policy.evaluate(observations, stored, taken, policy.initial_state(NETWORKS))
        (found.log_prob.sum() + found.entropy.sum() + found.value.sum()).backward()

    return update


def attending(policy: Policy, slots: int) -> Callable[[], object]:
    """The part of an update that is quadratic in S: each slot attends to each."""
    heads = policy.settings.attention_heads
    shape = (3, STEPS * NETWORKS, heads, slots, policy.settings.width // heads)
    projected = torch.randn(shape, generator=torch.Generator().manual_seed(0)).requires_grad_()
    return lambda: F.scaled_dot_product_attention(*projected).sum().backward()


@torch.inference_mode()
def plain_validation(population: Population, batch: Batch) -> Tensor:
    """The networks as they are."""
    population.execution.train(False)
    return forward(population, select_blended(population), batch.inputs)


def deep_model(slots: int) -> nn.Module:
    """An ordinary model: its layers see nothing of Esper."""
    layers = (nn.Sequential(nn.Linear(MODEL_WIDTH, MODEL_WIDTH), nn.ReLU()) for _ in range(slots))
    return nn.Sequential(*layers, nn.Linear(MODEL_WIDTH, CLASSES))


def model_parts(slots: int) -> Parts:
    """One model bare, with dormant slots, and with a grower and live seeds in half of the slots."""
    torch.manual_seed(slots)
    examples, labels = torch.randn(BATCH, MODEL_WIDTH), torch.randint(CLASSES, (BATCH,))
    bare, host, grown = (deep_model(slots) for _ in range(3))
    places = [str(slot) for slot in range(slots)]
    dormant, growing = (attach(model, places, example_input=examples) for model in (host, grown))
    plain, watched = torch.optim.AdamW(bare.parameters()), torch.optim.AdamW(growing.parameter_groups())
    grouped = torch.optim.AdamW(dormant.parameter_groups())
    planter = Planter(slots // 2, np.random.default_rng(slots))
    grower = Grower(growing, watched, controller=planter, evaluate=lambda _: Score(1.0, 0.5), rules=OPEN_RULES)
    for _ in range(slots):
        grower.step(train_loss=1.0)

    @torch.inference_mode()
    def validate(model: nn.Module) -> Score:
        return Score(float(F.cross_entropy(model(examples), labels)), 0.5)

    def training(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], object]:
        def step() -> None:
            optimizer.zero_grad()
            F.cross_entropy(model(examples), labels).backward()
            optimizer.step()

        return step

    every_slot = np.ones(grower.network.table.stage.shape, np.bool_)
    return {
        "forward pass, bare": lambda: bare(examples),
        "forward pass, dormant slots": lambda: dormant(examples),
        "training step, bare": training(bare, plain),
        "training step, dormant slots": training(dormant, grouped),
        "training step, live seeds, grower": training(growing, watched),
        "a decision": lambda: grower.step(train_loss=1.0),
        "validation, plain": lambda: validate(growing),
        "validation, all counterfactuals": lambda: measure_model(
            growing, grower.network.table, validate, parse_metrics, None, every_slot
        ),
    }


RATIOS = (
    ("attention, an update", "policy, an update"),
    ("validation, all counterfactuals", "validation, plain"),
    ("forward pass, dormant slots", "forward pass, bare"),
    ("training step, dormant slots", "training step, bare"),
)
"""Parts to compare."""


def timed(parts_by_size: Sequence[Parts]) -> Mapping[str, Seconds]:
    """Seconds per call ``[sizes, ROUNDS]`` of each part; after one round that does not count, sizes take turns."""
    names = list(parts_by_size[0])
    calls = {name: [max(int(SAMPLE / seconds(parts[name], 1)), 1) for parts in parts_by_size] for name in names}
    found: dict[str, Seconds] = {name: np.zeros((len(SIZES), ROUNDS)) for name in names}
    for turn in range(ROUNDS):
        for size, parts in enumerate(parts_by_size):
            for name in names:
                found[name][size, turn] = seconds(parts[name], calls[name][size]) / PER_CALL.get(name, 1)
    return found


def seconds(part: Callable[[], object], calls: int) -> float:
    """What the processor spends on one of several calls."""
    began = time.process_time()
    for _ in range(calls):
        part()
    return (time.process_time() - began) / calls


def exponent(medians: NDArray[np.float64]) -> float:
    """Slope of log time against log S over the upper half of the range."""
    return float(np.polyfit(np.log(SIZES[UPPER_HALF:]), np.log(medians[UPPER_HALF:]), 1)[0])


def table(title: str, found: Mapping[str, Seconds]) -> Table:
    """Medians in milliseconds, ratios, exponents, and how far quartiles lie from medians at the most."""
    shown = Table(title, *map(str, SIZES), "exponent", "spread", box=None)
    rows = [(name, times * 1000) for name, times in found.items()]
    rows += [(f"{name} / {base}", found[name] / found[base]) for name, base in RATIOS if name in found]
    for name, values in rows:
        low, middle, high = np.quantile(values, (0.25, 0.5, 0.75), axis=1)
        spread = np.max(np.maximum(middle - low, high - middle) / middle)
        shown.add_row(name, *(f"{one:.2f}" for one in middle), f"{exponent(middle):.2f}", f"{spread:.0%}")
    return shown


def main() -> None:
    prepare_process()
    torch.set_flush_denormal(True)  # gradients of narrow deep hosts vanish, and must not slow a size down by that
    console = Console(width=160)
    for title, parts in (
        (f"population of {NETWORKS}, ms", population_parts),
        ("one model, ms", model_parts),
    ):
        console.print(table(title, timed([parts(slots) for slots in SIZES])))
        console.print()


if __name__ == "__main__":
    main()
