"""The cost of slots is measured in turns."""

from __future__ import annotations

import pytest
import torch

from benchmarks.attach import measured

pytestmark = pytest.mark.landing


def test_everybody_has_a_time_in_every_turn() -> None:
    seconds = measured(repeats=3, steps=1, batch_size=2, device=torch.device("cpu"))
    assert seconds.shape == (3, 3)
    assert (seconds > 0).all()
