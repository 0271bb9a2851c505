"""The context-oracle gap, on planted scores, and the fixed schedules that compete for it."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from pydantic import TypeAdapter

from esper.lab.bench_suite import (
    NOTHING,
    SuiteReport,
    combine_schedules,
    family_weights,
    instances_per_variant,
    measure_gap,
    single_schedules,
)
from esper.tasks.instance import Instance
from esper.tasks.registry import get_suite

SUITE = get_suite("tokens")


def instances(count: int) -> list[Instance]:
    return instances_per_variant(SUITE, count, np.random.default_rng(0))


def planted(chosen: Sequence[Instance], noise: float, seed: int) -> dict[str, np.ndarray]:
    """Schedule `a` earns .7 in `order` and .5 elsewhere, `b` .6 everywhere, nothing .4."""
    rng = np.random.default_rng(seed)
    in_order = np.array([one.family == "order" for one in chosen])
    exact = {"a": np.where(in_order, 0.7, 0.5), "b": np.full(len(chosen), 0.6), NOTHING: np.full(len(chosen), 0.4)}
    return {name: scores + noise * rng.standard_normal(len(chosen)) for name, scores in exact.items()}


def test_the_gap_is_what_choosing_per_family_adds_to_the_best_overall() -> None:
    chosen, scored = instances(3), instances(4)
    fresh = planted(scored, 0.0, 1)
    report = measure_gap(planted(chosen, 0.0, 0), chosen, lambda names: {name: fresh[name] for name in names}, scored)
    assert report.overall == "b"
    assert report.overall_score == pytest.approx(0.6)
    assert report.context_oracle_gap == pytest.approx(0.1 / len(SUITE.families))
    assert report.variant_gap == pytest.approx(0.1 / len(SUITE.families))
    assert {one.context: one.schedule for one in report.families}["order"] == "a"


def test_noise_alone_shows_no_gap() -> None:
    """Where all schedules are equal, choosing on one set and scoring on another finds nothing: no optimism."""
    gaps = []
    for seed in range(40):
        chosen, scored = instances(4), instances(4)
        rng = np.random.default_rng(seed)
        names = [NOTHING, *(f"s{index}" for index in range(20))]
        found = {name: rng.standard_normal(len(chosen)) for name in names}
        fresh = {name: rng.standard_normal(len(scored)) for name in names}
        report = measure_gap(found, chosen, lambda needed, fresh=fresh: {name: fresh[name] for name in needed}, scored)
        gaps.append(report.context_oracle_gap / report.standard_error)
    assert abs(np.mean(gaps)) < 3 / np.sqrt(len(gaps))
    assert 0.7 < np.std(gaps) < 1.3


def test_instances_cover_every_variant_equally_and_families_weigh_the_same() -> None:
    variants = [(one.family, one.variant) for one in instances(3)]
    expected = {(family, variant) for family in SUITE.families for variant in SUITE.variants(family)}
    assert {key: variants.count(key) for key in set(variants)} == dict.fromkeys(expected, 3)
    families, weights = np.array([family for family, _ in variants]), family_weights(instances(3))
    shares = [weights[families == family].sum() for family in SUITE.families]
    assert shares == pytest.approx([1 / len(SUITE.families)] * len(SUITE.families))


def test_schedules_are_all_singles_and_combinations_without_repeats() -> None:
    singles = single_schedules(SUITE)
    assert len(singles) == 1 + 2 * len(SUITE.sites) * len(SUITE.blueprints)
    assert len({schedule.name for schedule in singles}) == len(singles)
    picked = [one for one in singles if one.name in {"mlp@0", "mlp@1", "gate@1", "norm@2"}]
    assert not combine_schedules(SUITE, picked, most=1)
    assert all(len(schedule.plantings) == 2 for schedule in combine_schedules(SUITE, picked, most=2))
    names = {schedule.name for schedule in combine_schedules(SUITE, picked)}
    assert names == {"mlp@0 gate@1", "mlp@0 norm@2", "mlp@1 norm@2", "gate@1 norm@2", "mlp@0 gate@1 norm@2"}


ROOT = Path(__file__).parents[2]


def decimals(number: float) -> str:
    """As in the pages: without a leading zero."""
    return f"{number:.3f}".lstrip("0")


def test_the_pages_have_the_gap_of_the_images_that_is_stored() -> None:
    report = TypeAdapter(SuiteReport).validate_json((ROOT / "benchmarks/results/suites/images.json").read_text())
    suite = get_suite("images")
    assert {one.context for one in report.families} == set(suite.families)
    assert {one.context for one in report.variants} == {
        f"{one}/{v}" for one in suite.families for v in suite.variants(one)
    }
    best = sum(one.score for one in report.families) / len(report.families)
    rows = [
        f"| {one.context} | {one.schedule} | {decimals(one.score)} | {decimals(one.score_of_overall)} "
        f"| {decimals(one.score_of_nothing)} |"
        for one in report.families
    ]
    means = f"**{decimals(best)}** | **{decimals(report.overall_score)}** | **{decimals(report.nothing_score)}** |"
    page = " ".join((ROOT / "docs/measured/suites.md").read_text().split())
    assert " ".join([*rows, f"| **mean over families** | | {means}"]) in page
    gap = f"{decimals(report.context_oracle_gap)} (standard error {decimals(report.standard_error)})"
    for text in (page, " ".join((ROOT / "docs/suite.md").read_text().split())):
        assert f"context-oracle gap is {gap}" in text
    assert f"{report.schedules} schedules, {report.episodes:,} episodes" in page
    assert f"The best overall schedule is {report.overall}" in page


@pytest.mark.parametrize(("price", "beside"), [("parameters", "parameters"), ("flops", "FLOPs")])
def test_the_page_has_the_gap_of_wide_hosts(price: str, beside: str) -> None:
    """Two instances of each family: schedules are chosen on one and scored on the other, and the other way round."""
    lines = (ROOT / "benchmarks/results/suites/images-wide.jsonl").read_text().splitlines()
    results: dict[str, dict[str, dict[int, float]]] = {}
    for one in map(json.loads, lines):
        score = one["accuracy"] - 0.08 * np.log1p(one[price])
        results.setdefault(one["schedule"], {}).setdefault(one["family"], {})[one["seed"]] = score
    scores = np.array(
        [[[of[seed] for seed in sorted(of)] for _, of in sorted(one.items())] for one in results.values()]
    )
    families = np.arange(scores.shape[1])
    gaps = [
        scores[scores[..., chosen].argmax(0), families, 1 - chosen]
        - scores[scores[..., chosen].mean(1).argmax(), :, 1 - chosen]
        for chosen in (0, 1)
    ]
    error = np.sqrt(np.var(gaps, axis=0, ddof=1).sum() / 2) / len(families)
    page = " ".join((ROOT / "docs/measured/suites.md").read_text().split())
    assert f"{decimals(float(np.mean(gaps)))} (standard error {decimals(float(error))}) by {beside}" in page


def test_the_page_has_the_gap_over_the_rule_that_plants_everything() -> None:
    lines = (ROOT / "benchmarks/results/suites/images-all.jsonl").read_text().splitlines()
    scores: dict[str, list[tuple[float, float]]] = {}
    for one in map(json.loads, lines):
        scores.setdefault(one["instance"].partition("/")[0], []).append((one["own"], one["all"]))
    table = np.array(list(scores.values()))  # [families, instances, 2]
    gaps = table[..., 0] - table[..., 1]
    error = np.sqrt((gaps.var(1, ddof=1) / gaps.shape[1]).sum()) / len(gaps)
    page = " ".join((ROOT / "docs/measured/suites.md").read_text().split())
    sentence = (
        f"scores {decimals(table[..., 1].mean())} on the same instances: over it the gap is {decimals(gaps.mean())}"
    )
    assert f"{sentence} (standard error {decimals(error)})" in page
