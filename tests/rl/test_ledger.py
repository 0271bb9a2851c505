"""The facts that rewards are made of, held to what can be worked out by hand."""

from __future__ import annotations

import numpy as np

from esper.growth.blueprints.registry import get
from esper.lifecycle.actions import Op, action, wait
from rl.short import SUITE, episodes, instances

MLP, CONV = SUITE.blueprints.index("mlp"), SUITE.blueprints.index("token_conv")


def test_scores_in_loss_are_relative_to_guessing() -> None:
    running = episodes(instances(4))
    result = running.step(wait(4))
    chance = np.log(SUITE.classes)
    np.testing.assert_allclose(result.facts.after.loss.score, 1 - result.evaluation.loss / chance)
    np.testing.assert_allclose(result.facts.after.accuracy.score, result.evaluation.accuracy)
    assert not result.facts.before.loss.score.any()


def test_contributions_are_those_of_blended_seeds_in_both_units() -> None:
    running = episodes(instances(4))
    result = running.step(np.stack([action(Op.GERMINATE, 1, MLP)] * 4))
    assert not result.facts.after.accuracy.contribution.any(), "a newborn does not count yet"
    result = running.step(wait(4))
    found, chance = result.facts.after, np.log(SUITE.classes)
    np.testing.assert_allclose(found.accuracy.contribution[:, 1], result.evaluation.accuracy_contribution[:, 1])
    np.testing.assert_allclose(found.loss.contribution[:, 1], result.evaluation.loss_contribution[:, 1] / chance)
    assert not found.loss.contribution[:, [0, 2]].any()
    next_one = running.step(wait(4)).facts
    np.testing.assert_array_equal(next_one.before.loss.contribution, found.loss.contribution)


def test_rent_is_due_on_parameters_and_on_flops() -> None:
    running = episodes(instances(7))
    for actions in (np.stack([action(Op.GERMINATE, 0, CONV)] * 7), wait(7)):
        found = running.step(actions).facts.after
    for row, instance in enumerate(running.instances):
        site = running.population.execution.sites[0].narrowed(instance.widths[0])
        kind = get("token_conv")
        for due, added, host in (
            (found.parameter_rent, kind.parameters_at(site), SUITE.parameters(instance)),
            (found.flops_rent, kind.flops_at(site), SUITE.flops(instance)),
        ):
            np.testing.assert_allclose(due[row], instance.rent * np.log1p(added / host))
    assert len({one.widths for one in running.instances}) > 1, "hosts of several widths"


def test_flops_of_a_host_are_those_of_its_products() -> None:
    wide = next(one for one in instances(14) if one.widths == (10, 10, 10))
    weights = [part.numel() for name, part in SUITE.host(wide).named_parameters() if name.endswith("weight")]
    tokens = SUITE.input_shape[0]
    # Each token passes through all layers but the head, which reads their mean.
    assert SUITE.flops(wide) == 2 * (tokens * sum(weights[:-1]) + weights[-1])


def test_what_was_done_is_told() -> None:
    running = episodes(instances(3))
    running.step(np.stack([action(Op.GERMINATE, 0, MLP)] * 3))
    for _ in range(3):
        running.step(wait(3))
    facts = running.step(np.stack([action(Op.PRUNE, 0), *wait(1), action(Op.GERMINATE, 1, MLP)])).facts
    assert facts.acted.tolist() == [True, False, True]
    assert facts.pruned_age.tolist() == [4, -1, -1]


def test_a_restarted_network_begins_from_nothing() -> None:
    running = episodes(instances(3))
    running.step(wait(3))
    running.restart(np.array([1]), instances(4)[3:])
    before = running.step(wait(3)).facts.before.accuracy.score
    assert (before > 0).tolist() == [True, False, True]
