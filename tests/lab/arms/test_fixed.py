"""Networks of fixed shape: the bare one is the arm that never grows, and longer training goes on in the same order."""

import copy
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from esper.control.rules import Never
from esper.engine.budget import TRAINING_PASSES
from esper.growth.blueprints.registry import get
from esper.lab.static_networks import (
    Prices,
    SlotHistory,
    StaticNetwork,
    measure_arm,
    track_slots,
    train_static,
)
from esper.lifecycle.actions import Blend, Op, make_action, make_wait_actions
from esper.lifecycle.table import Stage
from esper.population.parameters import SeedKind
from esper.population.population import Fossils
from esper.rl.episodes import Episodes
from esper.tasks.registry import get_suite
from esper.train.evaluation import evaluate_controllers
from esper.train.recorder import EpisodeLog
from esper.train.results import Result
from esper.train.workers import LocalWorkers
from lab.arms.planting import TERMS, instances, planted
from lab.planted import change

SHAPE: Fossils = (SeedKind(0, 3), SeedKind(1, 1, Blend.GATE))


def trained(networks: list[StaticNetwork]) -> list[Result]:
    with LocalWorkers(1) as workers:
        return [one for one, _ in train_static(workers, TERMS, "none", networks)]


def test_a_bare_network_trained_to_the_horizon_is_the_arm_that_never_grows() -> None:
    suite, chosen = get_suite("short"), instances(6)
    with LocalWorkers(1) as workers:
        never = measure_arm(evaluate_controllers(workers, [Never()], TERMS, chosen)[0], suite).outcomes
    assert trained([StaticNetwork(one, (), suite.steps) for one in chosen]) == never


def test_every_network_is_scored_at_its_own_time_whoever_is_beside_it() -> None:
    chosen = instances(3)
    networks = [
        StaticNetwork(chosen[0], (), 11),
        StaticNetwork(chosen[1], SHAPE, 3),
        StaticNetwork(chosen[2], SHAPE, 7),
    ]
    together = trained(networks)
    assert [trained([one])[0] for one in networks] == together
    assert [one.instance for one in together] == [one.name for one in chosen]


def test_longer_training_is_more_of_the_same() -> None:
    """As long as the horizon or longer, the first epochs are the same minibatches."""
    suite, chosen = get_suite("short"), instances(2)
    usual = Episodes(suite, chosen, TERMS.rules)
    lengthened = copy.copy(suite)
    lengthened.steps = 3 * suite.steps
    longer = Episodes(lengthened, chosen, TERMS.rules)
    first = np.zeros(2, np.int64)
    for one, other in zip(usual._stream.draw_batches(first, 8), longer._stream.draw_batches(first, 8), strict=True):
        assert one.inputs.equal(other.inputs)
        assert one.labels.equal(other.labels)
    assert suite.steps == get_suite("short").steps
    assert trained([StaticNetwork(chosen[0], (), 8)]) != trained([StaticNetwork(chosen[0], (), 24)])


def test_fossils_are_charged_for_from_the_first_step() -> None:
    suite, (one,) = get_suite("short"), instances(1)
    prices = Prices(suite)
    (found,) = trained([StaticNetwork(one, SHAPE, 5)])
    sites = Episodes(suite, [one], TERMS.rules).population.execution.sites
    forward = prices.network(one, ())
    for slot, blueprint, _ in SHAPE:
        site = replace(sites[slot], width=one.widths[slot])
        forward += get(suite.blueprints[blueprint]).cost_at(site).flops
    assert prices.network(one, SHAPE) == forward
    assert found.flops == 3 * forward * 5 * prices.examples
    assert found.added_parameters > 0
    assert asdict(found)["controller"] == "none"


# Training is charged for what took part in it, decision by decision.


MIX, SKIP = 3, 6


def slots(blend: Blend, *steps: tuple[Stage, int]) -> SlotHistory:
    """One network whose slot 1 has these stages and blueprints."""
    stage, blueprint = np.zeros((len(steps), 1, 3), np.int64), np.full((len(steps), 1, 3), -1)
    for step, (at, kind) in enumerate(steps):
        stage[step, 0, 1], blueprint[step, 0, 1] = at, kind
    return SlotHistory(stage, blueprint, np.full_like(stage, blend), [()])


@pytest.mark.parametrize("blend", Blend)
def test_host_and_counting_seeds_are_paid_three_times_per_example(blend: Blend) -> None:
    suite, chosen = get_suite("short"), instances(1)
    prices = Prices(suite)
    kind = SeedKind(1, MIX, blend)
    host = prices.network(chosen[0], ())
    seed = prices.network(chosen[0], (kind,)) - host
    assert host == suite.flops(chosen[0])
    assert seed > 0
    course = slots(
        blend,
        (Stage.DORMANT, -1),
        (Stage.GERMINATED, MIX),
        (Stage.BLENDING, MIX),
        (Stage.HOLDING, MIX),
        (Stage.FOSSILIZED, MIX),
        (Stage.PRUNED, -1),
        (Stage.TRAINING, MIX),
        (Stage.FOSSILIZED, MIX),
    )
    running = np.ones((8, 1), np.bool_)
    running[7] = False
    found = prices.count_training(chosen, course, running)[:, 0]
    once = 3 * suite.batch_size * suite.batches_per_step
    isolated = host + host + seed  # as it is, and once more with the seed
    assert (found // once).tolist() == [host, host, *[host + seed] * 3, host, isolated, 0]


def test_three_passes_are_what_a_counter_counts() -> None:
    """With the gradient of the inputs, of which training has no need: the one thing that is charged too much."""
    suite, chosen = get_suite("short"), instances(1)[0]
    host, inputs = suite.host(chosen), torch.zeros(suite.batch_size, *suite.input_shape, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        host(inputs).sum().backward()
    assert counter.get_total_flops() == TRAINING_PASSES * suite.batch_size * suite.flops(chosen)


def test_occupancy_is_the_table_while_networks_trained() -> None:
    suite, chosen = get_suite("short"), instances(4)
    log = planted(chosen).logs[0]
    found = track_slots(log, suite)
    assert found.stage.shape == (suite.steps, 4, 3)
    assert (SeedKind(0, MIX), SeedKind(2, SKIP)) in found.fossils
    assert [[kind.slot for kind in own] for own in found.fossils] == [np.flatnonzero(own).tolist() for own in log.kept]
    assert found.stage[:, 0, 0].tolist()[:3] == [Stage.GERMINATED, Stage.BLENDING, Stage.BLENDING]
    assert set(found.blueprint[:, :, 1].ravel().tolist()) == {-1}
    assert np.array_equal(found.stage[-1] == Stage.FOSSILIZED, log.kept)


def test_a_rollback_is_felt_by_the_next_training_only() -> None:
    """Even where a slot germinates, and a rollback takes the seed away again, in one decision."""
    suite, chosen = get_suite("short"), instances(1)
    log = EpisodeLog(suite, chosen)
    log.steps = [make_action(Op.GERMINATE, 0, MIX, blend=Blend.GATE)[None], *[make_wait_actions(1)] * 2]
    log.changes = [
        change(0, 0, "dormant", "germinated", "token_mix", "germinate"),
        change(0, 0, "germinated", "pruned", "token_mix", "rollback"),
        change(1, 1, "fossilized", "pruned", "input_skip", "rollback"),
    ]
    found = track_slots(log, suite, [(SeedKind(1, SKIP),)])
    assert found.stage[:, 0, 0].tolist() == [Stage.GERMINATED, Stage.PRUNED, Stage.PRUNED]
    assert found.blend[:, 0, 0].tolist() == [Blend.GATE] * 3
    assert found.blueprint[:, 0, 0].tolist() == [MIX, -1, -1]
    assert found.stage[:, 0, 1].tolist() == [Stage.FOSSILIZED, Stage.FOSSILIZED, Stage.PRUNED]
    assert found.fossils == [()]
