"""The suites for reporting alone: what their classes mean, what is linear in them, and what grows there."""

import importlib
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from esper.control.rules import Planting, Schedule
from esper.errors import TaskError
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
COUNT = 300


@pytest.fixture(scope="module")
def strange() -> Iterator[ModuleType]:
    """The file, whose suites are registered for the tests here alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        patch.setattr(registry, "_suites", dict(registry._suites))
        yield importlib.import_module("strange_suites")


@pytest.fixture
def clear(strange: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The file without noise."""
    monkeypatch.setattr(strange, "blur", lambda pairs, deviation, rng: pairs)
    return strange


@pytest.fixture(params=["relations", "orbits"])
def suite(strange: ModuleType, request: pytest.FixtureRequest) -> Suite:
    return registry.get_suite(request.param)


@pytest.fixture
def instances(suite: Suite) -> list[Instance]:
    """One of each family."""
    return suite.sample(len(suite.families), "heldout", np.random.default_rng(0))


# What every suite promises --------------------------------------------------------------------------------------------


def test_data_have_the_declared_sizes_and_all_classes(suite: Suite, instances: list[Instance]) -> None:
    for instance in instances:
        sizes = {"train": instance.train_size, "validation": suite.validation_size, "test": suite.test_size}
        for part in PARTS:
            data = suite.data(instance, part)
            assert data.inputs.shape == (sizes[part], *suite.input_shape)
            assert data.inputs.dtype == torch.float32
            assert set(data.labels.tolist()) == set(range(suite.classes))


def test_parts_are_disjoint_and_equal_instances_have_equal_data(suite: Suite, instances: list[Instance]) -> None:
    for instance in instances:
        parts = [suite.data(instance, part) for part in PARTS]
        rows = np.concatenate([data.inputs.flatten(1).numpy() for data in parts])
        assert len(np.unique(rows, axis=0)) == len(rows)
        for part, data in zip(PARTS, parts, strict=True):
            again = suite.data(Instance.from_json(instance.to_json()), part)
            assert torch.equal(again.inputs, data.inputs)
            assert torch.equal(again.labels, data.labels)


def test_hosts_follow_from_the_seed_alone(suite: Suite, instances: list[Instance]) -> None:
    first, again, other = (suite.host(instances[index]).state_dict() for index in (0, 0, 1))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["head.weight"], other["head.weight"])


def test_what_a_suite_does_not_have_is_refused(suite: Suite, instances: list[Instance]) -> None:
    family = suite.families[0]
    with pytest.raises(TaskError, match=f"no {suite.name} family.*did you mean '{family}'"):
        suite.variants(family + "x")
    with pytest.raises(TaskError, match="no phase 1"):
        suite.data(instances[0], "train", phase=1)
    foreign = registry.get_suite("tokens").sample(1, "train", np.random.default_rng(0))[0]
    with pytest.raises(TaskError, match="belongs to suite 'tokens'"):
        suite.data(foreign, "train")


@pytest.mark.landing
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


# What the classes mean ------------------------------------------------------------------------------------------------


def find_shortest_path(tied: Floats) -> int:
    """Steps from the first node to the second; 99 if there is no path."""
    distance, queue = {0: 0}, deque([0])
    while queue:
        node = queue.popleft()
        for other in np.flatnonzero(tied[node]).tolist():
            if other not in distance:
                distance[other] = distance[node] + 1
                queue.append(other)
    return distance.get(1, 99)


def test_hops_are_lengths_of_shortest_paths(clear: ModuleType) -> None:
    shown, labels = clear.sample_hops(COUNT, np.random.default_rng(0))
    lengths = [find_shortest_path(graph) for graph in shown[..., 0] > 0]
    assert labels.tolist() == [min(length, 4) - 1 for length in lengths]


def test_relations_are_symmetric_and_without_ties_to_oneself(clear: ModuleType) -> None:
    for sample in (clear.sample_tally, clear.sample_hops, clear.sample_agreement):
        shown, _ = sample(COUNT, np.random.default_rng(0))
        np.testing.assert_array_equal(shown, shown.swapaxes(1, 2))
        assert (np.diagonal(shown, axis1=1, axis2=2) == 0).all()


def test_a_tally_counts_signs_and_an_agreement_products(clear: ModuleType) -> None:
    rng = np.random.default_rng(0)
    shown, labels = clear.sample_tally(COUNT, rng)
    assert labels.tolist() == [2 * (one[..., 0].sum() > 0) + (one[..., 1].sum() > 0) for one in shown]
    shown, labels = clear.sample_agreement(COUNT, rng)
    products = shown.prod(-1)
    assert labels.tolist() == [2 * (one[0, 1] > 0) + (one.sum() > 0) for one in products]


def test_drift_is_a_direction_and_damping_a_rate(clear: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    monkeypatch.setattr(clear, "draw_swing", lambda count, slimness, rng: np.zeros((count, clear.MOMENTS, 2)))
    shown, labels = clear.sample_drift(COUNT, rng)
    way = shown[:, -1] - shown[:, 0]
    angle = np.arctan2(way[:, 1], way[:, 0]) % (2 * np.pi)
    np.testing.assert_array_equal(labels, angle // (np.pi / 2))
    monkeypatch.setattr(clear, "draw_swing", lambda count, slimness, rng: np.ones((count, clear.MOMENTS, 2)))
    shown, labels = clear.sample_damping(COUNT, rng)
    rates = -np.log(shown[:, 1:] / shown[:, :-1])
    expected = np.broadcast_to(np.array([0.0, 0.05, 0.12, 0.25])[labels][:, None, None], rates.shape)
    np.testing.assert_allclose(rates, expected, atol=1e-9)


def test_orbits_are_those_of_textbooks(strange: ModuleType) -> None:
    exponent, times = np.array([-2.0, -1.0, 0.0, 1.0]), 0.8 * np.arange(strange.MOMENTS)
    interval = np.full(4, 0.8 / strange.SUBSTEPS)
    # At the speed of a circle every force leads round it.
    circle = np.stack([np.cos(times), np.sin(times)], -1)
    for orbit in strange.follow_orbits(exponent, np.ones(4), interval):
        np.testing.assert_allclose(orbit, circle, atol=0.03)
    # A proportional force leads along an ellipse about the centre.
    slow = strange.follow_orbits(exponent, np.full(4, 0.6), interval)
    np.testing.assert_allclose(slow[3], circle * [1, 0.6], atol=0.03)
    # An inverse square leads back to the beginning after Kepler's period, which follows from the semi-major axis.
    period = 2 * np.pi * (1 / (2 - 0.6**2)) ** 1.5
    back = strange.follow_orbits(exponent, np.full(4, 0.6), np.full(4, period / strange.SUBSTEPS / 5))
    np.testing.assert_allclose(back[0, [5, 10]], [[1, 0], [1, 0]], atol=0.03)


# What is linear -------------------------------------------------------------------------------------------------------


def score_linear(features: Floats, labels: Ints) -> float:
    """Accuracy on the second half of a linear classifier that least squares fit to the first."""
    inputs, half = np.concatenate([features, np.ones((len(features), 1))], 1), len(features) // 2
    weights, *_ = np.linalg.lstsq(inputs[:half], np.eye(4)[labels[:half]])
    return float((inputs[half:] @ weights).argmax(1).__eq__(labels[half:]).mean())


@pytest.mark.landing
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
