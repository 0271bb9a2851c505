"""Trends over the updates that are remembered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from esper.lifecycle.actions import Head
from esper.rl.diagnostics import (
    HISTORY,
    THRESHOLDS,
    Anomaly,
    UpdateHistory,
    UpdateMetrics,
    extend_history,
    find_anomalies,
)

TARGET_KL = 0.03
HEALTHY = UpdateMetrics(
    policy_loss=-0.01,
    value_loss=0.2,
    entropy=0.8,
    kl=0.02,
    clip_fraction=0.1,
    gradient_norm=0.3,
    first_ratio_deviation=0.0,
    explained_variance=0.6,
    return_mean=0.6,
    return_deviation=0.2,
    advantage_deviation=0.1,
    learning_rate=1e-3,
    optimizer_steps=12,
    stopped_early=True,
    finite=True,
    head_entropy={head.name.lower(): 0.8 for head in Head},
    head_entropy_weight={head.name.lower(): 0.01 for head in Head},
    head_share={head.name.lower(): 0.5 for head in Head},
    head_clip_fraction={head.name.lower(): 0.1 for head in Head},
    module_gradient_norm={"lstm": 0.1},
)


def with_op_entropy(entropy: float, share: float = 1.0) -> UpdateMetrics:
    return replace(
        HEALTHY,
        head_entropy={**HEALTHY.head_entropy, "op": entropy},
        head_share={**HEALTHY.head_share, "op": share},
    )


def with_steps(steps: int, stopped: bool = True) -> UpdateMetrics:
    return replace(HEALTHY, optimizer_steps=steps, stopped_early=stopped)


def history_of(updates: Sequence[UpdateMetrics]) -> UpdateHistory:
    history: UpdateHistory = ()
    for update in updates:
        history = extend_history(history, update)
    return history


def find_last_anomalies(updates: Sequence[UpdateMetrics]) -> tuple[Anomaly, ...]:
    return find_anomalies(history_of(updates), TARGET_KL)


def test_no_more_updates_are_remembered_than_the_bound() -> None:
    updates = [with_steps(number) for number in range(HISTORY + 5)]
    assert history_of(updates) == tuple(updates[-HISTORY:])


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
def test_an_operation_that_quickly_becomes_certain_is_told(
    entropies: list[float], expected: tuple[Anomaly, ...]
) -> None:
    assert find_last_anomalies([with_op_entropy(entropy) for entropy in entropies]) == expected


def test_updates_without_a_choice_of_operation_tell_nothing_of_its_entropy() -> None:
    assert find_last_anomalies([with_op_entropy(0.9), with_op_entropy(0.0, share=0.0)]) == ()
    assert find_last_anomalies([with_op_entropy(0.0, share=0.0), with_op_entropy(0.9)]) == ()


@pytest.mark.parametrize(
    ("updates", "expected"),
    [
        ([12, 1, 0, 1], (Anomaly.SHORT_UPDATES,)),
        ([1, 1, 12], ()),
        ([1, 2, 1], ()),
        ([1, 1], ()),
    ],
)
def test_updates_that_keep_ending_at_once_are_told(updates: list[int], expected: tuple[Anomaly, ...]) -> None:
    assert THRESHOLDS.short_updates == 3
    assert find_last_anomalies([with_steps(steps) for steps in updates]) == expected


def test_updates_that_are_short_by_their_settings_are_not_told() -> None:
    assert find_last_anomalies([with_steps(1, stopped=False)] * 5) == ()


def test_trends_have_a_meaning() -> None:
    assert Anomaly.ENTROPY_FALL.meaning
    assert Anomaly.SHORT_UPDATES.meaning
