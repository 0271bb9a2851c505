"""Forward passes in bfloat16, with parameters, optimizers, losses and promises in float32."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from esper.control.rules import Uniform
from esper.errors import ConfigError
from esper.lifecycle.actions import Blend
from esper.lifecycle.rules import Isolation
from esper.population.evaluation import evaluate, evaluate_committed
from esper.population.forward import forward, select_blended
from esper.population.learning import Batch, start_training, train
from esper.population.population import STRATEGIES, NetworkSpec, Population, PopulationConfig, Strategy
from esper.population.promise import PromiseMeter
from esper.population.shapley import attribute_networks
from esper.tasks.registry import get_suite
from open_rules import open_rules
from population.scenes import record_measurements, state_of

COUNT, EXAMPLES, DECISIONS = 4, 16, 4
ROUNDING = 0.05
"""What bfloat16, which keeps 8 binary digits, changes at most in losses of about 2 after some steps."""
PROMISE_ROUNDING = 0.15
"""In promises, shares of the loss that are solved for by few examples."""


@dataclass(frozen=True)
class Scene:
    """A population of one suite or host, and data."""

    config: PopulationConfig
    networks: list[NetworkSpec]
    classes: int

    def batch(self, seed: int) -> Batch:
        generator = torch.Generator().manual_seed(seed)
        shape = self.config.example_input.shape[1:]
        inputs = torch.randn(COUNT, EXAMPLES, *shape, generator=generator)
        return Batch(inputs, torch.randint(self.classes, (COUNT, EXAMPLES), generator=generator))

    def grown(self, strategy: Strategy = "stacked", **options: Any) -> tuple[Population, Population]:
        """Two populations, in bfloat16 and in float32, after the same decisions, with training."""
        config = replace(self.config, strategy=strategy, **options)
        rounded, exact = (Population(replace(config, bf16=bf16), self.networks) for bf16 in (True, False))
        controller = Uniform()
        state = controller.start(range(COUNT))
        for decision in range(DECISIONS):
            actions, state = controller.act(None, exact.legal_actions(), state)
            for population in (rounded, exact):
                population.decide(actions)
                report = train(population, [self.batch(10 * decision + number) for number in range(2)])
            # Gates see the same of both.
            record_measurements(exact, report, evaluate(exact, self.batch(10 * decision + 9)))
            rounded.measurements = exact.measurements
        return rounded, exact


RULES = open_rules(
    isolation=Isolation.SHADOW, cooldown=(1, 1, 1), min_training_steps=1, harm_tolerance=1.0, blends=tuple(Blend)
)


def suite_scene(name: str) -> Scene:
    suite = get_suite(name)
    chosen = suite.sample(COUNT, "train", np.random.default_rng(0))
    example = torch.zeros(2, *suite.input_shape)
    config = PopulationConfig(suite.template(), suite.sites, suite.blueprints, example, suite.optimizer, RULES)
    specs = [NetworkSpec(suite.host(one), one.widths, one.learning_rate, one.seed) for one in chosen]
    return Scene(config, specs, suite.classes)


def host_scene(*middle: Callable[[], nn.Module]) -> Scene:
    def host() -> nn.Module:
        first = (nn.Conv2d(3, 8, 3, padding=1), *(layer() for layer in middle), nn.ReLU())
        last = (nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))
        return nn.Sequential(*first, *last)

    with torch.random.fork_rng():
        torch.manual_seed(0)
        hosts = [host() for _ in range(COUNT)]
    blueprints = ("conv3x3", "depthwise", "conv1x1", "squeeze_excite", "bottleneck")
    config = PopulationConfig(host(), ("0", str(2 + len(middle))), blueprints, torch.zeros(2, 3, 6, 6), rules=RULES)
    return Scene(config, [NetworkSpec(one, (8, 8), 0.01, seed) for seed, one in enumerate(hosts)], 3)


SCENES: dict[str, Callable[[], Scene]] = {
    "stackable": lambda: suite_scene("tokens"),
    "stackable signals": lambda: suite_scene("mnist1d_conv"),
    "merged": host_scene,
    "vmapped": lambda: host_scene(lambda: nn.BatchNorm2d(8)),
    "drawing": lambda: host_scene(lambda: nn.Dropout2d(0.2)),
}


def logits(population: Population, inputs: Tensor) -> Tensor:
    population.execution.train(False)
    with torch.no_grad():
        return forward(population, select_blended(population), inputs)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", SCENES)
@pytest.mark.few(3)
def test_every_way_computes_in_bfloat16_and_keeps_float32(name: str, strategy: Strategy) -> None:
    scene = SCENES[name]()
    population, exact = scene.grown(strategy)
    held_back = scene.batch(99)

    # The last layer's outputs are exactly those that bfloat16 has; everything else is as fine as before.
    outputs = logits(population, held_back.inputs)
    assert outputs.dtype == torch.float32
    assert torch.equal(outputs, outputs.bfloat16().float())
    plain = logits(exact, held_back.inputs)
    assert not torch.equal(plain, plain.bfloat16().float())
    flat = population.flat
    assert {flat.values.dtype, flat.steps.dtype, *(m.dtype for m in flat.moments.values())} == {torch.float32}
    assert not torch.equal(flat.values, flat.values.bfloat16().float())

    # Everything that is measured is finite, and differs from what float32 gives by rounding.
    assert population.table.stage.tolist() == exact.table.stage.tolist()
    report, expected = (start_training(one, [scene.batch(98)]).fetch() for one in (population, exact))
    np.testing.assert_allclose(report.loss, expected.loss, atol=ROUNDING)
    due = np.ones(population.table.stage.shape, np.bool_)
    for measure in (
        lambda one: evaluate(one, held_back).loss,
        lambda one: evaluate(one, held_back).loss_contribution,
        lambda one: evaluate_committed(one, held_back).loss,
        lambda one: attribute_networks(one, held_back, np.random.default_rng(0)).values[1],
    ):
        np.testing.assert_allclose(measure(population), measure(exact), atol=ROUNDING)
    promised, expected = (PromiseMeter(one).measure(held_back, due).fitted for one in (population, exact))
    np.testing.assert_allclose(promised, expected, atol=PROMISE_ROUNDING)


def test_parts_of_a_minibatch_go_together_with_bfloat16() -> None:
    scene = SCENES["stackable"]()
    parts, _ = scene.grown(examples_per_pass=5, networks_per_pass=3)
    expected, _ = scene.grown()
    for network in range(COUNT):
        values, others = (state_of(one, network)["host.values"] for one in (parts, expected))
        torch.testing.assert_close(values, others, rtol=0, atol=0.01)


class Stubborn(nn.Linear):
    """Has no kernel for bfloat16, as recurrent layers on some processors."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        outputs = super().forward(input)
        if outputs.dtype == torch.bfloat16:
            raise RuntimeError("could not create a primitive")
        return outputs


def test_where_bfloat16_makes_no_sense_it_is_refused() -> None:
    config, networks = SCENES["merged"]().config, SCENES["merged"]().networks
    with pytest.raises(ConfigError, match=r"bf16 needs parameters in float32, and dtype is torch\.float64"):
        replace(config, bf16=True, dtype=torch.float64)
    stubborn = nn.Sequential(nn.Flatten(), Stubborn(108, 8), nn.ReLU(), nn.Linear(8, 3))
    config = replace(config, template=stubborn, slots=("2",), blueprints=("mlp",))
    Population(config, [NetworkSpec(stubborn, (8,), 0.01, 0)])
    with pytest.raises(ConfigError, match=r"bf16 .* device 'cpu': .* could not create a primitive; set it to false"):
        Population(replace(config, bf16=True), [NetworkSpec(stubborn, (8,), 0.01, 0)])
    with pytest.raises(ConfigError, match=r"bf16 does not go with device 'meta': torch has no autocast for it"):
        Population(replace(config, bf16=True, device=torch.device("meta")), networks)
