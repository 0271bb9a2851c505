"""The benchmark of promise: it compares what it names."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.promise import compare, promised, sample, score_with
from esper.lifecycle.actions import Blend
from esper.population.parameters import SeedKind

pytestmark = pytest.mark.landing


def test_candidates_are_scored_and_looked_at_instance_by_instance() -> None:
    instances = sample(3, 1, "transfer")
    assert {one.family for one in instances} == {"pointer", "halves", "product"}
    found = promised(instances)
    assert {values.shape for values in found.values()} == {(3, 3, 7)}
    alone = promised(instances[1:2])["promise, 64 examples"]
    np.testing.assert_allclose(alone[0], found["promise, 64 examples"][1], rtol=1e-4)
    score = score_with(instances[:1], (SeedKind(0, 0, Blend.ADD),))
    assert score.shape == (1,)
    assert 0 <= score[0] <= 1
    assert score_with(instances[:1], ()) != score


def test_the_table_picks_what_is_promised_most() -> None:
    scores = np.array([[[0.2, 0.6]], [[0.9, 0.1]]])
    table = compare(scores, np.array([0.1, 0.3]), {"right": scores, "wrong": -scores})
    cells = dict(zip(table.columns[0].cells, table.columns[1].cells, strict=True))
    ranks = dict(zip(table.columns[0].cells, table.columns[2].cells, strict=True))
    assert cells["nothing grown"] == "0.200"
    assert cells["a random candidate"] == "0.450"
    assert cells["the best one for all, in hindsight"] == "0.550"
    assert str(cells["right"]).startswith("0.750 ")
    assert str(cells["wrong"]).startswith("0.150 ")
    assert cells["the best one for each, in hindsight"] == "0.750"
    assert (ranks["right"], ranks["wrong"]) == ("1.00", "-1.00")
