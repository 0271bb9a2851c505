"""The pages of the gallery are what the stored runs say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.landing

ROOT = Path(__file__).parents[2]
LINES = ROOT / "benchmarks" / "results" / "foreign"


def test_the_pages_are_what_the_stored_runs_give() -> None:
    from docs.write_gallery import document  # noqa: PLC0415 - imports all benchmarks of foreign models

    pages = {page.name: page.read_text() for page in (ROOT / "docs" / "gallery").glob("*.md")}
    assert pages == document(), "write them anew: python docs/write_gallery.py"


def test_runs_with_decisions_are_those_of_the_table() -> None:
    table = {(one["problem"], one["arm"], one["seed"]): one for one in read("reporting.jsonl")}
    runs = read("gallery.jsonl")
    assert len(runs) == 5 * len({one["problem"] for one in runs})
    for one in runs:
        decisions = one.pop("decisions")
        assert one == table[one["problem"], one["arm"], one["seed"]]
        assert len(decisions) == one["tried"]
        assert sum(line.startswith("kept ") for line in decisions) == one["kept"]


def test_what_a_module_is_judged_by_can_be_read() -> None:
    from docs.write_gallery import parse_tried  # noqa: PLC0415
    from esper.growth.tried import ModuleJudgement, TriedModule  # noqa: PLC0415

    judgement = ModuleJudgement(-0.5, 0.25, 0.0, 0.0, -0.125, 0.01, 0.01)
    module = TriedModule("rho.1", "mlp", 612, 3, 11, False, "look", judgement)
    found = parse_tried(str(module))
    assert (found.slot, found.blueprint, found.kept) == ("rho.1", "mlp", False)
    assert (found.contribution, found.loss) == (-0.5, -12.5)


def read(name: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in (LINES / name).read_text().splitlines()]
