"""Detectors of trouble: each fires when it must, and only then."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from esper.engine.governor import Diagnosis, GovernorSettings, Monitor, Trouble, skill
from esper.errors import CheckpointError

SETTINGS = GovernorSettings(window=5, fewest=3, sigmas=4, multiple=2, patience=3)
CALM = [1.0, 0.9, 1.1, 1.0, 0.95]


def look(monitor: Monitor, losses: Sequence[float], skills: Sequence[float] | None = None) -> Diagnosis:
    """One check; without ``skills`` a loss above 2 takes half of the skill along."""
    loss = np.array(losses, float)
    known = np.where(loss > 2, 0.25, 0.5) if skills is None else np.array(skills, float)
    return monitor.check(loss, known[:, None], np.isfinite(loss))


def course(losses: Sequence[float], skills: Sequence[float] | None = None, **changes: float) -> list[Trouble]:
    """What each check of one network finds."""
    monitor = Monitor(SETTINGS.model_copy(update=changes), 1)
    known = [None] * len(losses) if skills is None else [[skill] for skill in skills]
    return [Trouble(look(monitor, [one], s).trouble[0]) for one, s in zip(losses, known, strict=True)]


NONE = Trouble.NONE
COURSES: dict[str, tuple[list[Trouble], list[Trouble]]] = {
    **{
        f"{value} is trouble at once": (course([1.0, value, 1.0]), [NONE, Trouble.NOT_FINITE, NONE])
        for value in (np.nan, np.inf, -np.inf)
    },
    "a loss far above the usual is trouble when it stays": (course([*CALM, 9, 9, 9]), [NONE] * 7 + [Trouble.EXPLODED]),
    "a high loss is not where validation has lost nothing": (course([*CALM, *[9.0] * 8], [0.5] * 13), [NONE] * 13),
    "unless that comes later": (course([*CALM, *[9.0] * 4], [*[0.5] * 8, 0.2]), [NONE] * 8 + [Trouble.EXPLODED]),
    "after a window it is the usual one": (
        course([*CALM, *[9.0] * 5, *[9.0] * 3, *[99.0] * 3], [*[0.5] * 11, *[0.2] * 5]),
        [NONE] * 15 + [Trouble.EXPLODED],
    ),
    "nor is a lower skill at the usual loss": (course([1.0] * 9, [*[0.9] * 5, *[0.3] * 4]), [NONE] * 9),
    "noise near zero is not": (course([1e-4, 2e-4, 1e-4, *[0.03] * 6], [0.95, 0.96, 0.95, *[0.9] * 6]), [NONE] * 9),
    "nor are losses below zero that vary": (
        course([-3.0, -3.1, -2.9, -3.0, *[-2.5] * 4], [*[0.9] * 4, *[0.5] * 4]),
        [NONE] * 8,
    ),
    "losses that rise from below zero are": (
        course([-3.0, -3.1, -2.9, -3.0, *[1.0] * 3], [*[0.9] * 4, *[0.5] * 3]),
        [NONE] * 6 + [Trouble.EXPLODED],
    ),
    "single peaks are not": (course([*CALM, 9, 9, 1.0, 9, 9, 1.0]), [NONE] * 11),
    "below the multiple of the mean": (course([*CALM, *[1.9] * 4]), [NONE] * 9),
    "within the standard deviations": (course([1.0, 0.2, 1.8, 1.0, 0.4, 2.9, 2.9, 2.9]), [NONE] * 8),
    "nothing is unusual before enough is known": (course([1.0, 1.0, 99.0, 99.0]), [NONE] * 4),
    "a rise slow enough becomes usual": (course([1.1**step for step in range(60)]), [NONE] * 60),
    "unusual losses do not become usual": (course([*CALM, *[9.0] * 8], patience=8), [NONE] * 12 + [Trouble.EXPLODED]),
    "who guesses after it did better has collapsed": (
        course([1.0] * 6, [0.1, 0.3, 0.4, 0.02, 0.0, -0.05]),
        [NONE] * 5 + [Trouble.COLLAPSED],
    ),
    "who never did better has not": (course([1.0] * 9, [0.2, *[0.0] * 8]), [NONE] * 9),
    "without accuracies nothing collapses": (course([1.0] * 9, [np.nan] * 9), [NONE] * 9),
}


@pytest.mark.parametrize("name", COURSES)
def test_trouble_is_found_when_it_lasts_and_only_then(name: str) -> None:
    found, expected = COURSES[name]
    assert found == expected


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
    monitor.forget(np.array([True, False]), skill=True)
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


def judge(monitor: Monitor, skills: Sequence[Sequence[float]]) -> list[int]:
    """The trouble of networks with that skill by each measure, at an even loss."""
    calm = np.ones(len(skills))
    return monitor.check(calm, np.array(skills), np.ones(len(skills), np.bool_)).trouble.tolist()


def test_one_measure_of_skill_is_enough_to_collapse_by() -> None:
    monitor = Monitor(SETTINGS, 2, measures=2)
    judge(monitor, [[0.5, 0.5], [0.5, np.nan]])
    found = [judge(monitor, [[0.5, 0.0], [0.5, 0.0]]) for _ in range(3)]
    assert found == [[0, 0], [0, 0], [Trouble.COLLAPSED, Trouble.NONE]]


def test_an_unknown_loss_of_a_finite_network_is_neither_usual_nor_good() -> None:
    monitor = Monitor(SETTINGS, 1)
    for loss in CALM:
        look(monitor, [loss])
    unknown = monitor.check(np.array([np.nan]), np.array([[0.5]]), np.ones(1, np.bool_))
    assert (unknown.trouble[0], unknown.usual[0], unknown.good[0]) == (Trouble.NONE, False, False)
    assert [look(monitor, [9.0]).trouble[0] for _ in range(3)] == [0, 0, Trouble.EXPLODED], "the window is as it was"


def test_losses_explode_only_if_skill_is_lost_by_the_last_measure() -> None:
    """By accuracy and losses; the second network overfits, the third has no accuracy, of the last nothing is known."""
    monitor = Monitor(SETTINGS, 4, measures=2)
    finite, unknown = np.ones(4, np.bool_), np.nan
    for loss in CALM:
        monitor.check(np.full(4, loss), np.array([[0.9, 0.9], [0.9, 0.9], [unknown, 0.9], [unknown] * 2]), finite)
    worse = np.array([[0.5, 0.5], [0.5, 0.9], [unknown, 0.5], [unknown] * 2])
    found = [monitor.check(np.full(4, 9.0), worse, finite).trouble.tolist() for _ in range(3)]
    assert found == [[0] * 4, [0] * 4, [Trouble.EXPLODED, 0, Trouble.EXPLODED, 0]]


def test_losses_far_above_chance_are_trouble_before_anything_is_usual() -> None:
    monitor = Monitor(SETTINGS, 2)
    loss, diverged = np.full(2, 9.0), np.array([True, False])
    vitals = loss, np.full((2, 1), np.nan), np.ones(2, np.bool_), diverged
    found = [monitor.check(*vitals).trouble.tolist() for _ in range(3)]
    assert found == [[0, 0], [0, 0], [Trouble.EXPLODED, Trouble.NONE]]


def test_a_monitor_returns_to_its_last_save_in_some_networks() -> None:
    """Losses, skill and what had begun: after `restore` a network is judged as it was after `save`."""
    monitor, twin = Monitor(SETTINGS, 2), Monitor(SETTINGS, 2)
    for held in (monitor, twin):
        for loss in CALM:
            look(held, [loss, loss], [0.5, 0.5])
        look(held, [9.0, 9.0], [0.0, 0.0])  # one of three checks that make trouble
    monitor.save(np.array([True, True]))
    for _ in range(4):
        look(monitor, [30.0, 1.0], [0.9, 0.9])
    monitor.restore(np.array([True, False]))
    found, expected = ([look(held, [9.0, 9.0]).trouble.tolist() for _ in range(3)] for held in (monitor, twin))
    assert [row[0] for row in found] == [row[0] for row in expected] == [0, Trouble.EXPLODED, 0]
    assert [row[1] for row in found] == [0, 0, Trouble.EXPLODED], "the other one was calm meanwhile"


def test_a_save_of_some_networks_leaves_the_others_as_they_were() -> None:
    monitor = Monitor(SETTINGS, 2)
    for loss in CALM:
        look(monitor, [loss, loss])
    monitor.save(np.array([True, False]))
    monitor.restore(np.array([True, True]))
    found = [look(monitor, [9.0, 9.0]).trouble.tolist() for _ in range(3)]
    assert found == [[0, 0], [0, 0], [Trouble.EXPLODED, Trouble.NONE]], "nothing was usual when the other was saved"


def test_a_monitor_goes_on_where_it_was_saved() -> None:
    monitor, twin = Monitor(SETTINGS, 2), Monitor(SETTINGS, 2)
    for loss in CALM:
        look(monitor, [loss, 2 * loss], [0.5, 0.6])
    monitor.save(np.array([True, False]))
    look(monitor, [9.0, 1.0])
    twin.load_state_dict(monitor.state_dict())
    for restored in (False, True):
        for held in (monitor, twin):
            if restored:
                held.restore(np.array([True, True]))
        rows = [look(monitor, [9.0, 9.0]).trouble.tolist() for _ in range(3)]
        assert rows == [look(twin, [9.0, 9.0]).trouble.tolist() for _ in range(3)]
    with pytest.raises(CheckpointError, match="monitor"):
        Monitor(SETTINGS.model_copy(update={"window": 6}), 2).load_state_dict(monitor.state_dict())


def test_losses_that_can_never_be_known_are_refused() -> None:
    with pytest.raises(ValidationError, match="fewest is 9, but the window has only 8; lower fewest or raise window"):
        GovernorSettings(fewest=9)
    assert GovernorSettings(window=9, fewest=9).fewest == 9
