"""The figures of docs/adapt.md are those measured, and means and errors are over the right results."""

from __future__ import annotations

import importlib
import json
import math
from collections import defaultdict
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from scipy import stats

pytestmark = pytest.mark.landing

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "adapt_arms"


@pytest.fixture
def arms(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    pytest.importorskip("peft")
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("adapt_arms")


RATE = 0.01


@pytest.fixture(autouse=True)
def tuned(arms: ModuleType, tmp_path: Path) -> None:
    """For all arms one rate is the best."""
    for host in arms.HOST_NAMES:
        several = [(name, rate) for name, arm in arms.ARMS.items() if len(arm.rates) > 1 for rate in arm.rates]
        tell(
            arms,
            tmp_path / f"{host}-{arms.TUNING_SEED}.jsonl",
            [
                arms.Result(str(shift), "input", name, rate, float(rate == RATE), 0.5, float(rate == RATE), 1.0, 1, 1.0)
                for name, rate in several
                for shift in range(arms.SHIFTS // arms.TUNING_EVERY)
            ],
        )


def tell(arms: ModuleType, path: Path, results: list[Any]) -> None:
    path.write_text("".join(json.dumps(asdict(one)) + "\n" for one in results))


def write(arms: ModuleType, folder: Path, place: str, seed: int, **news: dict[str, float]) -> None:
    """Results of a seed on a host: accuracies on new data by arm and shift."""
    with (folder / f"{place}-{seed}.jsonl").open("a") as file:
        for arm, by_shift in news.items():
            for shift, new in by_shift.items():
                rate = 0.0 if arms.ARMS[arm].rates == arms.OWN else RATE
                told = arms.Result(shift, shift, arm, rate, new, 0.5, 0.3, 1.0, 1000, 1.0)
                file.write(json.dumps(asdict(told)) + "\n")


def rows(table: str) -> dict[str, dict[str, str]]:
    """The cells of a table by row and column."""
    titles, _, *lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    return {line[0]: dict(zip(titles, line, strict=True)) for line in lines}


@pytest.mark.parametrize(("hosts", "page"), [(("conv1d",), "measured/adapt.md"), (None, "adapt.md")])
def test_the_page_has_the_table_that_the_results_give(
    arms: ModuleType, hosts: tuple[str, ...] | None, page: str
) -> None:
    text = (ROOT / "docs" / page).read_text()
    table = arms.show(RESULTS, hosts or arms.HOST_NAMES)[1]
    missing = [line for line in table.splitlines() if line not in text]
    assert missing == []


def test_all_that_was_measured_is_of_arms_there_are(arms: ModuleType) -> None:
    """By the rates that the tuning seed chooses on the other shifts, for each figure that is told."""
    for path in RESULTS.glob("*.jsonl"):
        host, _, seed = path.stem.rpartition("-")
        choose, known = arms.tuned_rate(RESULTS, host), defaultdict[tuple[str, str], list[float]](list)
        for one in arms.read(path) if int(seed) != arms.TUNING_SEED else []:
            known[one.arm, one.shift].append(one.rate)
        kinds = {one.shift: one.kind for one in arms.read(path)}
        for (arm, shift), rates in known.items():
            told = [figure for figure in (arms.NEW, arms.KEPT) if arms.is_told(figure, kinds[shift])]
            assert sorted(rates) == sorted({choose(arm, shift, figure) for figure in told})


def test_means_are_over_seeds_then_over_shifts(arms: ModuleType, tmp_path: Path) -> None:
    """A shift with more seeds counts no more than another."""
    write(arms, tmp_path, "conv1d", 10, full={"input": 0.5, "output": 0.9}, **{"esper.adapt": {"input": 0.6}})
    write(arms, tmp_path, "conv1d", 11, full={"input": 0.7}, **{"esper.adapt": {"input": 0.7, "output": 1.0}})
    found = rows(arms.show(tmp_path, ("conv1d",))[1])["full fine-tuning"]
    assert (found["new data"], found["input"], found["output"]) == ("75.0", "60.0", "90.0")


def test_differences_are_of_equal_seeds_and_their_error_is_over_shifts(arms: ModuleType, tmp_path: Path) -> None:
    write(arms, tmp_path, "conv1d", 10, full={"input": 0.5, "output": 0.5, "feature": 0.1})
    write(arms, tmp_path, "conv1d", 10, **{"esper.adapt": {"input": 0.6, "output": 0.5}})
    write(arms, tmp_path, "conv1d", 11, full={"input": 0.5}, **{"esper.adapt": {"input": 0.8, "feature": 0.9}})
    told = rows(arms.show(tmp_path, ("conv1d",))[1])["full fine-tuning"]["`esper.adapt` is ahead by"]
    differences = np.array([(10 + 30) / 2, 0])  # by no seed are both known on the third shift
    half = stats.t.ppf(0.975, 1) * differences.std(ddof=1) / math.sqrt(2)
    assert told == f"+10.0 ({10 - half:+.1f} to {10 + half:+.1f})"


def test_an_arm_that_lacks_shifts_has_no_mean_over_them(arms: ModuleType, tmp_path: Path) -> None:
    write(arms, tmp_path, "conv1d", 10, full={"input": 0.5}, replay={"input": 0.5})
    write(arms, tmp_path, "vit", 10, full={"input": 0.7})
    found = rows(arms.show(tmp_path, ("conv1d", "vit"))[1])
    assert found["full fine-tuning"]["new data"] == "60.0"
    assert found["the same with 5% replay"]["new data"] == ""
    assert found["the same with 5% replay"]["conv1d"] == "50.0"


def test_the_tuning_seed_is_not_reported(arms: ModuleType, tmp_path: Path) -> None:
    write(arms, tmp_path, "conv1d", arms.TUNING_SEED, full={"input": 0.5})
    with pytest.raises(SystemExit, match="no results of these yet"):
        arms.show(tmp_path, ("conv1d",))


def test_what_is_asked_for_is_shown(arms: ModuleType, tmp_path: Path) -> None:
    for seed, new in ((10, 0.5), (11, 0.7)):
        write(arms, tmp_path, "conv1d", seed, full={"input": new}, replay={"input": new})
    seeds, table = arms.show(tmp_path, ("conv1d", "vit"), ["full"], [11])
    assert seeds == "conv1d: 1 seeds, vit: none"
    assert {name: row["conv1d"] for name, row in rows(table).items()} == {"full fine-tuning": "70.0"}


def test_hosts_of_the_same_data_do_not_count_twice(arms: ModuleType, tmp_path: Path) -> None:
    """The error of the mean of two shifts is the same whether one host or two equal ones met them."""
    for host in ("resnet", "vit"):
        write(
            arms,
            tmp_path,
            host,
            10,
            full={"input": 0.5, "output": 0.5},
            **{"esper.adapt": {"input": 0.6, "output": 0.9}},
        )
    column = "`esper.adapt` is ahead by"
    told = {
        hosts: rows(arms.show(tmp_path, hosts)[1])["full fine-tuning"][column]
        for hosts in (("vit",), ("vit", "resnet"))
    }
    assert set(told.values()) == {"+25.0 (-165.6 to +215.6)"}


def test_a_rate_is_chosen_by_other_shifts_for_each_figure(arms: ModuleType, tmp_path: Path) -> None:
    """What old data allow goes by shifts that do not contradict them."""
    path = tmp_path / f"conv1d-{arms.TUNING_SEED}.jsonl"
    shifts = [("noise", 1e-3, 1e-1, "input"), ("labels", 3e-2, 3e-4, "output")]
    shifts += [(str(at), 3e-2, 1e-2, "input") for at in range(arms.SHIFTS // arms.TUNING_EVERY)]
    results = [
        arms.Result(shift, kind, "full", rate, float(rate == best), 0.5, float(rate == careful), 1.0, 1000, 1.0)
        for rate in arms.FINE
        for shift, best, careful, kind in shifts
    ]
    tell(arms, path, results)
    choose = arms.tuned_rate(tmp_path, "conv1d")
    assert (choose("full", "noise", "new"), choose("full", "noise", "kept")) == (3e-2, 1e-2)
    with pytest.raises(SystemExit, match="last layer on conv1d: rates are known on 0 shifts only: say --tune before"):
        choose("last layer", "noise", "new")


def test_each_figure_is_told_by_the_rate_that_was_chosen_for_it(arms: ModuleType, tmp_path: Path) -> None:
    tuning = tmp_path / f"conv1d-{arms.TUNING_SEED}.jsonl"
    tell(
        arms,
        tuning,
        [replace(one, kept=float(one.rate == 0.1)) if one.arm == "full" else one for one in arms.read(tuning)],
    )
    made = [("input", RATE, 0.7, 0.2), ("input", 0.1, 0.6, 0.4), ("output", RATE, 0.9, 0.3)]
    tell(
        arms,
        tmp_path / "conv1d-10.jsonl",
        [arms.Result(shift, shift, "full", rate, new, 0.5, kept, 1.0, 1, 1.0) for shift, rate, new, kept in made],
    )
    found = rows(arms.show(tmp_path, ("conv1d",))[1])["full fine-tuning"]
    assert (found["new data"], found["new, old loss +1% at most"]) == ("80.0", "40.0")


def test_each_figure_is_measured_where_it_is_told(arms: ModuleType) -> None:
    def choose(arm: str, shift: str, figure: str) -> float:
        return {"new": 0.1, "kept": 0.2 if arm == "full" else 0.1}[figure]

    shifts = {kind: arms.Problem("shift", kind, *[None] * 4) for kind in arms.KINDS}
    rates = {(arm, kind): arms.choose_rates(choose, arm, one) for arm in arms.ARMS for kind, one in shifts.items()}
    assert rates["full", "input"] == rates["full", "feature"] == [0.1, 0.2]
    assert rates["full", "output"] == rates["replay", "input"] == rates[arms.PROTECTING, "input"] == [0.1]
    assert rates[arms.PROTECTING, "output"] == []


@pytest.mark.parametrize(
    ("told", "why"),
    [
        ({"hosts": ("nope",)}, "there is no 'nope': take of resnet, "),
        ({"arms": ("host", "nope")}, "there is no 'nope': take of host, "),
        ({"seeds": (10, 0)}, "seed 0 chooses rates, and is not reported"),
        ({"tune": True}, "nothing to tune"),
        ({"arms": ("host",), "tune": True, "table": False}, "nothing to tune"),
        ({}, "has no results of these yet"),
    ],
)
def test_what_cannot_be_is_told(arms: ModuleType, tmp_path: Path, told: dict[str, Any], why: str) -> None:
    with pytest.raises(SystemExit, match=why):
        arms.main(tmp_path, **{"table": True, **told})


def test_a_file_is_no_folder(arms: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match="cannot be a folder for results"):
        arms.main(tmp_path / "file", table=True)


@pytest.mark.parametrize("limit", [1.0, 0.3, 0.37, 0.99, 0.05, 0.0, -0.1])
def test_what_was_learned_is_scaled_down_to_the_hundredth(arms: ModuleType, limit: float) -> None:
    assert arms.find_share(lambda share: share <= limit + 1e-9) == pytest.approx(max(limit, 0.0))


def test_what_old_data_allow_is_told_of_shifts_that_do_not_contradict_them(arms: ModuleType, tmp_path: Path) -> None:
    ways = {name: {"input": 0.5, "feature": 0.5, "output": 0.5} for name in ("full", arms.PROTECTING)}
    write(arms, tmp_path, "conv1d", 10, **ways)
    path = tmp_path / "conv1d-10.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    better = [one | {"kept": 0.5} if one["kind"] == "output" or one["arm"] != "full" else one for one in lines]
    path.write_text("\n".join(map(json.dumps, better)))
    found = rows(arms.show(tmp_path, ("conv1d",))[1])["full fine-tuning"]
    assert (found["new, old loss +1% at most"], found["`source` is ahead by"]) == ("30.0", "+20.0 (+20.0 to +20.0)")


def test_nothing_is_ahead_of_what_was_not_measured_everywhere(arms: ModuleType, tmp_path: Path) -> None:
    both = {"input": 0.5, "output": 0.5}
    write(arms, tmp_path, "conv1d", 10, full=both, replay={"input": 0.5}, **{"esper.adapt": both})
    found = rows(arms.show(tmp_path, ("conv1d",))[1])
    assert found["full fine-tuning"]["`esper.adapt` is ahead by"]
    assert found["the same with 5% replay"]["`esper.adapt` is ahead by"] == ""
    assert "`source` is ahead by" not in found["full fine-tuning"]


def test_what_is_compared_with_need_not_be_shown(arms: ModuleType, tmp_path: Path) -> None:
    both = {"input": 0.5, "output": 0.5}
    write(arms, tmp_path, "conv1d", 10, full=both, **{"esper.adapt": both})
    found = rows(arms.show(tmp_path, ("conv1d",), ["full"])[1])
    assert found["full fine-tuning"]["`esper.adapt` is ahead by"] == "+0.0 (+0.0 to +0.0)"


def test_what_is_known_is_not_measured_again(arms: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = next(case for case in arms.CASES if case.host == "conv1d")
    monkeypatch.setattr(arms, "islice", lambda problems, *_: [next(problems)])
    write(arms, tmp_path, "conv1d", 10, host={"noise": 0.123})
    path = tmp_path / "conv1d-10.jsonl"
    arms.measure(tmp_path, case, 10, lambda *_: (0.0,), ["host"])
    assert [one.new for one in arms.read(path)] == [0.123]
    arms.measure(tmp_path, case, 10, lambda *_: (0.01,), ["host", "last layer"])
    assert [one.arm for one in arms.read(path)] == ["host", "host", "last layer"]
    assert all(0 < one.new < 1 and one.shift == "noise" for one in arms.read(path))
