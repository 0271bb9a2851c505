"""The growth engine: the same calls do the same over both backends."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from engine.cycles import CALM, CONFIG, CYCLES, Cycle
from esper.engine import GrowthBackend, GrowthEngine
from esper.engine.engine import GrowthConfig
from esper.engine.governor import Trouble
from esper.errors import CheckpointError, IllegalActionError
from esper.growth.promise import Promises
from esper.lifecycle.actions import Head, Op, make_action, make_wait_actions
from esper.lifecycle.table import Stage
from esper.numerics.arrays import Bools
from esper.serialization import pack_state

Make = Callable[..., Cycle]


@pytest.fixture(params=CYCLES)
def make(request: pytest.FixtureRequest) -> Make:
    return CYCLES[request.param]


def germinate(cycle: Cycle) -> np.ndarray:
    """One action per network: the first blueprint that may germinate in the first slot."""
    masks = cycle.engine.legal_actions()
    return np.stack([make_action(Op.GERMINATE, 0, int(masks.blueprint[row, 0].argmax())) for row in range(cycle.size)])


def test_the_same_sequence_of_calls_works_over_both_backends(make: Make) -> None:
    cycle = make()
    engine: GrowthEngine = cycle.engine
    backend: GrowthBackend = engine.backend
    networks, shape = engine.networks, engine.networks.table.stage.shape
    stages = set[int]()
    for number in range(1, 9):
        before = networks.measurements
        step = cycle.turn()
        assert engine.decisions.tolist() == [number] * cycle.size
        assert step.table is networks.table
        evaluation = cycle.engine.assessed.evaluation
        assert evaluation.loss.shape == (cycle.size,)
        assert evaluation.loss_contribution.shape == shape
        assert np.isfinite(evaluation.loss).all()
        np.testing.assert_array_equal(engine.history.losses[:, 0], evaluation.loss)
        assert engine.history.training.loss is cycle.engine.assessed.training.loss
        assert not np.isnan(engine.history.training.accuracy).any(), "taken to be that of validation where not known"
        assert networks.measurements is not before
        measured = networks.table.owning & np.isfinite(evaluation.loss_contribution)
        np.testing.assert_array_equal(np.isfinite(networks.measurements.contribution), measured)
        assert not cycle.engine.assessed.intervention.rows.any()
        assert cycle.engine.assessed.before_rollback is evaluation
        stages |= set(np.unique(networks.table.stage).tolist())
    assert {Stage.DORMANT, Stage.GERMINATED, Stage.BLENDING} <= stages
    observation = cycle.observe()
    assert observation.slots.shape[:2] == shape
    assert backend.chance_level == (engine.history.chance_loss, backend.chance_level[1])


def test_modules_are_measured_when_it_is_their_turn(make: Make) -> None:
    """By each network's own decisions: slots take turns, and in between the last measurement stands."""
    cycle = make()
    cycle.turn(germinate(cycle))
    for number in range(2, 6):
        cycle.turn(make_wait_actions(cycle.size))
        expected = (number - 1 + np.arange(cycle.engine.networks.table.slots)) % 2 == 0
        assert (cycle.engine.assessed.evaluation.fresh == expected).all()
        assert np.isfinite(cycle.engine.assessed.evaluation.loss_contribution[:, 0]).all(), "as last known"
        ages = cycle.engine.networks.measurements.contribution_age[:, 0]
        assert (ages == (0 if expected[0] else 1)).all()


def test_an_illegal_action_changes_nothing(make: Make) -> None:
    cycle = make()
    cycle.turn(germinate(cycle))
    state, table = pack_state(cycle.engine.state_dict()), cycle.engine.networks.table
    with pytest.raises(IllegalActionError):
        cycle.engine.apply(np.stack([make_action(Op.GERMINATE, 0, 0)] * cycle.size))
    assert cycle.engine.networks.table is table
    assert torch.equal(pack_state(cycle.engine.state_dict()), state)


def test_disallowed_operations_are_left_out_in_those_networks_only(make: Make) -> None:
    cycle = make()
    masks = cycle.engine.legal_actions()
    assert masks.op[:, Op.GERMINATE].all()
    disallowed = np.zeros((cycle.size, len(Op)), np.bool_)
    disallowed[0, Op.GERMINATE] = True
    fewer = cycle.engine.legal_actions(disallowed)
    assert fewer.op[:, Op.GERMINATE].tolist() == [False] + [True] * (cycle.size - 1)
    assert not fewer.blueprint[0].any()
    np.testing.assert_array_equal(fewer.blueprint[1:], masks.blueprint[1:])
    none = cycle.engine.legal_actions(np.zeros_like(disallowed))
    np.testing.assert_array_equal(none.op, masks.op)
    waiting = cycle.engine.legal_actions(np.ones_like(disallowed))
    assert (waiting.op == (np.arange(len(Op)) == Op.WAIT)).all(), "to wait is always legal"


def test_decisions_and_rollbacks_are_of_networks_that_are_running(make: Make) -> None:
    cycle = make()
    running = np.arange(cycle.size) != 0
    cycle.turn(make_wait_actions(cycle.size))
    cycle.engine.apply(make_wait_actions(cycle.size), running=running)
    assert cycle.engine.decisions.tolist() == [1] + [2] * (cycle.size - 1)
    for network in range(cycle.size):
        cycle.poison(network)
    cycle.engine.assess(cycle.train(), running)
    intervention = cycle.engine.assessed.intervention
    assert intervention.rows.tolist() == running.tolist()
    assert (intervention.trouble[running] == Trouble.NOT_FINITE).all()
    assert not np.isfinite(cycle.engine.assessed.before_rollback.loss).any()
    assert np.isfinite(cycle.engine.assessed.evaluation.loss).tolist() == running.tolist()
    assert cycle.engine.governor.rollbacks.tolist() == running.tolist()
    cycle.engine.apply(make_wait_actions(cycle.size))
    cycle.engine.assess(cycle.train(), cycle.everyone)
    assert cycle.engine.assessed.intervention.rows.tolist() == (~running).tolist(), "now the first one is running, too"
    assert np.isfinite(cycle.engine.assessed.evaluation.loss).all()


def test_after_a_rollback_modules_are_gone_and_what_was_measured_is_of_the_networks_as_they_are(make: Make) -> None:
    cycle = make()
    cycle.turn(germinate(cycle))
    cycle.turn(make_wait_actions(cycle.size))
    cycle.engine.apply(make_wait_actions(cycle.size))
    cycle.poison(0)
    cycle.engine.assess(cycle.train(), cycle.everyone)
    assert cycle.engine.assessed.intervention.rows.tolist() == [True] + [False] * (cycle.size - 1)
    changes = cycle.engine.assessed.intervention.transitions
    assert (changes.env.tolist(), changes.slot.tolist(), changes.after.tolist()) == ([0], [0], [Stage.PRUNED])
    table, evaluation = cycle.engine.networks.table, cycle.engine.assessed.evaluation
    assert table.stage[0, 0] == Stage.PRUNED
    assert evaluation.fresh[0].all(), "the restored network is measured whole"
    np.testing.assert_array_equal(np.isfinite(evaluation.loss_contribution), table.owning)
    restored = cycle.engine.backend.evaluate(np.zeros_like(evaluation.fresh))
    np.testing.assert_allclose(restored.loss, evaluation.loss)


def test_what_a_rollback_keeps_has_the_health_of_gradients_of_the_snapshot(make: Make) -> None:
    """A snapshot is not taken after every decision."""
    cycle = make()
    networks = cycle.engine.networks
    earlier: list[tuple[float, ...]] = []

    def gradient_measurements() -> tuple[float, ...]:
        measurements = networks.measurements
        means = (measurements.vanished_share, measurements.exploded_share, measurements.gradient_weight)
        return (bool(measurements.gradient_healthy[0, 0]), *(float(figure[0, 0]) for figure in means))

    def turn(actions: np.ndarray) -> None:
        cycle.turn(actions)
        earlier.append(gradient_measurements())

    turn(germinate(cycle))
    for _ in range(12):
        turn(make_wait_actions(cycle.size))
        if cycle.engine.legal_actions().op[0, Op.FOSSILIZE]:
            break
    actions = make_wait_actions(cycle.size)
    actions[0] = make_action(Op.FOSSILIZE, 0)
    turn(actions)
    for _ in range(4):
        turn(make_wait_actions(cycle.size))
    cycle.engine.apply(make_wait_actions(cycle.size))
    cycle.poison(0)
    cycle.engine.assess(cycle.train(), cycle.everyone)
    assert cycle.engine.assessed.intervention.rows.tolist() == [True] + [False] * (cycle.size - 1)
    assert cycle.engine.assessed.training.health.exploded[0, 0] == 1, "this training is of a network that is no more"
    assert networks.table.stage[0, 0] == Stage.FOSSILIZED
    healthy, *_, weight = gradient_measurements()
    assert healthy
    assert weight > 1
    assert gradient_measurements() in earlier


def test_a_new_seed_begins_with_means_of_its_own(make: Make) -> None:
    cycle = make()
    networks = cycle.engine.networks
    cycle.turn(germinate(cycle))
    for _ in range(2):
        cycle.turn(make_wait_actions(cycle.size))
    assert (networks.measurements.gradient_weight[:, 0] > 0).all()
    cycle.turn(np.stack([make_action(Op.PRUNE, 0)] * cycle.size))
    assert not networks.measurements.gradient_weight[:, 0].any()
    while not cycle.engine.legal_actions().slot[:, Op.GERMINATE, 0].all():
        cycle.turn(make_wait_actions(cycle.size))
    cycle.turn(germinate(cycle))
    assert not networks.measurements.gradient_healthy[:, 0].any(), "it has not learned yet"
    cycle.turn(make_wait_actions(cycle.size))
    assert (networks.measurements.gradient_weight[:, 0] == 1).all()


def test_without_a_governor_nothing_is_rolled_back(make: Make) -> None:
    cycle = make(CONFIG.model_copy(update={"governor": None}))
    cycle.turn(make_wait_actions(cycle.size))
    cycle.poison(0)
    cycle.turn(make_wait_actions(cycle.size))
    assert not cycle.engine.assessed.intervention.rows.any()
    assert np.isnan(cycle.engine.assessed.evaluation.loss[0])
    assert not cycle.engine.governor.rollbacks_used.any()


def known(cycle: Cycle) -> Bools:
    """Networks of which promises are known, ``[E]``."""
    assert cycle.engine.promises is not None
    return np.isfinite(cycle.engine.promises.age)


def test_promises_are_measured_in_free_slots_when_they_are_due(make: Make) -> None:
    cycle = make()
    cycle.turn(germinate(cycle))
    assert cycle.engine.promises is not None
    assert not known(cycle).any()
    ages: list[float] = []
    for _ in range(5):
        assert cycle.engine.promises_due().all() == (cycle.engine.decisions[0] in (2, 5)), "by now they are measured"
        cycle.turn(make_wait_actions(cycle.size))
        ages.append(float(cycle.engine.promises.age[0]))
    assert ages == [0, 1, 2, 0, 1], "first after two decisions, then after every third"
    figures = cycle.engine.promises.fitted
    assert np.isnan(figures[:, 0]).all(), "there is a module"
    assert np.isfinite(figures[:, 1:]).any(axis=(1, 2)).all()


def make_promises(cycle: Cycle, missing: Bools, value: float = 0.5) -> Promises:
    figures = np.full(cycle.engine.networks.specs.compatible.shape, value)
    return Promises(figures, figures / 2, missing)


def test_supplied_promises_hold_at_once_where_they_are_not_missing(make: Make) -> None:
    cycle = make()
    assert cycle.engine.promises is not None
    cycle.engine.apply(make_wait_actions(cycle.size))
    assert not cycle.engine.promises_due().any()
    missing = np.arange(cycle.size) == 0
    cycle.engine.measure_promises(cycle.everyone, supplied=make_promises(cycle, missing))
    assert known(cycle).tolist() == (~missing).tolist()
    assert (cycle.engine.promises.fitted[~missing] == 0.5).all()
    assert (cycle.engine.promises.held_out[~missing] == 0.25).all()
    assert cycle.engine.promises_due().tolist() == missing.tolist(), "what was missing stays due"
    cycle.train()
    cycle.engine.measure_promises(cycle.everyone)
    assert known(cycle).all()
    assert not cycle.engine.promises_due().any()
    assert cycle.engine.promises.age.tolist() == [0.0] + [1.0] * (cycle.size - 1)


def test_what_is_missing_stays_due_while_others_are_measured() -> None:
    cycle = CYCLES["population"]()
    first = np.arange(cycle.size) == 0
    cycle.engine.measure_promises(cycle.everyone, supplied=make_promises(cycle, first))
    cycle.engine.measure_promises(cycle.everyone, ~first, supplied=make_promises(cycle, ~first, 0.1))
    assert cycle.engine.promises_due().all(), "those of both calls"
    cycle.engine.measure_promises(cycle.everyone, first)
    assert cycle.engine.promises_due().tolist() == (~first).tolist()
    assert known(cycle).all()


def test_without_settings_for_promises_nothing_is_measured(make: Make) -> None:
    cycle = make()
    engine = cycle.remake(GrowthConfig(governor=CALM))
    assert engine.promises is None
    engine.measure_promises(cycle.everyone, supplied=make_promises(cycle, ~cycle.everyone))
    assert not engine.promises_due().any()


def test_growth_that_makes_no_progress_has_stalled_unless_something_is_unfinished(make: Make) -> None:
    cycle = make(CONFIG.model_copy(update={"plateau": 2}))
    cycle.turn(germinate(cycle))
    cycle.engine.history.plateau_age[:] = 2
    assert not cycle.engine.find_stalled().any()
    free = make(CONFIG.model_copy(update={"plateau": 2}))
    free.engine.history.plateau_age[0] = 2
    assert free.engine.find_stalled().tolist() == [True] + [False] * (free.size - 1)


@pytest.mark.parametrize("forget_skill", [None, False])
def test_a_network_that_loses_a_module_may_do_worse(make: Make, forget_skill: bool | None) -> None:
    """Its usual losses are forgotten, its skill only where that was taken away; other networks keep both."""
    cycle = make()
    for actions in (germinate(cycle), *[make_wait_actions(cycle.size)] * 3):
        cycle.turn(actions)
    monitor = cycle.engine.governor._monitor
    assert monitor is not None
    skill = monitor._now["best_skill"].copy()
    assert np.isfinite(skill).any()
    actions = make_wait_actions(cycle.size)
    actions[0] = make_action(Op.PRUNE, 0)
    cycle.engine.apply(actions, forget_skill=None if forget_skill is None else np.full(cycle.size, forget_skill))
    assert np.isnan(monitor._now["losses"][0]).all()
    assert np.isfinite(monitor._now["losses"][1:]).any(axis=-1).all()
    expected = skill.copy()
    if forget_skill is None:
        expected[0] = -np.inf
    np.testing.assert_array_equal(monitor._now["best_skill"], expected)


def test_restarted_networks_begin_anew_and_others_go_on() -> None:
    cycle = CYCLES["population"]()
    for _ in range(4):
        cycle.turn()
    cycle.poison(1)
    cycle.turn()
    rows = np.arange(cycle.size) == 1
    losses = cycle.engine.history.losses.copy()
    missing = make_promises(cycle, cycle.everyone)
    cycle.engine.measure_promises(cycle.everyone, supplied=missing)
    cycle.engine.restart(rows)
    assert cycle.engine.decisions.tolist() == [5, 0, 5]
    assert cycle.engine.governor.rollbacks.tolist() == [0, 0, 0]
    assert cycle.engine.promises_due().tolist() == (~rows).tolist()
    assert known(cycle).tolist() == (~rows).tolist()
    np.testing.assert_array_equal(cycle.engine.history.losses[~rows], losses[~rows])
    assert (cycle.engine.history.losses[1] == cycle.engine.history.chance_loss).all()


def test_an_engine_goes_on_where_it_was_saved(make: Make) -> None:
    """Another engine over the same networks, loaded, sees and does what the first one would have."""
    usual, resumed = make(), make()
    for number in range(10):
        if number == 5:
            state = resumed.engine.state_dict()
            resumed.engine = resumed.remake(CONFIG)
            assert not torch.equal(pack_state(resumed.engine.state_dict()), pack_state(state))
            resumed.engine.load_state_dict(state)
            assert torch.equal(pack_state(resumed.engine.state_dict()), pack_state(state))
        for cycle in (usual, resumed):
            if number == 8:
                cycle.poison(0)
        expected, _ = usual.turn(), resumed.turn()
        one, other = resumed.engine, usual.engine
        np.testing.assert_array_equal(one.assessed.intervention.trouble, other.assessed.intervention.trouble)
        np.testing.assert_array_equal(one.assessed.evaluation.loss, other.assessed.evaluation.loss)
        assert torch.equal(pack_state(resumed.engine.state_dict()), pack_state(usual.engine.state_dict())), number
    assert expected.table.stage_age.max() > 0
    assert usual.engine.governor.rollbacks[0] == 1


DIFFERENT: dict[str, GrowthConfig] = {
    "window": CONFIG.model_copy(update={"governor": CALM.model_copy(update={"window": 5})}),
    "no governor": CONFIG.model_copy(update={"governor": None}),
    "no promises": CONFIG.model_copy(update={"promise": None}),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_a_state_of_other_settings_is_refused(make: Make, name: str) -> None:
    cycle = make()
    cycle.turn()
    state = cycle.engine.state_dict()
    with pytest.raises(CheckpointError, match="governor" if name != "no promises" else "promises"):
        cycle.remake(DIFFERENT[name]).load_state_dict(state)


def test_a_state_of_another_number_of_networks_is_refused() -> None:
    states = {name: make().engine.state_dict() for name, make in CYCLES.items()}
    for name, make in CYCLES.items():
        (other,) = [state for kind, state in states.items() if kind != name]
        with pytest.raises(CheckpointError, match="the growth engine"):
            make().engine.load_state_dict(other)


def test_the_latest_actions_are_what_history_records(make: Make) -> None:
    cycle = make()
    cycle.turn(germinate(cycle))
    assert (cycle.engine.history.last_op == Op.GERMINATE).all()
    assert cycle.engine.history.tries.sum(axis=(1, 2)).tolist() == [1.0] * cycle.size
    state = cycle.engine.state_dict()
    assert (state["actions"][:, Head.OP] == Op.GERMINATE).all()
