"""The suites for reporting alone: what is linear in them, what grows there, and that parts are disjoint."""

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from esper.control.rules import Planting, Schedule
from esper.growth import blueprints
from esper.lifecycle.rules import Rules
from esper.numerics.arrays import Floats, Ints
from esper.population.execution import Execution
from esper.tasks import registry
from esper.tasks.instance import PARTS, Instance
from esper.tasks.suite import Suite
from esper.train.evaluation import EvaluationConfig, evaluate_controllers
from esper.train.workers import LocalWorkers

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def strange() -> Iterator[ModuleType]:
    """The file, whose suites are registered for the tests here alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        patch.setattr(registry, "_suites", dict(registry._suites))
        yield importlib.import_module("strange_suites")


@pytest.fixture(params=["relations", "orbits"])
def suite(strange: ModuleType, request: pytest.FixtureRequest) -> Suite:
    return registry.get_suite(request.param)


@pytest.fixture
def instances(suite: Suite) -> list[Instance]:
    """One of each family."""
    return suite.sample(len(suite.families), "heldout", np.random.default_rng(0))


def test_every_module_of_the_menu_grows(
    suite: Suite, instances: list[Instance], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suite, "steps", 2)
    monkeypatch.setattr(suite, "batches_per_step", 2)
    sites = Execution(suite.template(), suite.sites, torch.zeros(2, *suite.input_shape)).sites
    places = [
        (slot, kind)
        for slot, site in enumerate(sites)
        for kind, name in enumerate(suite.blueprints)
        if blueprints.get(name).supports(site)
    ]
    assert {kind for _, kind in places} == set(range(len(suite.blueprints)))
    schedules = [Schedule([Planting(0, *place)], suite.steps, str(place)) for place in places]
    with LocalWorkers(1) as workers:
        played = evaluate_controllers(workers, schedules, EvaluationConfig(suite.name, Rules()), instances[:1])
    for place, result in zip(places, played, strict=True):
        germinated = {(change.slot, change.blueprint) for log in result.logs for change in log.changes}
        assert germinated == {(place[0], suite.blueprints[place[1]])}
        assert all(np.isfinite(record.score) for record in result.records)


def score_linear(features: Floats, labels: Ints) -> float:
    """Accuracy on the second half of a linear classifier that least squares fit to the first."""
    inputs, half = np.concatenate([features, np.ones((len(features), 1))], 1), len(features) // 2
    weights, *_ = np.linalg.lstsq(inputs[:half], np.eye(4)[labels[:half]])
    return float((inputs[half:] @ weights).argmax(1).__eq__(labels[half:]).mean())


def test_a_linear_map_is_enough_where_nothing_is_to_be_gained_and_not_elsewhere(strange: ModuleType) -> None:
    rng = np.random.default_rng(0)
    relations = {name: sample(4000, rng) for name, sample in strange.RelationsSuite.samplers.items()}
    sums = {name: score_linear(shown.sum((1, 2)), labels) for name, (shown, labels) in relations.items()}
    assert sums["tally"] > 0.7
    assert max(sums["hops"], sums["agreement"]) < 0.5
    orbits = {name: sample(4000, rng) for name, sample in strange.OrbitsSuite.samplers.items()}
    flat = {name: score_linear(shown.reshape(len(shown), -1), labels) for name, (shown, labels) in orbits.items()}
    assert flat["drift"] > 0.65
    assert max(flat["damping"], flat["law"]) < 0.4


def test_parts_are_disjoint_and_equal_instances_have_equal_data(suite: Suite, instances: list[Instance]) -> None:
    for instance in instances:
        parts = [suite.data(instance, part) for part in PARTS]
        rows = np.concatenate([data.inputs.flatten(1).numpy() for data in parts])
        assert len(np.unique(rows, axis=0)) == len(rows)
        for part, data in zip(PARTS, parts, strict=True):
            again = suite.data(Instance.from_json(instance.to_json()), part)
            assert torch.equal(again.inputs, data.inputs)
            assert torch.equal(again.labels, data.labels)
