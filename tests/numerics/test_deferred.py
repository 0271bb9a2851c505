"""Results that are fetched together cost one wait, and each means what it means alone."""

import numpy as np
import torch

from esper.numerics.devices import Deferred, Floats
from rl.far_away import FAR, FarAway


def total(*arrays: Floats) -> float:
    return float(sum(array.sum() for array in arrays))


def pending(*values: float, device: torch.device | None = None) -> Deferred[float]:
    return Deferred([torch.full((2, 3), value, device=device) for value in values], total)


def test_side_by_side_each_result_gets_its_own_figures() -> None:
    first, second, third = pending(1.0), pending(2.0, 3.0), pending(4.0)
    assert first.combine(second).combine(third).fetch() == ((6.0, 30.0), 24.0)
    assert first.combine(second.combine(third)).fetch() == (6.0, (30.0, 24.0))


def test_shapes_come_through() -> None:
    shapes = Deferred(
        [torch.zeros(2, 3), torch.zeros(()), torch.zeros(0, 4)], lambda *all_: [one.shape for one in all_]
    )
    assert shapes.fetch() == [(2, 3), (), (0, 4)]


def test_figures_are_double_precision() -> None:
    kept = Deferred([torch.tensor([0.1])], lambda figure: figure)
    assert kept.fetch().dtype == np.float64
    assert kept.fetch()[0] == np.float32(0.1)


def test_together_they_wait_once_and_what_is_known_never() -> None:
    with FarAway() as far:
        known = Deferred((), lambda: "known")
        assert known.fetch() == "known"
        assert far.reads == []
        both = pending(1.0, device=FAR).combine(known).combine(pending(2.0, device=FAR))
        assert far.reads == []
        (_, word), _ = both.fetch()
        assert word == "known"
        assert len(far.reads) == 1
