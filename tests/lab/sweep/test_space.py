"""A space turns into trials that do not depend on what else is drawn, and mistakes in it are one sentence."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from esper.errors import ConfigError
from esper.lab.sweep import DRAWS, load_space


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "space.yaml"


BOTH = """
base: {iterations: 3, ppo: {epochs: 2}}
grid: {ppo.gae_lambda: [0.9, 1.0], seed: [0, 1, 2]}
random: {ppo.learning_rate: {low: 1.0e-4, high: 1.0e-2, log: true}, policy.hidden: [16, 32]}
"""


def test_every_draw_is_tried_at_every_point(file: Path):
    file.write_text(BOTH)
    trials = load_space(file).trials(2, seed=5)
    assert [trial.name for trial in trials[:2]] == ["trial-000", "trial-001"]
    points = [(trial.settings.ppo.gae_lambda, trial.settings.seed) for trial in trials]
    assert points == [(0.9, 0), (0.9, 1), (0.9, 2), (1.0, 0), (1.0, 1), (1.0, 2)] * 2
    rates = [trial.settings.ppo.learning_rate for trial in trials]
    assert len(set(rates[:6])) == len(set(rates[6:])) == 1
    assert rates[0] != rates[6]
    assert all((trial.settings.iterations, trial.settings.ppo.epochs) == (3, 2) for trial in trials)


def test_more_draws_and_other_keys_leave_the_draws_as_they_are(file: Path):
    file.write_text(BOTH)
    few, many = (load_space(file).trials(draws, seed=5) for draws in (2, 4))
    assert many[: len(few)] == few
    file.write_text(BOTH.replace("policy.hidden: [16, 32]", "checkpoint_every: [1, 2]"))
    assert load_space(file).trials(1, 5)[0].settings.ppo.learning_rate == few[0].settings.ppo.learning_rate
    assert load_space(file).trials(1, 6)[0].settings.ppo.learning_rate != few[0].settings.ppo.learning_rate
    assert len(load_space(file).trials(None, 0)) == 6 * DRAWS


def test_a_grid_alone_has_no_draws(file: Path):
    file.write_text("grid: {seed: [4, 5]}")
    assert [trial.settings.seed for trial in load_space(file).trials(None, 0)] == [4, 5]
    with pytest.raises(ConfigError, match=r"has no `random` to draw from: leave --trials out"):
        load_space(file).trials(3, 0)


def test_overrides_go_before_the_base(file: Path):
    file.write_text(BOTH)
    trials = load_space(file, ["iterations=7", "ppo.epochs=4", "ppo.clip=0.3"]).trials(1, seed=5)
    assert {(one.settings.iterations, one.settings.ppo.epochs, one.settings.ppo.clip) for one in trials} == {
        (7, 4, 0.3)
    }
    assert [one.choices for one in trials] == [one.choices for one in load_space(file).trials(1, seed=5)]
    whole = load_space(file, ["ppo={epochs: 4}"]).trials(1, seed=5)
    assert {(one.settings.iterations, one.settings.ppo.epochs) for one in whole} == {(3, 4)}
    assert {one.settings.ppo.gae_lambda for one in whole} == {0.9, 1.0}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("iterations", "--set iterations: write it as dotted.key=value"),
        ("iteration=3", "--set iteration=3: unknown key `iteration`, did you mean `iterations`?"),
        ("seed=3", "--set seed=3: `seed` is in `grid` of space.yaml: leave it in one of them"),
        ("policy.hidden=3", "`policy.hidden` is in `random` of space.yaml"),
    ],
)
def test_overrides_that_make_no_sense(file: Path, override: str, message: str, monkeypatch: pytest.MonkeyPatch):
    file.write_text(BOTH)
    monkeypatch.chdir(file.parent)
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_space(Path(file.name), [override]).trials(1, seed=5)


def test_a_mistake_in_a_choice_is_not_the_override_s(file: Path):
    file.write_text("grid: {ppo.epochs: [x]}")
    with pytest.raises(ConfigError, match=r"space.yaml: grid: `ppo.epochs` is 'x'"):
        load_space(file, ["ppo={clip: 0.3}"]).trials(None, 0)


def test_ranges_are_drawn_evenly_to_their_ends(file: Path):
    file.write_text(
        "random: {seed: {low: 1, high: 4, int: true}, ppo.gae_lambda: {low: 0.5, high: 0.9},"
        " ppo.learning_rate: {low: 1.0e-4, high: 1.0e-2, log: true}}"
    )
    trials = [trial.settings for trial in load_space(file).trials(400, 0)]
    seeds = np.bincount([one.seed for one in trials])
    assert len(seeds) == 5
    assert seeds[0] == 0
    assert np.all(seeds[1:] > 80)
    lambdas = [one.ppo.gae_lambda for one in trials]
    assert 0.5 <= min(lambdas) < 0.51
    assert 0.89 < max(lambdas) <= 0.9
    rates = np.array([one.ppo.learning_rate for one in trials])
    assert 0.4 < np.mean(rates < 1e-3) < 0.6
    assert abs(np.corrcoef(lambdas, np.log(rates))[0, 1]) < 0.1  # each key has its own draws


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gird: {seed: [1]}", "unknown key `gird`, did you mean `grid`?"),
        ("base: {seed: 1}", "has nothing to try: give `grid`, `random` or both"),
        ("grid: {seed: [1]}\nrandom: {seed: [1]}", "`seed` is in `grid` and in `random`: leave it in one of them"),
        ("grid: {seed: 1}", "grid: `seed` must be a list of values, not 1"),
        ("grid: {seed: []}", "grid: `seed` must be a list of values, not []"),
        ("random: {seed: 1}", "random: `seed` must be a list of values, or low and high, not 1"),
        ("random: {seed: {low: 1, hihg: 2}}", "random: `seed`: unknown key `hihg`, did you mean `high`?"),
        ("random: {seed: {low: 1}}", "random: `seed`: key `high` is missing"),
        ("random: {seed: {low: 2, high: 1}}", "random: `seed`: low (2) must be below high (1)"),
        ("random: {seed: {low: 0, high: 1, log: true}}", "a logarithmic range must begin above 0, not at 0"),
        ("random: {seed: {low: 0.5, high: 2, int: true}}", "0.5 to 2 are no integers"),
        ("base: {sed: 1}\ngrid: {seed: [1]}", "base: unknown key `sed`, did you mean `seed`?"),
        ("grid: {ppo.epoch: [1]}", "grid: unknown key `ppo.epoch`, did you mean `ppo.epochs`?"),
        ("random: {ppo.epochs: [x]}", "random: `ppo.epochs` is 'x'"),
        ("grid: {seed.x: [1]}\nbase: {seed: 1}", "grid: `seed.x`: `seed` is a value, it has no keys below it"),
        ("grid: {environments: [128, 24]}", "trial-001 (environments 24): environments (24) must be a multiple"),
    ],
)
def test_mistakes_are_one_sentence_that_says_where(file: Path, text: str, message: str):
    file.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        load_space(file).trials(None, 0)
    assert str(caught.value).startswith(str(file))


def test_ask_for_at_least_one_draw(file: Path):
    file.write_text(BOTH)
    with pytest.raises(ConfigError, match="--trials 0: ask for at least 1"):
        load_space(file).trials(0, 0)
