"""Features are what they say, within their ranges; masks as tensors say what the lifecycle's masks say."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from control.situations import BLUEPRINTS, HORIZON, SLOTS, SUITE, WIDTHS, Situation, fossil, holding, index_of
from esper.control.policy.heads import find_legal_choices
from esper.control.rules import Uniform
from esper.engine.engine import GrowthConfig
from esper.engine.gradients import HealthTable
from esper.engine.measurements import TrainingReport
from esper.engine.observation import (
    Feature,
    FeatureReader,
    Observation,
    list_features,
    make_mask_tensors,
)
from esper.growth.blueprints.registry import Family, get
from esper.growth.promise import PromiseSettings
from esper.growth.site import Layout
from esper.lifecycle.actions import RELEVANT, Head, Op
from esper.lifecycle.rules import Isolation, legal_actions
from esper.lifecycle.table import SeedTable, Stage
from esper.lifecycle.transitions import step
from lifecycle.support import RULE_SETS, random_compatibility, random_measurements, sample
from open_rules import open_rules
from rl.short import episodes, instances

CHANCE_LOSS = np.log(SUITE.classes)

PARTS = tuple(list_features(promise=True)._asdict().items())
PROMISE = PromiseSettings(every=3, first=1, examples=16)
NEVER_VARIES = {
    # Everything is measured after every step.
    "measurement_age",
    # Token hosts have one layout, and every blueprint on offer fits it.
    *(f"layout_{layout}" for layout in Layout),
    "compatible",
    # One rent in all instances.
    "rent",
    # Nothing blows up, and there is no cap on growth: see below.
    "rollbacks",
    "budget_left",
    # What no blueprint of the suite belongs to.
    "is_spatial",
    "resident_spatial",
}


def observations(isolation: Isolation) -> list[Observation]:
    rules = open_rules(isolation=isolation, cooldown=(1, 1, 1), min_training_steps=1)
    running = episodes(instances(14), rules, GrowthConfig(promise=PROMISE))
    controller = Uniform()
    state, seen = controller.start(range(14)), [running.observe()]
    while not running.finished.all():
        actions, state = controller.act(seen[-1], running.legal_actions(), state)
        running.step(actions)
        seen.append(running.observe())
    return seen


@pytest.fixture(scope="module")
def random_play() -> Observation:
    """``[T * E, ...]`` of both isolations."""
    seen = [one for isolation in (Isolation.NONE, Isolation.SHADOW) for one in observations(isolation)]
    return Observation(*(torch.cat(parts) for parts in zip(*seen, strict=True)))


@pytest.mark.landing
@pytest.mark.parametrize(("part", "features"), PARTS)
def test_features_lie_in_their_ranges(part: str, features: Sequence[Feature], random_play: Observation) -> None:
    values = getattr(random_play, part)
    assert values.dtype == torch.float32
    assert values.shape[-1] == len(features) == getattr(list_features(promise=True).spec, part)
    for index, feature in enumerate(features):
        column = values[..., index]
        assert feature.low <= column.min(), feature.name
        assert column.max() <= feature.high, feature.name


@pytest.mark.parametrize(("part", "features"), PARTS)
def test_features_vary(part: str, features: Sequence[Feature], random_play: Observation) -> None:
    values = getattr(random_play, part)
    constant = {one.name for index, one in enumerate(features) if len(values[..., index].unique()) == 1}
    assert constant <= NEVER_VARIES
    assert {one.name for one in features} & NEVER_VARIES <= constant, "the list above is out of date"


def trained(loss: float, accuracy: float, host: float = 0.0, seeds: Sequence[float] = (0.0,) * SLOTS) -> TrainingReport:
    return TrainingReport(
        np.array([loss]), np.array([accuracy]), np.array([host]), np.array([seeds]), HealthTable.none(1, SLOTS)
    )


def cost(blueprint: str, slot: int) -> float:
    """Parameters over the host's."""
    held = Situation().view().networks
    site = replace(held.execution.sites[slot], width=WIDTHS[slot])
    return get(blueprint).cost_at(site).parameters / held.host_parameters[0]


MLP_0, NORM_1 = cost("mlp", 0), cost("norm", 1)


@pytest.mark.parametrize(
    ("name", "situation", "expected"),
    [
        ("progress", Situation(progress=0.3), 0.3),
        ("log_train_loss", Situation(history={"training": trained(CHANCE_LOSS, 0.25)}), 0.0),
        ("log_train_loss", Situation(history={"training": trained(CHANCE_LOSS / 4, 0.25)}), -np.log(4)),
        ("log_train_loss", Situation(history={"training": trained(0.0, 1.0)}), -5.0),
        ("log_validation_loss", Situation(history={"losses": [CHANCE_LOSS / 2, 9, 9, 9]}), -np.log(2)),
        ("log_validation_loss", Situation(history={"losses": [np.inf, 9, 9, 9]}), 2.0),
        ("log_validation_loss", Situation(history={"losses": [np.nan, 9, 9, 9]}), 2.0),
        ("log_train_loss", Situation(history={"training": trained(np.nan, 0.25)}), 2.0),
        ("train_accuracy", Situation(history={"training": trained(1.0, 0.7)}), 0.7),
        ("validation_accuracy", Situation(history={"accuracies": [0.6, 0.5, 0.4, 0.2]}), 0.6),
        ("accuracy_change", Situation(history={"accuracies": [0.6, 0.5, 0.4, 0.2]}), 0.1),
        ("accuracy_trend", Situation(history={"accuracies": [0.6, 0.5, 0.4, 0.2]}), 0.4),
        ("loss_change", Situation(history={"losses": [0.5, 1.0, 1.0, 2.0]}), -np.log(2)),
        ("loss_trend", Situation(history={"losses": [0.5, 1.0, 1.0, 2.0]}), -np.log(4)),
        ("accuracy_gap", Situation(history={"training": trained(1.0, 0.9), "accuracies": [0.6, 0, 0, 0]}), 0.3),
        ("loss_gap", Situation(history={"training": trained(0.5, 0.9), "losses": [1.0, 0, 0, 0]}), np.log(2)),
        ("plateau_age", Situation(history={"plateau_age": 4}), 0.4),
        ("plateau_age", Situation(history={"plateau_age": 40}), 1.0),
        ("log_added_parameters", Situation({0: fossil("mlp")}), np.log1p(MLP_0)),
        ("log_added_parameters", Situation({0: fossil("mlp"), 1: holding("norm")}), np.log1p(MLP_0 + NORM_1)),
        ("log_added_parameters", Situation({0: {"stage": Stage.GERMINATED, "blueprint": "mlp"}}), 0.0),
        ("rent_paid", Situation({0: fossil("mlp")}, rent=0.2), 0.2 * np.log1p(MLP_0)),
        ("rent", Situation(rent=0.12), 0.12),
        ("log_train_size", Situation(train_size=2000), np.log(2)),
        ("log_learning_rate", Situation(), np.log(2)),
        ("log_host_parameters", Situation(), np.log(Situation().view().networks.host_parameters[0] / 1000)),
        ("log_host_gradient", Situation(history={"training": trained(1, 0, host=np.e)}), 1.0),
        ("last_op_prune", Situation(history={"last_op": Op.PRUNE}), 1.0),
        ("last_op_wait", Situation(history={"last_op": Op.PRUNE}), 0.0),
        ("last_op_wait", Situation(), 1.0),
    ],
)
def test_global_features(name: str, situation: Situation, expected: float) -> None:
    assert situation.read().network(name)[0] == pytest.approx(expected, abs=1e-6)


TRIES = [[1, *[0] * (BLUEPRINTS - 1)], [1] * BLUEPRINTS, [0] * BLUEPRINTS]
BLENDING = {**holding("mlp", age=2, alpha=0.5), "stage": Stage.BLENDING, "alpha_elapsed": 2, "alpha_duration": 5}


@pytest.mark.parametrize(
    ("name", "situation", "expected"),
    [
        ("stage_dormant", Situation({1: holding("mlp")}), [1, 0, 1]),
        ("stage_holding", Situation({1: holding("mlp")}), [0, 1, 0]),
        ("stage_fossilized", Situation({1: holding("mlp"), 2: fossil("mlp")}), [0, 0, 1]),
        ("alpha", Situation({0: BLENDING, 1: holding("mlp", alpha=0.7)}), [0.5, 0.7, 0]),
        ("alpha_target", Situation({0: {**BLENDING, "alpha_target": 1.0}}), [1, 0, 0]),
        ("ramp_left", Situation({0: BLENDING, 1: holding("mlp")}), [3 / 5, 0, 0]),
        ("pruning", Situation({0: {**BLENDING, "pruning": True}, 1: BLENDING}), [1, 0, 0]),
        ("stage_age", Situation({0: holding("mlp", age=6), 1: {"stage_age": 99}}), [6 / HORIZON, 1, 0]),
        ("seed_age", Situation({0: holding("mlp", age=6)}), [10 / HORIZON, 0, 0]),
        ("measured", Situation(history={"loss_contribution": [0.1, np.nan, 0.0]}), [1, 0, 1]),
        ("accuracy_contribution", Situation(accuracy_contribution=(0.1, np.nan, -0.2)), [0.1, 0, -0.2]),
        (
            "loss_contribution",
            Situation(history={"loss_contribution": [CHANCE_LOSS / 5, np.nan, -CHANCE_LOSS / 5]}),
            [np.arcsinh(1), 0, -np.arcsinh(1)],
        ),
        (
            "contribution_velocity",
            Situation(
                history={
                    "loss_contribution": [CHANCE_LOSS / 5, 1.0, np.nan],
                    "loss_contribution_before": [0.0, np.nan, 1.0],
                }
            ),
            [np.arcsinh(1), 0, 0],
        ),
        (
            "gradient_ratio",
            Situation(history={"training": trained(1, 0, host=2.0, seeds=(1.0, 0.0, 4.0))}),
            [-np.log(2), 0, np.log(2)],
        ),
        ("depth", Situation(), [0, 0.5, 1]),
        ("log_width", Situation(), np.log(np.array(WIDTHS) / 10)),
        ("tries", Situation(history={"tries": TRIES}), [0.25, 1, 0]),
        ("resident_cost", Situation({0: fossil("mlp"), 1: holding("norm")}), [np.log1p(MLP_0), np.log1p(NORM_1), 0]),
        ("layout_tokens", Situation(), [1, 1, 1]),
        ("layout_image", Situation(), [0, 0, 0]),
        ("resident_channel", Situation({0: fossil("mlp"), 1: holding("norm")}), [1, 0, 0]),
        ("resident_norm", Situation({0: fossil("mlp"), 1: holding("norm")}), [0, 1, 0]),
    ],
)  # fmt: skip
def test_slot_features(name: str, situation: Situation, expected: Sequence[float]) -> None:
    np.testing.assert_allclose(situation.read().slot(name)[0], expected, atol=1e-6)


def test_stages_and_residents_are_one_hot() -> None:
    reading = Situation({0: fossil("attention"), 1: BLENDING}).read()
    stages = np.stack([reading.slot(f"stage_{stage.name.lower()}") for stage in Stage])
    assert (stages.sum(0) == 1).all()
    families = np.stack([reading.slot(f"resident_{family}") for family in Family])
    assert families.sum(0)[0].tolist() == [1, 1, 0]


@pytest.mark.parametrize("blueprint", SUITE.blueprints)
def test_blueprint_features(blueprint: str) -> None:
    tries, outcomes = np.zeros((SLOTS, BLUEPRINTS)), np.zeros((SLOTS, BLUEPRINTS))
    tries[1, index_of(blueprint)] = 2
    outcomes[2, index_of(blueprint)] = -CHANCE_LOSS / 5
    reading = Situation(rent=0.1, history={"tries": tries, "outcomes": outcomes}).read()
    expected_costs = [np.log1p(cost(blueprint, slot)) for slot in range(SLOTS)]

    def column(name: str) -> np.ndarray:
        return reading.blueprint(name)[0, :, index_of(blueprint)]

    np.testing.assert_allclose(column("cost"), expected_costs, rtol=1e-6)
    np.testing.assert_allclose(column("rent_due"), 0.1 * np.array(expected_costs), rtol=1e-6)
    assert column("compatible").tolist() == [1, 1, 1]
    assert column("tries").tolist() == [0, 0.5, 0]
    np.testing.assert_allclose(column("last_outcome"), [0, 0, -np.arcsinh(1)], rtol=1e-6)
    families = {family for family in Family if column(f"is_{family}").all()}
    assert families == {get(blueprint).family}


def test_a_reading_knows_features_by_name_only() -> None:
    reading = Situation().read()
    assert reading.network("progress").shape == (1,)
    assert reading.slot("alpha").shape == (1, SLOTS)
    assert reading.blueprint("cost").shape == (1, SLOTS, BLUEPRINTS)
    for read in (reading.network, reading.slot, reading.blueprint):
        with pytest.raises(KeyError):
            read("nothing_of_the_kind")


def test_a_reading_finds_each_feature_in_its_place() -> None:
    spec = list_features(promise=True).spec
    shapes = ((2, spec.globals), (2, SLOTS, spec.slots), (2, SLOTS, BLUEPRINTS, spec.blueprints))
    observation = Observation(*(torch.randn(shape, generator=torch.Generator().manual_seed(0)) for shape in shapes))
    reading = FeatureReader(observation)
    readers = (reading.network, reading.slot, reading.blueprint)
    for (part, features), read in zip(PARTS, readers, strict=True):
        for index, feature in enumerate(features):
            assert np.array_equal(read(feature.name), getattr(observation, part)[..., index].numpy())


PROMISED = Situation(promises={(0, "mlp"): (0.9, 0.3), (0, "norm"): (0.5, 0.4), (2, "gate"): (0.2, -0.1)})


def test_features_of_promise() -> None:
    reading = PROMISED.read()
    assert reading.network("best_promise")[0] == pytest.approx(0.9)
    assert reading.network("best_promise_held_out")[0] == pytest.approx(0.4)
    np.testing.assert_allclose(reading.slot("best_promise")[0], [0.9, 0, 0.2], rtol=1e-6)
    np.testing.assert_allclose(reading.slot("best_promise_held_out")[0], [0.4, 0, -0.1], rtol=1e-6)
    assert reading.blueprint("promise")[0, 0, index_of("norm")] == pytest.approx(0.5)
    assert reading.blueprint("promise_held_out")[0, 2, index_of("gate")] == pytest.approx(-0.1)
    assert np.count_nonzero(reading.blueprint("promise")) == 3
    assert reading.network("promise_age")[0] == 0


def test_what_is_seen_without_promise_comes_first_and_is_the_same() -> None:
    plain, more = (Situation(promises=given).observe()[0] for given in (None, {}))
    for part, longer, features in zip(plain, more, list_features(promise=False), strict=True):
        assert torch.equal(part, longer[..., : len(features)])
        assert part.shape[-1] == len(features) < longer.shape[-1]
    reading = FeatureReader(plain)
    assert not reading.shows_promise
    with pytest.raises(KeyError):
        reading.blueprint("promise")


E, S, K, STEPS = 40, 3, 4, 25


@pytest.mark.parametrize("rules", RULE_SETS.values(), ids=RULE_SETS.keys())
def test_every_conditional_mask_is_the_lifecycle_s(rules) -> None:
    rng = np.random.default_rng(0)
    compatible = random_compatibility(E, S, K, rng)
    table, relevant = SeedTable.dormant(E, S), torch.from_numpy(RELEVANT)
    ops: set[int] = set()
    for _ in range(STEPS):
        measurements = random_measurements(E, S, rng)
        masks = legal_actions(table, measurements, rules, compatible)
        tensors = make_mask_tensors(masks, torch.device("cpu"))
        assert all(tensor.dtype == torch.bool for tensor in tensors)
        actions = sample(masks, rng)
        op, slot = actions[:, Head.OP], actions[:, Head.SLOT]
        ops |= set(op.tolist())
        for head in Head:
            expected = masks.find_legal(head, op, slot)
            actual = find_legal_choices(tensors, head, torch.from_numpy(op), torch.from_numpy(slot), relevant[op])
            assert np.array_equal(actual.numpy(), expected), head.name
        table = step(table, measurements, actions, rules, compatible).table
    assert len(ops) >= 4
