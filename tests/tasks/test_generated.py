"""Generated suites: hardly anything is the same in two of them, and every feature that a policy sees varies."""

from collections import Counter

import numpy as np
import pytest
import torch

from esper.control.rules import LookSettings, Uniform
from esper.engine.observation import list_features
from esper.errors import TaskError
from esper.lifecycle.rules import Rules
from esper.tasks.generated_problems import PROBLEMS
from esper.tasks.generated_suite import GeneratedSuite
from esper.tasks.registry import FIRST_UNSEEN, get_suite, suite_names
from esper.train.evaluation import EvaluationConfig
from esper.train.settings import TrainSettings

pytestmark = pytest.mark.landing


def test_a_number_is_the_same_suite_everywhere() -> None:
    first, second = GeneratedSuite(5), GeneratedSuite(5)
    rng = np.random.default_rng(0)
    instance = first.sample(1, "train", rng)[0]
    assert vars(first) == vars(second)
    assert torch.equal(first.data(instance, "train").inputs, second.data(instance, "train").inputs)
    assert get_suite("generated:5") is get_suite("generated:5")


@pytest.mark.parametrize("name", ["generated", "generated:", "generated:-1", "generated:x", "generated:1234567890"])
def test_what_is_no_number_is_refused(name: str) -> None:
    with pytest.raises(TaskError, match="give a whole number from 0, as in generated:7"):
        get_suite(name)
    assert "generated" not in suite_names()


def test_hardly_anything_is_the_same_in_all() -> None:
    suites = [GeneratedSuite(number) for number in range(60)]
    assert {suite.kind for suite in suites} == set(PROBLEMS)
    assert max(Counter(suite.steps for suite in suites).values()) <= 6
    assert min(suite.steps for suite in suites) < 18
    assert max(suite.steps for suite in suites) > 54
    assert {len(suite.sites) for suite in suites} >= set(range(2, 9))
    assert {len(suite.blueprints) for suite in suites} >= set(range(3, 8))
    assert {suite.optimizer.name for suite in suites} == {"adamw", "sgd"}
    assert {suite.optimizer.clip_norm for suite in suites} == {None, 1.0}
    assert 5 < sum(suite.objective == "loss" for suite in suites) < 20
    assert 0 < sum(suite.parameter_cap is not None for suite in suites) < 30
    rng = np.random.default_rng(0)
    instances = [one for suite in suites for one in suite.sample(9, "train", rng)]
    rents = [one.rent for one in instances]
    assert min(rents) == 0
    assert 0.1 < max(rents) <= 0.2
    rates = [one.learning_rate for one in instances]
    assert max(rates) / min(rates) > 10


RARE = {"rollbacks"}
"""Vary where a network blows up."""
CLOSED = {"stage_training", "last_op_advance", "last_op_set_alpha", "pruning", "measurement_age"}
"""Vary under other rules and settings of growth than the default ones, under which the policy plays as it learned."""
NEVER = {"compatible"}
"""Menus have only what serves; what does not is no legal choice, and the policy reads 0 for it."""


def test_every_feature_that_a_policy_sees_varies_in_training() -> None:
    """Otherwise it would learn nothing of it, and be lost where it is another."""
    names = [[feature.name for feature in part] for part in list_features(promise=True)]
    low = [np.full(len(part), np.inf) for part in names]
    high = [np.full(len(part), -np.inf) for part in names]
    for suite in [get_suite("tokens"), *(get_suite(f"generated:{number}") for number in (1, 3, 6, 10, 11, 15, 19, 28))]:
        instances = suite.sample(6, "train", np.random.default_rng(0))
        episodes = EvaluationConfig(suite.name, Rules()).with_promise(LookSettings().promise).create_episodes(instances)
        controller = Uniform()
        state = controller.start([instance.seed for instance in instances])
        for _ in range(14):
            seen = episodes.observe()
            for index, part in enumerate(seen):
                flat = part.flatten(0, -2).numpy()
                low[index] = np.minimum(low[index], flat.min(0))
                high[index] = np.maximum(high[index], flat.max(0))
            actions, state = controller.act(seen, episodes.legal_actions(), state)
            episodes.step(actions)
    still = {part[place] for part, a, b in zip(names, low, high, strict=True) for place in np.flatnonzero(a == b)}
    assert still - RARE == CLOSED | NEVER, "docs/suite.md lists them"


def test_shards_draw_their_suites_and_training_never_those_kept_back() -> None:
    plain, mixed = TrainSettings(), TrainSettings(mix=("generated", "digits"), shards=4)
    assert {plain.draw_suite(iteration, shard) for iteration in range(5) for shard in range(2)} == {"tokens"}
    drawn = [mixed.draw_suite(iteration, shard) for iteration in range(60) for shard in range(4)]
    assert drawn == [mixed.draw_suite(iteration, shard) for iteration in range(60) for shard in range(4)]
    counts = Counter(name.partition(":")[0] for name in drawn)
    assert set(counts) == {"tokens", "generated", "digits"}
    assert min(counts.values()) > 50
    numbers = [int(name.partition(":")[2]) for name in drawn if ":" in name]
    assert len(set(numbers)) == len(numbers)
    assert max(numbers) < FIRST_UNSEEN


def test_what_could_not_act_on_the_shortest_or_smallest_share_is_refused() -> None:
    with pytest.raises(ValueError, match="counterfactual_every is 25, but there are only 12 decisions"):
        TrainSettings.model_validate({"mix": ["generated"], "growth": {"counterfactual_every": 25}})
    with pytest.raises(ValueError, match=r"each shard's 4 environments must fill ppo.minibatches \(8\)"):
        TrainSettings.model_validate(
            {"mix": ["generated"], "shards": 8, "environments": 32, "ppo": {"group": 4, "minibatches": 8}}
        )


def test_a_suite_that_does_not_exist_cannot_be_mixed_in() -> None:
    with pytest.raises(TaskError, match="no suite is called 'tokenz'; did you mean 'tokens'"):
        TrainSettings(mix=("tokenz",))


def test_no_more_grows_than_the_suite_allows() -> None:
    suite = get_suite("generated:11")
    assert suite.parameter_cap is not None
    instances = suite.sample(8, "train", np.random.default_rng(0))
    episodes = EvaluationConfig(suite.name, Rules()).create_episodes(instances)
    controller = Uniform()
    state = controller.start([instance.seed for instance in instances])
    most = 0
    for _ in range(suite.steps):
        actions, state = controller.act(episodes.observe(), episodes.legal_actions(), state)
        episodes.step(actions)
        most = max(most, int(episodes.population.count_seed_parameters(episodes.population.table.owning).max()))
    assert 0 < most <= suite.parameter_cap
