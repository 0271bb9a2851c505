"""How seeds' gradients are followed over episodes, summed up and stored with the behaviour."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from esper.control.rules.simple import Uniform
from esper.errors import RunError
from esper.lab.behaviour import Behaviour, Usage, read_behaviour, write_behaviour
from esper.lifecycle.actions import Blend
from esper.lifecycle.gates import Reason
from esper.lifecycle.rules import Rules
from esper.lifecycle.stages import Stage
from esper.lifecycle.transitions import Cause, Transitions
from esper.numerics.arrays import replace_where
from esper.population.gradients import HealthTable
from esper.tasks.registry import get_suite
from esper.train.episode_log import BlueprintGradients, SeedGradients, average_by_blueprint, average_gradients
from esper.train.evaluation import EvaluationConfig, evaluate_cohort, split_into_cohorts
from train.short_suite import short_suite

BLUEPRINTS = ("norm", "mlp")
NAN = float("nan")


@pytest.fixture(scope="module", autouse=True)
def _short_suite() -> Iterator[None]:
    with short_suite():
        yield


def germinated(*seeds: tuple[int, int, int]) -> Transitions:
    """Seeds of a blueprint that come into a slot of an environment."""
    env, slot, blueprint = np.array(seeds).T
    count = len(seeds)
    return Transitions(
        env,
        slot,
        np.full(count, Stage.DORMANT, np.int8),
        np.full(count, Stage.GERMINATED, np.int8),
        blueprint.astype(np.int16),
        np.full(count, Blend.ADD, np.int8),
        np.full(count, Cause.GERMINATE, np.int8),
        np.full(count, Reason.NO_GATE, np.int8),
    )


def health(ratios: Sequence[Sequence[float | None]], vanished: float = 0.0, exploded: float = 0.0) -> HealthTable:
    """Of seeds with these ratios, ``[E, S]``; None where no seed learns."""
    learning = np.array([[ratio is not None for ratio in row] for row in ratios])
    return replace_where(
        learning,
        HealthTable.none(*learning.shape),
        HealthTable(
            np.full(learning.shape, 8),
            np.ones(learning.shape),
            np.full(learning.shape, vanished),
            np.full(learning.shape, exploded),
            np.array([[ratio or 0.0 for ratio in row] for row in ratios]),
        ),
    )


def test_a_seed_has_what_was_measured_in_its_own_life() -> None:
    changes = [germinated((1, 0, 0)), Transitions.none(), germinated((1, 0, 1), (0, 1, 1)), Transitions.none()]
    measured = [
        health([[None, None], [None, None]]),
        health([[None, None], [0.5, None]], vanished=1.0),
        health([[None, None], [None, None]]),
        health([[None, NAN], [0.25, None]], exploded=0.5),
    ]
    assert average_gradients(BLUEPRINTS, changes, measured) == [
        SeedGradients(0, 1, "mlp", 1, 0.0, 0.5, None),
        SeedGradients(1, 0, "norm", 1, 1.0, 0.0, 0.5),
        SeedGradients(1, 0, "mlp", 1, 0.0, 0.5, 0.25),
    ]


def test_figures_are_means_over_decisions() -> None:
    changes = [germinated((0, 0, 0)), Transitions.none(), Transitions.none()]
    measured = [health([[1.0]]), health([[3.0]], vanished=0.5), health([[NAN]], exploded=1.0)]
    assert average_gradients(BLUEPRINTS, changes, measured) == [SeedGradients(0, 0, "norm", 3, 0.5 / 3, 1 / 3, 2.0)]


def test_a_seed_that_never_learned_has_no_record() -> None:
    assert average_gradients(BLUEPRINTS, [germinated((0, 0, 0))], [health([[None]])]) == []


def test_blueprints_have_the_median_ratio_and_mean_shares_of_their_seeds() -> None:
    seeds = [
        SeedGradients(0, 0, "norm", 3, vanished, 0.0, ratio) for vanished, ratio in ((0, 1.0), (0.5, 9.0), (1, 2.0))
    ]
    assert average_by_blueprint([*seeds, SeedGradients(0, 1, "mlp", 1, 0.0, 1.0, None)]) == [
        BlueprintGradients("mlp", 1, 0.0, 1.0, None),
        BlueprintGradients("norm", 3, 0.5, 0.0, 2.0),
    ]


def test_every_germinated_seed_of_played_episodes_is_followed() -> None:
    instances = get_suite("short").sample(4, "heldout", np.random.default_rng(1))
    (task,) = split_into_cohorts([Uniform()], EvaluationConfig("short", Rules()), instances)
    (played,) = evaluate_cohort(task)
    (log,) = played.logs
    learning = ("blending", "fossilized")
    born = {(one.environment, one.slot) for one in log.changes if one.after in learning}
    assert {(seed.environment, seed.slot) for seed in log.gradients} == born
    assert born
    assert all(seed.ratio is not None and seed.ratio > 0 for seed in log.gradients)
    assert [seed.environment for seed in log.part(slice(2, 4)).gradients] == [
        seed.environment - 2 for seed in log.gradients if 2 <= seed.environment < 4
    ]


FOUND = BlueprintGradients("norm", 2, 0.5, 0.0, 1.5)
BEHAVIOUR = Behaviour(1, ("layer0",), BLUEPRINTS, (Usage("plain", "heldout", 2, {"wait": 1.0}, ()),), ())


def test_behaviours_keep_them_and_old_files_have_none(tmp_path: Path) -> None:
    path = tmp_path / "behaviour.json"
    write_behaviour(path, replace(BEHAVIOUR, gradients=(FOUND, replace(FOUND, blueprint="mlp", ratio=None))))
    assert read_behaviour(path).gradients == (FOUND, replace(FOUND, blueprint="mlp", ratio=None))
    old = json.loads(path.read_text())
    del old["gradients"]
    path.write_text(json.dumps(old))
    assert read_behaviour(path) == BEHAVIOUR


@pytest.mark.parametrize("change", [{"blueprint": "other"}, {"seeds": 0}, {"vanished": 1.5}, {"exploded": -0.5}])
def test_impossible_gradients_are_refused(tmp_path: Path, change: dict[str, str | float]) -> None:
    path = tmp_path / "behaviour.json"
    write_behaviour(path, replace(BEHAVIOUR, gradients=(FOUND,)))
    file = json.loads(path.read_text())
    file["gradients"][0] |= change
    path.write_text(json.dumps(file))
    with pytest.raises(RunError, match="the gradients of a blueprint are impossible"):
        read_behaviour(path)
