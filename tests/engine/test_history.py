"""The record of an episode: what is remembered, for how long, and what a restart forgets."""

import math

import numpy as np

from esper.engine.gradients import HealthTable
from esper.engine.history import LOOKBACK, PLATEAU_IMPROVEMENT, History
from esper.engine.measurements import Evaluation, TrainingReport
from esper.lifecycle.actions import Op, make_action, make_wait_actions
from esper.lifecycle.table import SeedTable, Stage

E, S, K, CLASSES = 2, 3, 4, 4
HEALTH = HealthTable(np.full((E, S), 8), *(np.full((E, S), figure) for figure in (0.5, 0.25, 0.0, 2.0)))


def history() -> History:
    return History(E, S, K, math.log(CLASSES), 1 / CLASSES)


def evaluation(
    loss: float, accuracy: float = 0.5, contribution: float = np.nan, fresh: np.ndarray | None = None
) -> Evaluation:
    contributions = np.full((E, S), contribution)
    everywhere = np.ones((E, S), np.bool_) if fresh is None else fresh
    return Evaluation(np.full(E, loss), np.full(E, accuracy), *[contributions] * 4, everywhere)


def report(loss: float = 1.0) -> TrainingReport:
    return TrainingReport(np.full(E, loss), np.full(E, 0.5), np.ones(E), np.ones((E, S)), HEALTH)


def trained(one: TrainingReport) -> dict[str, np.ndarray]:
    """All its arrays."""
    return {name: value for part in (one, one.health) for name, value in vars(part).items() if name != "health"}


def record(past: History, measured: Evaluation, actions: np.ndarray | None = None) -> None:
    past.record(make_wait_actions(E) if actions is None else actions, SeedTable.dormant(E, S), report(), measured)


def test_it_begins_at_guessing() -> None:
    past = history()
    assert (past.losses == np.log(CLASSES)).all()
    assert (past.accuracies == 1 / CLASSES).all()
    assert (past.training.loss == np.log(CLASSES)).all()
    assert np.isnan(past.loss_contribution).all()
    assert (past.last_op == Op.WAIT).all()


def test_the_last_measurements_come_first() -> None:
    past = history()
    for step in range(LOOKBACK + 3):
        record(past, evaluation(loss=10.0 - step, accuracy=step / 10))
    newest = LOOKBACK + 2
    assert past.losses[0].tolist() == [10.0 - (newest - age) for age in range(LOOKBACK + 1)]
    np.testing.assert_allclose(past.accuracies[0], [(newest - age) / 10 for age in range(LOOKBACK + 1)])


def test_a_plateau_ends_when_the_loss_improves_enough() -> None:
    past = history()
    record(past, evaluation(1.0))
    ages = []
    for loss in (1.0, 1.0 - PLATEAU_IMPROVEMENT / 2, 2.0, 1.0 - PLATEAU_IMPROVEMENT * 2, np.nan):
        record(past, evaluation(loss))
        ages.append(past.plateau_age[0])
    assert ages == [1, 2, 3, 0, 1]
    assert past.best_loss[0] == 1.0 - PLATEAU_IMPROVEMENT * 2


def test_tries_and_outcomes_belong_to_slot_and_blueprint() -> None:
    past, table = history(), SeedTable.dormant(E, S)
    planting = np.stack([make_action(Op.GERMINATE, 1, 2), make_action(Op.PRUNE, 1)])
    past.record(planting, table, report(), evaluation(1.0))
    past.record(planting, table, report(), evaluation(1.0))
    assert past.tries[0, 1, 2] == 2
    assert past.tries.sum() == 2
    table.stage[0, 1], table.blueprint[0, 1] = Stage.HOLDING, 2
    record_with = evaluation(1.0, contribution=0.3)
    past.record(make_wait_actions(E), table, report(), record_with)
    assert past.outcomes[0, 1, 2] == 0.3
    assert past.outcomes.sum() == 0.3, "slots without a seed have no outcome, whatever was measured"
    past.record(make_wait_actions(E), SeedTable.dormant(E, S), report(), evaluation(1.0))
    assert past.outcomes[0, 1, 2] == 0.3, "what a pruned seed last contributed is remembered"


def test_the_contribution_before_is_kept() -> None:
    past = history()
    record(past, evaluation(1.0, contribution=0.1))
    record(past, evaluation(1.0, contribution=0.4))
    assert (past.loss_contribution == 0.4).all()
    assert (past.loss_contribution_before == 0.1).all()


def test_the_contribution_before_is_that_of_the_measurement_before() -> None:
    past, everywhere = history(), np.ones((E, S), np.bool_)
    fresh = everywhere.copy()
    fresh[:, 1:] = False
    record(past, evaluation(1.0, contribution=0.1))
    record(past, evaluation(1.0, contribution=0.4))
    record(past, evaluation(1.0, contribution=0.4, fresh=~everywhere))
    assert (past.loss_contribution_before == 0.1).all(), "the last known change stands, as the contribution does"
    record(past, evaluation(1.0, contribution=0.5, fresh=fresh))
    assert past.loss_contribution_before.tolist() == [[0.4, 0.1, 0.1]] * E


def test_a_restart_forgets_one_episode_only() -> None:
    past, fresh = history(), history()
    for loss in (1.0, 0.5):
        record(past, evaluation(loss, contribution=0.2), np.stack([make_action(Op.GERMINATE, 0, 1)] * E))
    kept = {name: np.copy(value[0]) for name, value in vars(past).items() if isinstance(value, np.ndarray)}
    past.restart(np.array([False, True]))
    for name, value in kept.items():
        np.testing.assert_array_equal(vars(past)[name][0], value, err_msg=name)
        np.testing.assert_array_equal(vars(past)[name][1], vars(fresh)[name][1], err_msg=name)
    for name, value in trained(past.training).items():
        np.testing.assert_array_equal(value[0], trained(report())[name][0], err_msg=name)
        np.testing.assert_array_equal(value[1], trained(fresh.training)[name][1], err_msg=name)
