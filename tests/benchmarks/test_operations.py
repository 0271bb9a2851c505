"""The benchmark lists operations, and what networks add from the rest."""

from __future__ import annotations

import pytest
import torch

from benchmarks import operations
from benchmarks.operations import DECISIONS, Player, matmul_rate, measure_costs, profile_operations
from train.runs import tiny
from train.short_suite import short_suite

pytestmark = pytest.mark.landing


def test_operations_are_told_dearest_first():
    with short_suite():
        found = profile_operations(Player(tiny(), 2))
    shares = [one.share for one in found]
    assert shares == sorted(shares, reverse=True)
    assert 0 < sum(shares) <= 1
    assert all(one.calls >= 1 / DECISIONS and one.milliseconds > 0 for one in found)
    assert matmul_rate() > 0


def test_time_is_split_into_what_networks_add_and_the_rest(monkeypatch: pytest.MonkeyPatch):
    """A decision that takes 30 ms and 2 ms for each network, by a clock of the test."""
    clock = [0.0]
    monkeypatch.setattr(operations, "time", type("Clock", (), {"perf_counter": lambda: clock[0]}))

    class Steady(Player):
        def __init__(self, size: int) -> None:
            self.size = size

        def decide(self) -> None:
            torch.mm(torch.ones(self.size, 3), torch.ones(3, 5))
            clock[0] += 0.03 + 0.002 * self.size

    found = measure_costs([Steady(size) for size in (16, 32, 64)])
    assert found.fixed == pytest.approx(0.03)
    assert found.each == pytest.approx(0.002)
    assert found.flops == 2 * 3 * 5
