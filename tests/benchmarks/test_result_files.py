"""Results of benchmarks as JSON lines."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from benchmarks.result_files import ResultFile
from esper.numerics.devices import describe_platform


@dataclass(frozen=True)
class Result:
    """Of one run."""

    seed: int


def test_the_software_that_made_results_is_kept_beside_them(tmp_path: Path) -> None:
    file = ResultFile(tmp_path / "results.jsonl", Result)
    earlier = json.dumps({"torch": "1.0"})
    (tmp_path / "results.platforms").write_text(earlier + "\n")
    file.add(Result(1))
    file.add(Result(2))
    assert (tmp_path / "results.platforms").read_text().splitlines() == [
        earlier,
        json.dumps(describe_platform(["cpu"])),
    ]
    assert file.results == [Result(1), Result(2)]


def test_only_what_is_missing_runs(tmp_path: Path) -> None:
    file = ResultFile(tmp_path / "results.jsonl", Result)
    file.add(Result(1))
    ran = list[int]()

    def run(seed: int) -> None:
        ran.append(seed)
        file.add(Result(seed))

    file.run_missing([0, 1, 2], lambda seed: Result(seed) in file.results, run)
    assert ran == [0, 2]
