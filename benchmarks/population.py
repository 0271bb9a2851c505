"""How fast populations train, beside a plain loop over separate modules that does the same work.

    python benchmarks/population.py [--suites tokens digits] [--environments 1 4 16 64] [--strategy auto] [--repeats 5]

Both take the same random actions, train on the same minibatches and measure every seed's counterfactual on the same
data. They take turns of a few decisions each, so that whatever else the machine does falls on both. Printed are
environment steps a second, one of which is one decision of one network: medians over the turns. One thread on the CPU.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from esper.control.controller import Actions
from esper.control.rules import Uniform
from esper.engine.gradients import update_gradient_health
from esper.engine.measurements import Evaluation, update_measurements
from esper.lifecycle.rules import legal_actions
from esper.lifecycle.table import SeedMeasurements
from esper.lifecycle.transitions import step
from esper.population.evaluation import evaluate
from esper.population.learning import Batch, TrainingStream, draw_shuffled_order, stack_data, train
from esper.population.population import STRATEGIES, Population, StrategyChoice
from esper.rl.episodes import Episodes
from esper.tasks.registry import get_suite
from esper.train.workers import prepare_process
from open_rules import OPEN_RULES
from reference_population import ReferencePopulation

LEAD = 6
"""Decisions taken without training before anything is timed, so that seeds are there."""
TURN = 3
"""Decisions that each side takes before it is the other's turn."""


@dataclass(frozen=True)
class Work:
    """Some decisions for every network, and the data of each of them."""

    script: list[Actions]
    batches: list[Batch]
    """The minibatches of a decision; all decisions have the same ones."""
    validation: Batch
    measurements: SeedMeasurements
    """What gates are told before each decision, so that what is legal does not hang on rounding."""

    @classmethod
    def drawn(cls, episodes: Episodes, decisions: int) -> Work:
        """Random legal actions for ``episodes`` that have just begun, and data of their instances."""
        shape = episodes.population.table.stage.shape
        everywhere = np.ones(shape, np.bool_)
        contribution = np.zeros(shape, np.float32)
        measurements = replace(
            SeedMeasurements.none(*shape), probed=everywhere, gradient_healthy=everywhere, contribution=contribution
        )
        suite, device = episodes.suite, episodes.device
        training = [suite.data(instance, "train") for instance in episodes.instances]
        rng, count = np.random.default_rng(0), suite.batches_per_step * suite.batch_size
        orders = [draw_shuffled_order(len(part), count, rng) for part in training]
        stream = TrainingStream(training, orders, suite.batch_size, max(map(len, training)), device)
        batches = list(stream.draw_batches(np.zeros(episodes.size, np.int64), suite.batches_per_step))
        validation = stack_data([suite.data(instance, "validation") for instance in episodes.instances], device)
        return cls(draw_script(episodes, measurements, decisions), batches, validation, measurements)


def draw_script(episodes: Episodes, measurements: SeedMeasurements, decisions: int) -> list[Actions]:
    population, controller = episodes.population, Uniform()
    rules, compatible, observation = population.config.rules, population.specs.compatible, episodes.observe()
    state, table = controller.start(range(episodes.size)), population.table
    script: list[Actions] = []
    for _ in range(decisions):
        actions, state = controller.act(observation, legal_actions(table, measurements, rules, compatible), state)
        table = step(table, measurements, actions, rules, compatible).table
        script.append(actions)
    return script


def advance(population: Population, actions: Actions, work: Work) -> None:
    """Let the population do the work of a decision."""
    population.measurements = work.measurements
    population.decide(actions)
    report = train(population, work.batches)
    evaluation = evaluate(population, work.validation)
    gradients = update_gradient_health(population.measurements, report.health, population.config.gradient_health)
    population.measurements = update_measurements(population.table, gradients, evaluation)


def advance_loop(population: ReferencePopulation, actions: Actions, work: Work) -> None:
    """Let separate modules do the same work, one network after the other."""
    population.measurements = work.measurements
    population.decide(actions)
    population.train(work.batches)
    evaluate_separately(population, work.validation)


@torch.inference_mode()
def evaluate_separately(population: ReferencePopulation, batch: Batch) -> Evaluation:
    """What `esper.population.evaluation.evaluate` measures, by one pass per network and one more per seed of it."""
    table = population.table
    loss, accuracy = np.zeros(table.environments), np.zeros(table.environments)
    by_accuracy, by_loss = np.full(table.stage.shape, np.nan), np.full(table.stage.shape, np.nan)
    for network in range(table.environments):
        own = batch.inputs[network], batch.labels[network]
        alphas = np.where(table.blended[network], table.alpha[network], np.float32(0))
        loss[network], accuracy[network] = measure(population, network, alphas, *own)
        for slot in table.owning[network].nonzero()[0].tolist():
            blended = table.blended[network, slot]
            toggled = alphas.copy()
            toggled[slot] = 0.0 if blended else 1.0
            other_loss, other_accuracy = measure(population, network, toggled, *own)
            sign = 1.0 if blended else -1.0
            by_loss[network, slot] = sign * (other_loss - loss[network])
            by_accuracy[network, slot] = sign * (accuracy[network] - other_accuracy)
    # Without the errors of contributions, which only the population computes, besides.
    unknown = np.full(table.stage.shape, np.nan)
    return Evaluation(loss, accuracy, by_accuracy, by_loss, unknown, unknown, np.ones(table.stage.shape, np.bool_))


def measure(
    population: ReferencePopulation,
    network: int,
    alphas: NDArray[np.float32],
    inputs: torch.Tensor,
    labels: torch.Tensor,
) -> tuple[float, float]:
    """Loss and accuracy of one network whose seeds have these alphas, ``[S]``."""
    model = population.models[network].eval()
    for slot, alpha in enumerate(alphas.tolist()):
        seed = population.seeds.get((network, slot))
        if seed is not None:
            seed.alpha.fill_(alpha)
    logits = model(inputs)
    model.train()
    return float(F.cross_entropy(logits, labels)), float((logits.argmax(-1) == labels).float().mean())


def compare(name: str, networks: int, repeats: int, strategy: StrategyChoice, device: torch.device) -> str:
    """A line of the table: how the population was run, its steps a second, the loop's, and the median ratio."""
    suite = get_suite(name)
    instances = suite.sample(networks, "train", np.random.default_rng(0))
    episodes = Episodes(suite, instances, OPEN_RULES, strategy=strategy, device=device)
    fast = episodes.population
    slow = ReferencePopulation(fast.config, fast.specs.networks)
    work = Work.drawn(episodes, LEAD + TURN * (1 + repeats))
    for actions in work.script[:LEAD]:
        for population in (fast, slow):
            population.measurements = work.measurements
            population.decide(actions)
    seconds, loop_seconds = list[float](), list[float]()
    for start in range(LEAD, len(work.script), TURN):
        laps = [now(device)]
        for actions in work.script[start : start + TURN]:
            advance(fast, actions, work)
        laps.append(now(device))
        for actions in work.script[start : start + TURN]:
            advance_loop(slow, actions, work)
        laps.append(now(device))
        seconds.append(laps[1] - laps[0])
        loop_seconds.append(laps[2] - laps[1])
    del seconds[0], loop_seconds[0]  # The first turn warms up: memory is allocated and kernels are chosen.
    rates = [networks * TURN / median(own) for own in (seconds, loop_seconds)]
    ratio = median(other / own for own, other in zip(seconds, loop_seconds, strict=True))
    return f"{name:<14}{networks:>9}{fast.strategy:>10}{rates[0]:>14.0f}{rates[1]:>9.0f}{ratio:>8.1f}"


def now(device: torch.device) -> float:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--suites", nargs="+", default=["tokens", "digits", "mnist1d_conv"])
    parser.add_argument("--environments", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--repeats", type=int, default=5, help="turns of each side")
    parser.add_argument("--strategy", choices=[*STRATEGIES, "auto"], default="stacked")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    asked = parser.parse_args()
    prepare_process()
    sys.stdout.write(f"{'suite':<14}{'networks':>9}{'run':>10}{'population/s':>14}{'loop/s':>9}{'ratio':>8}\n")
    for suite in asked.suites:
        for networks in asked.environments:
            sys.stdout.write(compare(suite, networks, asked.repeats, asked.strategy, asked.device) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
