"""Alpha's way in closed form."""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from esper.lifecycle.actions import ALPHA_TARGETS, TEMPOS, Curve, Op, make_action, make_wait_actions
from esper.lifecycle.rules import Rules
from esper.lifecycle.stages import Stage
from esper.lifecycle.table import SeedTable
from esper.lifecycle.transitions import LONGEST_RAMP, compute_alpha, compute_ramp_progress
from lifecycle.support import SHADOW, play
from open_rules import open_rules

WAIT = make_wait_actions(1)[0]


def alphas(table: SeedTable, steps: int, rules: Rules) -> list[float]:
    """Alpha in each of the next steps of waiting."""
    values: list[float] = []
    for _ in range(steps):
        table = play(table, rules, WAIT).table
        values.append(float(table.alpha[0, 0]))
    return values


def germinated(tempo: int, target: float, rules: Rules) -> SeedTable:
    return play(SeedTable.dormant(1, 1), rules, make_action(Op.GERMINATE, tempo=tempo, alpha_target=target)).table


@pytest.mark.parametrize("tempo", TEMPOS)
@pytest.mark.parametrize("target", ALPHA_TARGETS)
def test_a_new_seed_rises_by_equal_parts(tempo: int, target: float) -> None:
    """Tempo 3 to alpha 1 is 1/3, 2/3, 1, and then it stays."""
    table = germinated(tempo, target, open_rules())
    assert table.alpha[0, 0] == 0
    expected = [target * min(elapsed / tempo, 1) for elapsed in range(1, tempo + 3)]
    assert alphas(table, tempo + 2, open_rules()) == pytest.approx(expected, abs=1e-6)


def test_a_new_seed_in_isolation_rises_once_advanced() -> None:
    """The first part of the ramp comes in the step of the ADVANCE itself."""
    table = play(germinated(3, 1.0, SHADOW), SHADOW, WAIT, WAIT, WAIT).table
    assert table.stage[0, 0] == Stage.TRAINING
    assert table.alpha[0, 0] == 0
    table = play(table, SHADOW, make_action(Op.ADVANCE)).table
    assert [float(table.alpha[0, 0]), *alphas(table, 3, SHADOW)] == pytest.approx([1 / 3, 2 / 3, 1, 1], abs=1e-6)


@pytest.mark.parametrize("curve", Curve)
@pytest.mark.parametrize("speed", [3, 5, 8])
def test_a_change_of_alpha_follows_its_curve(curve: Curve, speed: int) -> None:
    holding = play(germinated(3, 1.0, open_rules()), open_rules(), *[WAIT] * 4).table
    assert holding.stage[0, 0] == Stage.HOLDING
    chosen = make_action(Op.SET_ALPHA, alpha_target=0.5, alpha_speed=speed, alpha_curve=curve)
    table = play(holding, open_rules(), chosen).table
    parts = {
        Curve.LINEAR: lambda x: x,
        Curve.COSINE: lambda x: math.sin(math.pi * x / 2) ** 2,
        Curve.SIGMOID: lambda x: (1 + math.tanh(5 * (x - 0.5)) / math.tanh(2.5)) / 2,
    }
    expected = [1 - 0.5 * parts[curve](elapsed / speed) for elapsed in range(1, speed + 1)]
    values = [float(table.alpha[0, 0]), *alphas(table, speed, open_rules())]
    assert values == pytest.approx([*expected, 0.5], abs=1e-6)
    assert values[speed - 1] == 0.5


def test_a_change_at_once_is_there_in_the_same_step() -> None:
    holding = play(germinated(3, 1.0, open_rules()), open_rules(), *[WAIT] * 4).table
    table = play(holding, open_rules(), make_action(Op.SET_ALPHA, alpha_target=0.7, alpha_speed=0)).table
    assert (table.alpha[0, 0], table.stage[0, 0]) == (np.float32(0.7), Stage.BLENDING)
    table = play(table, open_rules(), WAIT).table
    assert (table.alpha[0, 0], table.stage[0, 0]) == (np.float32(0.7), Stage.HOLDING)


def test_pruning_falls_from_where_alpha_is() -> None:
    """Two thirds up, down again in three steps."""
    table = play(germinated(3, 1.0, open_rules()), open_rules(), WAIT, WAIT, make_action(Op.PRUNE, alpha_speed=3)).table
    assert [float(table.alpha[0, 0]), *alphas(table, 2, open_rules())] == pytest.approx([4 / 9, 2 / 9, 0], abs=1e-6)


def test_targets_are_reached_exactly() -> None:
    """In float32, start + (target - start) need not be target."""
    start = np.random.default_rng(0).random(1000, dtype=np.float32)
    target = np.float32(0.1) * np.ones_like(start)
    assert np.any(start + (target - start) != target), "the case this test is about"
    full = np.full(1000, 5, np.int16)
    assert np.array_equal(compute_alpha(start, target, full, full, np.zeros(1000, np.int8)), target)


@given(st.sampled_from(Curve), st.integers(1, LONGEST_RAMP))
def test_curves_rise_from_zero_to_one_and_are_symmetric(curve: Curve, duration: int) -> None:
    values = [compute_ramp_progress(curve, elapsed / duration) for elapsed in range(duration + 1)]
    assert (values[0], values[-1]) == (0, 1)
    assert all(earlier < later for earlier, later in pairwise(values))
    assert values == pytest.approx([1 - value for value in reversed(values)])
