"""Versions that compute the same are equal; where one bit differs, it is named."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tools import bit_scenarios, same_bits

TREE = {"decision 1": {"op": "wait", "loss": 0.5, "contributions": {"1": math.nan}}, "events": [{"step": 0}]}


def change(**fields: Any) -> dict[str, Any]:
    """The tree, with other fields in its decision."""
    return {**TREE, "decision 1": {**TREE["decision 1"], **fields}}


def test_equal_trees_are_equal_in_any_order_and_with_what_is_no_number() -> None:
    same = json.loads(json.dumps(dict(reversed(TREE.items()))))
    assert same_bits.hash_tree(TREE) == same_bits.hash_tree(same)
    assert same_bits.name_differences(TREE, same) == []


@pytest.mark.parametrize("other", [math.nextafter(0.5, 1), 1, "0.5", None])
def test_the_smallest_change_of_a_value_is_named(other: Any) -> None:
    assert same_bits.hash_tree(TREE) != same_bits.hash_tree(change(loss=other))
    assert same_bits.name_differences(TREE, change(loss=other)) == [f"  decision 1/loss: 0.5 -> {json.dumps(other)}"]


def test_the_sign_of_zero_is_a_difference() -> None:
    assert same_bits.name_differences(change(loss=0.0), change(loss=-0.0)) == ["  decision 1/loss: 0.0 -> -0.0"]


def test_what_appears_and_what_is_gone_is_named_as_such() -> None:
    assert same_bits.name_differences(TREE, change(value=1)) == ["  decision 1/value: added, 1"]
    assert same_bits.name_differences(change(value=1), TREE) == ["  decision 1/value: removed, was 1"]
    longer = {**TREE, "events": [*TREE["events"], {"step": 1}]}
    assert same_bits.name_differences(TREE, longer) == ['  events/1: added, {"step": 1}']


def test_many_differences_are_counted_and_some_of_each_part_are_named() -> None:
    base = {"decisions": dict.fromkeys(map(str, range(50)), 0), "model": {"weight": "a"}}
    head = {"decisions": dict.fromkeys(map(str, range(50)), 1), "model": {"weight": "b"}}
    lines = same_bits.name_differences(base, head)
    assert len(lines) <= same_bits.SHOWN + 1
    assert '  model/weight: "a" -> "b"' in lines
    assert lines[-1] == "  51 fields differ: decisions/N 50, model/weight 1"


def write_results(folder: Path, base: Any, head: Any) -> list[Path]:
    """Results of a scenario ``some`` on both sides."""
    folders = [folder / "base", folder / "head"]
    for side, result in zip(folders, (base, head), strict=True):
        side.mkdir()
        (side / "some.json").write_text(json.dumps(result))
    return folders


def test_a_scenario_that_fails_is_never_equal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    failed = {"error": "ValueError: no"}
    folders = write_results(tmp_path, failed, failed)
    assert not same_bits.compare_scenario("some", folders, [None, None])
    assert capsys.readouterr().out == "FAILED  some\n  base: ValueError: no\n  head: ValueError: no\n"


def test_one_line_says_that_a_scenario_is_equal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = write_results(tmp_path, {"tree": TREE, "seconds": 1.0}, {"tree": TREE, "seconds": 2.0})
    assert same_bits.compare_scenario("some", folders, [None, None])
    assert capsys.readouterr().out == f"equal   some  {same_bits.hash_tree(TREE)[:16]}  2.0 s\n"


def test_one_bit_of_a_tensor_shows() -> None:
    tensor = torch.linspace(0, 1, 100)
    other = tensor.clone()
    other[50] = torch.nextafter(other[50], torch.tensor(2.0))
    assert bit_scenarios.describe(tensor) == bit_scenarios.describe(tensor.clone())
    assert bit_scenarios.describe(tensor) != bit_scenarios.describe(other)
    assert bit_scenarios.describe(tensor) != bit_scenarios.describe(tensor.double())
    assert bit_scenarios.describe(tensor) != bit_scenarios.describe(tensor.reshape(10, 10))


def test_times_and_versions_are_left_out_wherever_they_stand() -> None:
    described = bit_scenarios.describe({"a": [{"seconds": 1.5, "loss": np.float32(0.1)}], "platform": {"esper": "1"}})
    assert described == {"a": [{"loss": float(np.float32(0.1))}]}


@pytest.mark.skipif(not (same_bits.ROOT / ".git").exists(), reason="there are no revisions")
def test_a_revision_is_checked_out_for_a_while() -> None:
    before = same_bits.run_git("worktree", "list").stdout
    with same_bits.check_out("HEAD") as source:
        assert (source / "esper" / "__init__.py").is_file()
        assert str(source.parent) in same_bits.run_git("worktree", "list").stdout
    assert not source.exists()
    assert same_bits.run_git("worktree", "list").stdout == before


def test_what_is_no_revision_is_refused() -> None:
    with pytest.raises(SystemExit, match="no-such-thing is neither a revision nor a folder with src/esper"):
        same_bits.main(["no-such-thing"])


@pytest.mark.slow
def test_a_changed_constant_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(same_bits.ROOT / "src" / "esper", tmp_path / "src" / "esper")
    formula = tmp_path / "src" / "esper" / "growth" / "promise.py"
    text = formula.read_text()
    assert "RIDGE = 0.1\n" in text
    formula.write_text(text.replace("RIDGE = 0.1\n", "RIDGE = 0.1000001\n"))
    words = [str(same_bits.ROOT), str(tmp_path), "--quick", "--only"]
    assert same_bits.main([*words, "deepen", "look"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("equal   deepen  ")
    assert lines[1].startswith("DIFFERS look  ")
    assert lines[2].startswith("  mlp/rows/0/promise: ")
    assert lines[-1] == "1 of 2 scenarios are equal"
    assert same_bits.main([*words, "deepen"]) == 0
