"""The work that a population and a plain loop over separate modules are both given, and how each does it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from esper.control.controller import Actions
from esper.control.rules.simple import Uniform
from esper.lifecycle.legality import legal_actions
from esper.lifecycle.table import Evidence
from esper.lifecycle.transitions import step
from esper.rl.episodes import Episodes
from esper.training.evaluation import Evaluation, evaluate, remember
from esper.training.learning import Batch, train
from esper.training.population import Population
from esper.training.reference import ReferencePopulation
from esper.training.streams import TrainingStream, shuffled_order, stacked

LIFECYCLE, TRAINING, EVALUATION = "lifecycle", "training", "evaluation"
"""The parts of a decision's work."""


@dataclass(frozen=True)
class Work:
    """Some decisions for every network, and the data of each of them."""

    script: list[Actions]
    batches: list[Batch]
    """The minibatches of a decision; all decisions have the same ones."""
    validation: Batch
    evidence: Evidence
    """What gates are told before each decision, so that what is legal does not hang on rounding."""

    @classmethod
    def drawn(cls, episodes: Episodes, decisions: int, seed: int) -> Work:
        """Random legal actions for ``episodes`` that have just begun, and data of their instances."""
        evidence = _sound_evidence(episodes.population.table.stage.shape)
        suite, device = episodes.suite, episodes.device
        training = [suite.data(instance, "train") for instance in episodes.instances]
        rng, count = np.random.default_rng(seed), suite.batches_per_step * suite.batch_size
        orders = [shuffled_order(len(part), count, rng) for part in training]
        stream = TrainingStream(training, orders, suite.batch_size, max(map(len, training)), device)
        validation = stacked([suite.data(instance, "validation") for instance in episodes.instances], device)
        batches = list(stream.take(np.zeros(episodes.size, np.int64), suite.batches_per_step))
        return cls(_script(episodes, evidence, decisions, seed), batches, validation, evidence)


def _sound_evidence(shape: tuple[int, ...]) -> Evidence:
    everywhere = np.ones(shape, np.bool_)
    return Evidence(everywhere, everywhere, np.zeros(shape, np.float32), np.zeros(shape, np.int16))


def _script(episodes: Episodes, evidence: Evidence, decisions: int, seed: int) -> list[Actions]:
    population, controller = episodes.population, Uniform()
    rules, compatible, observation = population.plan.rules, population.roster.compatible, episodes.observe()
    state, table = controller.start([seed + network for network in range(episodes.size)]), population.table
    script: list[Actions] = []
    for _ in range(decisions):
        actions, state = controller.act(observation, legal_actions(table, evidence, rules, compatible), state)
        table = step(table, evidence, actions, rules, compatible).table
        script.append(actions)
    return script


class Stopwatch:
    """Seconds by part. On an accelerator a lap ends when the work handed to it does."""

    def __init__(self, device: torch.device) -> None:
        self.seconds: dict[str, float] = {}
        self._device = device
        self._last = 0.0

    def start(self) -> None:
        """Begin a lap."""
        self._last = self._now()

    def lap(self, part: str) -> None:
        """End a lap, add its time to ``part`` and begin the next one."""
        now = self._now()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self._last
        self._last = now

    def add(self, other: Stopwatch) -> None:
        """Add another watch's times, part by part."""
        for part, seconds in other.seconds.items():
            self.seconds[part] = self.seconds.get(part, 0.0) + seconds

    @property
    def total(self) -> float:
        """Seconds of all laps."""
        return sum(self.seconds.values())

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def advance(population: Population, script: Sequence[Actions], work: Work, watch: Stopwatch) -> None:
    """Let the population do the work of some decisions."""
    watch.start()
    for actions in script:
        population.evidence = work.evidence
        population.decide(actions)
        watch.lap(LIFECYCLE)
        report = train(population, work.batches)
        watch.lap(TRAINING)
        measured = evaluate(population, work.validation)
        watch.lap(EVALUATION)
        remember(population, report, measured)
        watch.lap(LIFECYCLE)


def advance_loop(population: ReferencePopulation, script: Sequence[Actions], work: Work, watch: Stopwatch) -> None:
    """Let separate modules do the same work, one network after the other."""
    watch.start()
    for actions in script:
        population.evidence = work.evidence
        population.decide(actions)
        watch.lap(LIFECYCLE)
        population.train(work.batches)
        watch.lap(TRAINING)
        evaluate_separately(population, work.validation)
        watch.lap(EVALUATION)


@torch.inference_mode()
def evaluate_separately(population: ReferencePopulation, batch: Batch) -> Evaluation:
    """What `esper.training.evaluation.evaluate` measures, by one pass per network and one more per seed of it."""
    table = population.table
    loss, accuracy = np.zeros(table.environments), np.zeros(table.environments)
    by_accuracy, by_loss = np.full(table.stage.shape, np.nan), np.full(table.stage.shape, np.nan)
    for network in range(table.environments):
        own = batch.inputs[network], batch.labels[network]
        alphas = np.where(table.blended[network], table.alpha[network], np.float32(0))
        loss[network], accuracy[network] = _measured(population, network, alphas, *own)
        for slot in table.owning[network].nonzero()[0].tolist():
            blended = table.blended[network, slot]
            toggled = alphas.copy()
            toggled[slot] = 0.0 if blended else 1.0
            other_loss, other_accuracy = _measured(population, network, toggled, *own)
            sign = 1.0 if blended else -1.0
            by_loss[network, slot] = sign * (other_loss - loss[network])
            by_accuracy[network, slot] = sign * (accuracy[network] - other_accuracy)
    return Evaluation(loss, accuracy, by_accuracy, by_loss, np.ones(table.stage.shape, np.bool_))


def _measured(
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
