"""Networks in situations of a test's choosing, and what controllers see and may do there."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from esper.control.policy import OpPrior, Policy, PolicySettings
from esper.engine.history import History
from esper.engine.observation import FeatureInputs, FeatureReader, MaskTensors, Observation, ObservationSpec, observe
from esper.growth.promise import PromiseRecord, PromiseSettings
from esper.lifecycle.actions import Head, Op, count_choices
from esper.lifecycle.rules import ActionMasks, Rules
from esper.lifecycle.table import SeedMeasurements, SeedTable, Stage
from esper.population.population import NetworkSpec, Population, PopulationConfig
from esper.tasks.registry import get_suite
from open_rules import open_rules

SUITE = get_suite("tokens")
SLOTS, BLUEPRINTS = len(SUITE.sites), len(SUITE.blueprints)
HORIZON = SUITE.steps
WIDTHS = (10, 3, 6)


def index_of(blueprint: str) -> int:
    return SUITE.blueprints.index(blueprint)


def population(environments: int = 1, rules: Rules = open_rules()) -> Population:  # noqa: B008
    """Untrained networks with slots of different widths."""
    drawn = SUITE.sample(1, "train", np.random.default_rng(0))[0]
    instances = [replace(drawn, widths=WIDTHS, seed=seed, learning_rate=0.02) for seed in range(environments)]
    networks = [NetworkSpec(SUITE.host(one), one.widths, one.learning_rate, one.seed) for one in instances]
    example = torch.zeros(2, *SUITE.input_shape)
    return Population(PopulationConfig(SUITE.template(), SUITE.sites, SUITE.blueprints, example, rules=rules), networks)


@dataclass
class Situation:
    """One network in a chosen state. Slots not given are dormant."""

    slots: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Fields of the table by slot; ``stage`` and, for seeds, ``blueprint`` by name."""
    progress: float = 0.5
    rent: float = 0.08
    train_size: float = 500.0
    rollbacks: float = 0.0
    accuracy_contribution: Sequence[float] = (np.nan,) * SLOTS
    measurements: Sequence[float] | None = None
    """What gate G5 sees; the accuracy contributions if not given."""
    history: dict[str, Any] = field(default_factory=dict)
    """Attributes of the history, without the axis over networks."""
    rules: Rules = field(default_factory=Rules)
    promises: dict[tuple[int, str], tuple[float, float]] | None = field(default_factory=dict)
    """Fitted and held-out promise by slot and blueprint, the others are not measured; None: nobody measures any."""

    promise_age: int = 0

    def view(self) -> FeatureInputs:
        held = population(rules=self.rules)
        held.state = replace(held.state, table=self._table())
        shape = held.table.stage.shape
        measured = np.array(
            [self.accuracy_contribution if self.measurements is None else self.measurements], np.float32
        )
        everywhere = np.ones(shape, np.bool_)
        held.measurements = replace(
            SeedMeasurements.none(*shape), probed=everywhere, gradient_healthy=everywhere, contribution=measured
        )
        past = History(1, SLOTS, BLUEPRINTS, math.log(SUITE.classes), 1 / SUITE.classes)
        past.accuracy_contribution = np.array([self.accuracy_contribution])
        past.loss_contribution = np.array([self.accuracy_contribution])
        for name, value in self.history.items():
            assert name in vars(past), name
            setattr(past, name, value if name == "training" else np.array([value]))
        rent, size = np.array([self.rent]), np.array([self.train_size])
        about = held, past, np.array([self.progress]), HORIZON, rent, size, np.array([self.rollbacks])
        return FeatureInputs(*about, self._promised())

    def _promised(self) -> PromiseRecord | None:
        if self.promises is None:
            return None
        record = PromiseRecord(1, SLOTS, BLUEPRINTS, PromiseSettings())
        figures = np.full((2, 1, SLOTS, BLUEPRINTS), np.nan)
        for (slot, blueprint), promised in self.promises.items():
            figures[:, 0, slot, index_of(blueprint)] = promised
        record.record(np.array([True]), *figures)
        for _ in range(self.promise_age):
            record.advance_age(np.array([True]))
        return record

    def _table(self) -> SeedTable:
        table = SeedTable.dormant(1, SLOTS)
        for slot, values in self.slots.items():
            for name, value in values.items():
                assert name in {one.name for one in fields(SeedTable)}, name
                getattr(table, name)[0, slot] = index_of(value) if isinstance(value, str) else value
        return table

    def observe(self) -> tuple[Observation, ActionMasks]:
        view = self.view()
        return observe(view), view.networks.legal_actions()

    def read(self) -> FeatureReader:
        return FeatureReader(self.observe()[0])


def holding(blueprint: str, age: int = 10, alpha: float = 1.0) -> dict[str, Any]:
    """A seed that has been held for ``age`` decisions."""
    return {
        "stage": Stage.HOLDING,
        "stage_age": age,
        "seed_age": age + 4,
        "blueprint": blueprint,
        "alpha": alpha,
        "alpha_target": alpha,
        "alpha_elapsed": 3,
        "alpha_duration": 3,
    }


def fossil(blueprint: str) -> dict[str, Any]:
    return {**holding(blueprint), "stage": Stage.FOSSILIZED}


# Random observations and legality for tests of policies.


SPEC = ObservationSpec(globals=7, slots=9, blueprints=5)
NO_PRIOR = OpPrior(wait=0, germinate=0, advance=0, set_alpha=0, fossilize=0, prune=0)
SMALL = PolicySettings(advice=None, hidden=24, width=16, op_prior=NO_PRIOR)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def policy(settings: PolicySettings = SMALL, spec: ObservationSpec = SPEC, seed: int = 0) -> Policy:
    return Policy(spec, settings, generator(seed))


def uniforms(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    return torch.rand(*shape, len(Head), generator=generator(seed))


def observations(leading: tuple[int, ...], slots: int = 3, blueprints: int = 4, seed: int = 0) -> Observation:
    random = generator(seed)
    return Observation(
        torch.randn(*leading, SPEC.globals, generator=random),
        torch.randn(*leading, slots, SPEC.slots, generator=random),
        torch.randn(*leading, slots, blueprints, SPEC.blueprints, generator=random),
    )


def masks(leading: tuple[int, ...], slots: int = 3, blueprints: int = 4, seed: int = 0) -> MaskTensors:
    """Random legality in which WAIT is always legal and every legal choice leaves a legal next choice."""
    random = np.random.default_rng(seed)

    def some(*shape: int) -> np.ndarray:
        legal = random.random((*leading, *shape)) < 0.6
        picks = random.integers(shape[-1], size=(*leading, *shape[:-1]))
        np.put_along_axis(legal, picks[..., None], True, axis=-1)
        return legal

    _, _, _, blend, tempo, target, speed, curve = count_choices(slots, blueprints)
    op = some(len(Op))
    op[..., Op.WAIT] = True
    slot = some(len(Op), slots)
    slot[..., Op.WAIT, :] = np.arange(slots) == 0
    parts = (op, slot, some(slots, blueprints), some(blend), some(tempo), some(slots, target), some(speed), some(curve))
    return MaskTensors(*(torch.from_numpy(part) for part in parts))
