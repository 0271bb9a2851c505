"""Growth engines over both backends, each with the training in between: what is tested of one holds for both."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from esper.control.rules import Uniform
from esper.engine.engine import GrowthConfig, GrowthEngine
from esper.engine.governor import GovernorSettings
from esper.engine.measurements import TrainingReport
from esper.engine.observation import Observation
from esper.grower.backend import ModelTraining
from esper.growth.promise import PromiseSettings
from esper.lifecycle.transitions import Step
from esper.numerics.arrays import Bools, Ints
from esper.numerics.devices import Deferred
from esper.population.backend import PopulationBackend
from esper.population.learning import start_training
from esper.population.population import Population
from factories import Loop
from open_rules import open_rules
from population.scenes import SUITE, VALIDATION, Draws, instances, networks, plan

QUICK = open_rules(cooldown=(1, 1, 1), min_training_steps=1, harm_tolerance=1.0)
CALM = GovernorSettings(lead=1.0, multiple=1e9, sigmas=1e9)
"""Only what is not finite is trouble: these networks learn very little."""
CONFIG = GrowthConfig(governor=CALM, promise=PromiseSettings(every=3, first=2, examples=8), counterfactual_every=2)
HORIZON = 30


@dataclass
class Cycle:
    """An engine, and whoever trains its networks."""

    engine: GrowthEngine
    train: Callable[[], Deferred[TrainingReport]]
    """Trains all networks a little."""
    poison: Callable[[int], None]
    """Makes parameters of one network not a number."""
    remake: Callable[[GrowthConfig], GrowthEngine]
    """Makes another engine over the same backend."""
    _controller: Uniform = field(default_factory=Uniform)
    _state: Any = None

    @property
    def size(self) -> int:
        return self.engine.backend.size

    @property
    def everyone(self) -> Bools:
        return np.ones(self.size, np.bool_)

    def observe(self) -> Observation:
        numbers = np.ones(self.size)
        return self.engine.observe(self.engine.decisions / HORIZON, HORIZON, 0.0 * numbers, 100 * numbers)

    def choose(self) -> Ints:
        """Random legal actions, after a look at the networks as controllers take one."""
        if self._state is None:
            self._state = self._controller.start(list(range(self.size)))
        observation, masks = self.observe(), self.engine.legal_actions()
        actions, self._state = self._controller.act(observation, masks, self._state)
        return actions

    def turn(self, actions: Ints | None = None) -> Step:
        """One whole cycle, with random actions unless some are given."""
        step = self.engine.apply(self.choose() if actions is None else actions)
        self.engine.assess(self.train(), self.everyone)
        self.engine.measure_promises(self.everyone)
        return step


def population_cycle(config: GrowthConfig = CONFIG) -> Cycle:
    """Three networks as one program."""
    chosen = instances(3)
    population, draws = Population(plan(QUICK), networks(chosen)), Draws(chosen)
    backend = PopulationBackend(population, SUITE, draws.batch(VALIDATION), lambda: draws.batch(8))

    def poison(network: int) -> None:
        with torch.no_grad():
            population.host.values[network] = torch.nan

    return Cycle(
        GrowthEngine(backend, config),
        lambda: start_training(population, [draws.batch(), draws.batch()]),
        poison,
        lambda other: GrowthEngine(backend, other),
    )


def model_cycle(config: GrowthConfig = CONFIG) -> Cycle:
    """One model that a plain loop trains."""
    loop = Loop("look", horizon=HORIZON, growth=config, rules=QUICK, seed=3)
    grower, backend = loop.grower, loop.grower.backend
    recorder = grower.backend.promise_recorder
    assert recorder is not None

    def train() -> Deferred[TrainingReport]:
        grower.backend.gradients.clear()
        grower.backend.gradients.watch(loop.model.seeds.values())
        recorder.clear()
        recorder.set_recording(True)
        loop.model.train()
        loss = F.cross_entropy(loop.model(loop.inputs), loop.labels)
        loop.optimizer.zero_grad()
        loss.backward()
        loop.optimizer.step()
        recorder.set_recording(False)
        report = ModelTraining(np.array([loss.item()]), np.array([np.nan]), *grower.backend.gradients.report())
        return Deferred((), lambda: report)

    def poison(network: int) -> None:
        with torch.no_grad():
            next(loop.model.host.parameters())[0] = torch.nan

    return Cycle(
        GrowthEngine(backend, config.model_copy()),
        train,
        poison,
        lambda other: GrowthEngine(backend, other),
    )


CYCLES: dict[str, Callable[..., Cycle]] = {"population": population_cycle, "model": model_cycle}
