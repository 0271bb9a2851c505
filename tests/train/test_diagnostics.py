"""Trends over the updates that are remembered."""

from collections.abc import Sequence

import pytest

from esper.rl.ppo import Figures
from esper.train.iteration import (
    SKIPPED_RATE,
    THRESHOLDS,
    Alarm,
    Anomaly,
    UpdateHistory,
    extend_history,
    find_anomalies,
    scale_rate,
    was_alarmed,
)
from esper.train.settings import HISTORY
from lab.planted import HEADS, UPDATE

TARGET_KL = 0.03
HEALTHY = {**UPDATE, "stopped_early": 1.0, "optimizer_steps": 12.0}


def with_head(head: str, **figures: float) -> Figures:
    """The healthy update with other figures of one head."""
    return {**HEALTHY, **{f"{name}/{head}": value for name, value in figures.items()}}


def with_entropy(head: str, entropy: float, share: float = 1.0) -> Figures:
    return with_head(head, head_entropy=entropy, head_share=share)


def with_steps(steps: int, stopped: bool = True) -> Figures:
    return {**HEALTHY, "optimizer_steps": steps, "stopped_early": stopped}


def history_of(updates: Sequence[Figures]) -> UpdateHistory:
    history: UpdateHistory = ()
    for update in updates:
        history = extend_history(history, update)
    return history


def find_last_alarms(updates: Sequence[Figures]) -> tuple[Alarm, ...]:
    return find_anomalies(history_of(updates), TARGET_KL)


def find_last_anomalies(updates: Sequence[Figures]) -> tuple[Anomaly, ...]:
    return tuple(alarm.anomaly for alarm in find_last_alarms(updates))


def test_no_more_updates_are_remembered_than_the_bound() -> None:
    updates = [with_steps(number) for number in range(HISTORY + 5)]
    assert history_of(updates) == tuple(updates[-HISTORY:])


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize(
    ("entropies", "expected"),
    [
        ([0.9, 0.8, 0.6, 0.44], (Anomaly.ENTROPY_FALL,)),
        ([0.9, 0.8, 0.6, 0.46], ()),
        ([0.4, 0.2, 0.9], ()),
        ([0.9, *[0.6] * HISTORY, 0.44], ()),
        ([0.44], ()),
        ([0.9, 0.01], (Anomaly.ENTROPY, Anomaly.ENTROPY_FALL)),
    ],
    ids=["fell", "fell less", "rose", "fell slowly", "nothing before", "fell to nothing"],
)
def test_a_head_that_quickly_becomes_certain_is_an_anomaly(
    head: str, entropies: list[float], expected: tuple[Anomaly, ...]
) -> None:
    alarms = find_last_alarms([with_entropy(head, entropy) for entropy in entropies])
    assert tuple(alarm.anomaly for alarm in alarms) == expected
    for alarm in alarms:
        assert (alarm.head, alarm.figure, alarm.value) == (head, f"head_entropy/{head}", entropies[-1])
        assert alarm.value < alarm.bound


@pytest.mark.parametrize("head", HEADS)
def test_updates_in_which_a_head_had_no_choice_do_not_count_for_its_entropy(head: str) -> None:
    closed = with_entropy(head, 0.0, share=0.0)
    assert find_last_anomalies([closed] * 3) == ()
    assert find_last_anomalies([closed, with_entropy(head, 0.9)]) == ()
    assert find_last_anomalies([with_entropy(head, 0.9), closed]) == (Anomaly.STARVED,)


SICK_HEADS: dict[Anomaly, dict[str, float]] = {
    Anomaly.CLIPPED: {"head_clip_fraction": 1.0},
    Anomaly.GRADIENT: {"module_gradient_norm": 0.0},
    Anomaly.ENTROPY: {"head_entropy": 0.0},
    Anomaly.STARVED: {"head_share": 0.0005},
}
"""Figures of a single update that are an anomaly of a head."""


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("anomaly", SICK_HEADS)
def test_every_head_has_the_same_alarms(head: str, anomaly: Anomaly) -> None:
    (figure,) = SICK_HEADS[anomaly]
    (alarm,) = find_last_alarms([with_head(head, **SICK_HEADS[anomaly])])
    assert (alarm.anomaly, alarm.head, alarm.figure) == (anomaly, head, f"{figure}/{head}")
    assert alarm.label == f"{anomaly} of {head}"
    assert f"{figure}/{head} is {alarm.value:.3g}, the bound {alarm.bound:.3g}" in alarm.describe()


@pytest.mark.parametrize("head", HEADS)
def test_a_head_that_never_had_a_choice_raises_nothing(head: str) -> None:
    closed = with_head(head, head_share=0.0, head_entropy=0.0, head_clip_fraction=0.0, module_gradient_norm=0.0)
    assert find_last_anomalies([closed] * 3) == ()


def test_an_update_that_came_to_no_step_has_no_gradients_to_judge() -> None:
    unstepped = {**with_head("slot", module_gradient_norm=0.0), "optimizer_steps": 0.0}
    assert find_last_anomalies([unstepped]) == ()


def test_alarms_are_remembered_for_some_updates() -> None:
    history = history_of([HEALTHY, with_head("slot", head_entropy=0.0), HEALTHY, HEALTHY])
    assert [was_alarmed(history, TARGET_KL, updates) for updates in range(4)] == [False, False, False, True]
    assert not was_alarmed((), TARGET_KL, 3)


def test_each_skipped_update_halves_the_rate_of_those_that_follow() -> None:
    scales: list[float] = []
    history: UpdateHistory = ()
    for skipped in (False, True, False, True, False):
        scales.append(scale_rate(history))
        history = extend_history(history, {**HEALTHY, "rate_scale": scales[-1], "skipped": skipped})
    assert scales == [1.0, 1.0, SKIPPED_RATE, SKIPPED_RATE, SKIPPED_RATE**2]


@pytest.mark.parametrize(
    ("updates", "expected"),
    [([12, 1, 0, 1], (Anomaly.SHORT_UPDATES,)), ([1, 1, 12], ()), ([1, 2, 1], ()), ([1, 1], ())],
)
def test_updates_that_keep_ending_at_once_are_an_anomaly(updates: list[int], expected: tuple[Anomaly, ...]) -> None:
    assert THRESHOLDS.short_updates == 3
    assert find_last_anomalies([with_steps(steps) for steps in updates]) == expected


def test_updates_that_are_short_by_their_settings_are_none() -> None:
    assert find_last_anomalies([with_steps(1, stopped=False)] * 5) == ()


@pytest.mark.parametrize("anomaly", list(Anomaly))
def test_anomalies_have_a_meaning(anomaly: Anomaly) -> None:
    assert anomaly.meaning
