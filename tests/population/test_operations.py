"""What a population asks of its device, counted: each operation costs time, whatever the networks and their data.

The counts do not depend on how many networks there are, only on which kinds of seeds they have: here all blueprints of
the suite in all slots.
"""

from collections.abc import Callable
from typing import cast

import numpy as np
import pytest
from torch.profiler import ProfilerActivity, profile

from benchmarks.train_speed import ProfiledEvent, count_operations
from esper.population.backend import Snapshots
from esper.population.evaluation import start_evaluation
from esper.population.learning import train
from esper.population.parameters import SeedKind
from esper.population.population import Population
from esper.population.promise import PromiseMeter
from open_rules import open_rules
from population.scenes import SUITE, Draws, instances, networks, plan

KINDS, SLOTS = len(SUITE.blueprints), len(SUITE.sites)
EXAMPLES = 8


class Full:
    """A population with all kinds of seeds: each network has one blueprint in all slots, ``each`` of them the same."""

    def __init__(self, each: int) -> None:
        chosen = instances(KINDS * each)
        fossils = [tuple(SeedKind(slot, row % KINDS) for slot in range(SLOTS)) for row in range(len(chosen))]
        specs = [spec._replace(fossils=own) for spec, own in zip(networks(chosen), fossils, strict=True)]
        self.population = Population(plan(open_rules()), specs)
        self.draws = Draws(chosen)
        self.meter = PromiseMeter(self.population)
        self.snapshots = Snapshots.from_state(self.population.state)
        self.batches = [self.draws.batch(EXAMPLES) for _ in range(2)]
        assert len(self.population.banks) == KINDS * SLOTS

    def train(self, minibatches: int) -> None:
        train(self.population, self.batches[:minibatches])

    def evaluate(self) -> None:
        start_evaluation(self.population, self.batches[0])

    def look(self) -> None:
        self.meter.measure(self.batches[0], np.ones_like(self.population.table.owning))

    def retake(self) -> None:
        self.snapshots.retake(np.arange(self.population.size) % 2 == 0, self.population.state)

    def prune(self) -> None:
        parameters = self.population.state.parameters
        parameters.exchange_seeds({kind: np.array([0]) for kind in parameters.banks}, {})


def count(work: Callable[[], None]) -> int:
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        work()
    return count_operations(cast("list[ProfiledEvent]", profiled.events())).total()


@pytest.fixture(scope="module")
def full() -> Full:
    held = Full(2)
    held.look()  # makes newborn modules
    return held


def count_minibatch(held: Full) -> int:
    return count(lambda: held.train(2)) - count(lambda: held.train(1))


@pytest.mark.parametrize(
    ("counted", "most"),
    [
        (count_minibatch, 560),
        (lambda held: count(held.evaluate), 290),
        (lambda held: count(held.look), 2450),
        (lambda held: count(held.retake), 65),
        (lambda held: count(held.prune), 12),
    ],
    ids=["a minibatch", "a validation", "what blueprints promise", "snapshots", "pruning"],
)
@pytest.mark.few(2)
def test_operations_stay_as_few_as_they_are(full: Full, counted: Callable[[Full], int], most: int) -> None:
    assert most * 0.7 < counted(full) <= most, "a bound that is far above what is counted holds nothing"


def test_more_networks_are_not_more_operations(full: Full) -> None:
    # But for copies of what is contiguous by chance, as of a single row.
    more = Full(3)
    assert count_minibatch(more) == pytest.approx(count_minibatch(full), rel=0.02)
    assert count(more.evaluate) == pytest.approx(count(full.evaluate), rel=0.02)
    assert count(more.retake) == pytest.approx(count(full.retake), abs=3)
