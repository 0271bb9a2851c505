"""Detectors of trouble: each fires when it must, and only then."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from esper.engine.governor import Assessment, GovernorSettings, Monitor, Trouble, Vitals, skill
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

SETTINGS = GovernorSettings(window=5, fewest=3, sigmas=4, multiple=2, patience=3)
CALM = [1.0, 0.9, 1.1, 1.0, 0.95]


def look(monitor: Monitor, losses: Sequence[float], skills: Sequence[float] | None = None) -> Assessment:
    loss = np.array(losses, float)
    known = np.full(len(loss), 0.5) if skills is None else np.array(skills, float)
    return monitor.judge(Vitals(loss, known, np.isfinite(loss)))


def course(losses: Sequence[float], skills: Sequence[float] | None = None, **changes: float) -> list[Trouble]:
    """What each check of one network finds."""
    monitor = Monitor(SETTINGS.model_copy(update=changes), 1)
    known = [0.5] * len(losses) if skills is None else skills
    return [Trouble(look(monitor, [one], [s]).trouble[0]) for one, s in zip(losses, known, strict=True)]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_trouble_at_once(value: float) -> None:
    assert course([1.0, value, 1.0]) == [Trouble.NONE, Trouble.NOT_FINITE, Trouble.NONE]


def test_a_loss_far_above_the_usual_is_trouble_when_it_stays_there() -> None:
    assert course([*CALM, 9, 9, 9]) == [Trouble.NONE] * 7 + [Trouble.EXPLODED]


def test_a_single_peak_is_not() -> None:
    assert set(course([*CALM, 9, 9, 1.0, 9, 9, 1.0])) == {Trouble.NONE}


@pytest.mark.parametrize("high", [1.9, 1.3])
def test_a_loss_must_exceed_both_bounds(high: float) -> None:
    noisy = [1.0, 0.2, 1.8, 1.0, 0.4]
    assert set(course([*CALM, high, high, high, high])) == {Trouble.NONE}, "below the multiple of the mean"
    assert set(course([*noisy, 2.9, 2.9, 2.9])) == {Trouble.NONE}, "within the standard deviations"


def test_nothing_is_unusual_before_enough_is_known() -> None:
    assert set(course([1.0, 1.0, 99.0, 99.0])) == {Trouble.NONE}


def test_a_rise_slow_enough_becomes_usual() -> None:
    assert set(course([1.0 * 1.1**step for step in range(60)])) == {Trouble.NONE}


def test_unusual_losses_do_not_become_usual() -> None:
    assert course([*CALM, *[9.0] * 8], patience=8)[-1] is Trouble.EXPLODED


def test_a_network_that_guesses_after_it_did_better_has_collapsed() -> None:
    skills = [0.1, 0.3, 0.4, 0.02, 0.0, -0.05]
    assert course([1.0] * 6, skills) == [Trouble.NONE] * 5 + [Trouble.COLLAPSED]


def test_one_that_never_did_better_has_not() -> None:
    assert set(course([1.0] * 9, [0.2, *[0.0] * 8])) == {Trouble.NONE}


def test_without_accuracies_nothing_collapses() -> None:
    assert set(course([1.0] * 9, [np.nan] * 9)) == {Trouble.NONE}


def test_skill_is_zero_for_guessing_and_one_for_perfection() -> None:
    np.testing.assert_allclose(skill(np.array([0.25, 1.0, 0.0]), 4), [0, 1, -1 / 3])


def test_good_vitals_are_no_worse_than_usual() -> None:
    monitor = Monitor(SETTINGS, 1)
    assert all(look(monitor, [loss]).good[0] for loss in (1.0, 1.0, 1.0, 0.9))
    assert not look(monitor, [1.2]).good[0]
    assert not look(monitor, [9.0]).good[0]
    assert not look(monitor, [np.nan]).good[0]
    assert look(monitor, [50.0]).good[0], "after trouble nothing is usual any more"


def test_what_was_usual_can_be_forgotten_for_some() -> None:
    monitor = Monitor(SETTINGS, 2)
    for loss in CALM:
        look(monitor, [loss, loss])
    monitor.restart(np.array([True, False]))
    found = [look(monitor, [9.0, 9.0]).trouble.tolist() for _ in range(3)]
    assert found == [[0, 0], [0, 0], [Trouble.NONE, Trouble.EXPLODED]]


losses = st.sampled_from([0.5, 1.0, 1.1, 3.0, 30.0, np.nan])
skills = st.sampled_from([-0.1, 0.0, 0.1, 0.4, 0.9, np.nan])


@given(st.lists(st.lists(st.tuples(losses, skills), min_size=3, max_size=3), max_size=30))
def test_networks_are_judged_each_for_itself(checks: list[list[tuple[float, float]]]) -> None:
    together, alone = Monitor(SETTINGS, 3), [Monitor(SETTINGS, 1) for _ in range(3)]
    for check in checks:
        found = look(together, [loss for loss, _ in check], [known for _, known in check])
        for network, (loss, known) in enumerate(check):
            own = look(alone[network], [loss], [known])
            assert (own.trouble[0], own.good[0]) == (found.trouble[network], found.good[network])
            assert own.trouble[0] == Trouble.NONE or not own.good[0]


def test_losses_that_can_never_be_known_are_refused() -> None:
    with pytest.raises(ValidationError, match="9 must be known, but a window holds 8; lower fewest or raise window"):
        GovernorSettings(fewest=9)
    assert GovernorSettings(window=9, fewest=9).fewest == 9
