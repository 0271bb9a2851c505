"""A minibatch too large for the memory there is, computed in parts whose gradients are added up."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from esper.errors import ConfigError
from esper.lifecycle.actions import Blend
from esper.lifecycle.rules import Isolation
from esper.population.evaluation import evaluate, evaluate_committed
from esper.population.learning import train
from esper.population.population import STRATEGIES, Population, Strategy
from esper.population.promise import PromiseMeter
from esper.population.shapley import attribute_networks
from esper.tasks.suite import OptimizerSettings
from esper.tasks.token_suite import TokenHost
from open_rules import open_rules
from population.scenes import (
    BATCH,
    VALIDATION,
    Draws,
    assert_same_state,
    instances,
    networks,
    plan,
    record_measurements,
    state_of,
)
from population.test_kinds_of_hosts import DRAWING, KEEPING, configure

COUNT, DECISIONS = 7, 8
EXACT = 1e-12
TOLERANCE = 1e-9
"""Sums of parts are rounded otherwise than the sum of the whole, by some 1e-16, and AdamW amplifies that."""
CLIPPED = OptimizerSettings(name="adamw", clip_norm=0.5)
SAME_IN_PARTS = {"weight norm", "group normalisation", "no dropout", "attention"}

PEAK = """
import sys
from pathlib import Path
import numpy as np
import torch
from esper.lifecycle.rules import Rules
from esper.tasks.registry import get_suite
from esper.train.evaluation import EvaluationConfig
from esper.lifecycle.actions import Op, make_action

torch.set_num_threads(1)
option, limit = sys.argv[1], int(sys.argv[2]) or None
instances = get_suite("tokens").sample(192, "train", np.random.default_rng(0))
episodes = EvaluationConfig("tokens", Rules(), **{option: limit}).create_episodes(instances)
grow = make_action(Op.GERMINATE, slot=0, blueprint=int(episodes.legal_actions().blueprint[0, 0].argmax()))
actions = np.tile(grow, (len(instances), 1))
Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew


def read(name):
    status = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in status if line.startswith(name)).split()[1])


before = read("VmRSS")
episodes.step(actions)
print(read("VmHWM") - before)
"""
"""Prints by how many KiB the process's memory grows at the most in a decision, minibatches included."""


def measure_growth(option: str, limit: int) -> int:
    """The growth in KiB with ``option``, such as networks_per_pass, at this limit; 0: without one."""
    words = [sys.executable, "-c", PEAK, option, str(limit)]
    return int(subprocess.run(words, check=True, capture_output=True, text=True, timeout=120).stdout)


def population(isolation: Isolation, strategy: Strategy = "stacked", **limits: int | None) -> Population:
    """Under ``networks_per_pass`` or ``examples_per_pass``."""
    rules = open_rules(
        isolation=isolation, cooldown=(1, 1, 1), min_training_steps=1, harm_tolerance=1.0, blends=tuple(Blend)
    )
    return Population(replace(plan(rules, CLIPPED, strategy), **limits), networks(instances(COUNT)))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("isolation", list(Isolation))
@pytest.mark.parametrize(
    ("limits", "tolerance"),
    [
        ({"networks_per_pass": 1}, EXACT),
        ({"examples_per_pass": 4, "networks_per_pass": 3}, TOLERANCE),
        ({"networks_per_pass": 3}, EXACT),
        pytest.param({"examples_per_pass": 1, "networks_per_pass": 3}, TOLERANCE, marks=pytest.mark.landing),
    ],
)
@pytest.mark.few(2)
def test_passes_of_parts_give_what_whole_ones_give(
    limits: dict[str, int], tolerance: float, isolation: Isolation, strategy: Strategy
) -> None:
    assert BATCH % 4, "the test means to have parts of different sizes"
    whole, parts = population(isolation, strategy), population(isolation, strategy, **limits)
    draws = Draws(instances(COUNT))
    resting = np.arange(COUNT) == 4
    for _ in range(DECISIONS):
        actions = draws.actions(whole.legal_actions())
        batches, held_back = [draws.batch() for _ in range(2)], draws.batch(VALIDATION)
        reports = []
        for one in (whole, parts):
            one.decide(actions)
            report = train(one, batches, resting)
            record_measurements(one, report, evaluate(one, held_back))
            reports.append(report)
        for network in range(COUNT):
            assert_same_state(state_of(parts, network), state_of(whole, network), tolerance)
        for name in ("loss", "accuracy", "host_gradient", "seed_gradient"):
            expected, found = (getattr(report, name) for report in reports)
            np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)
    assert whole.table.blended.any()
    assert {kind.blend for kind in whole.banks} == {*Blend}
    due = np.ones(whole.table.stage.shape, np.bool_)
    for measure in (
        lambda one: attribute_networks(one, held_back, np.random.default_rng(0)).values,
        lambda one: evaluate_committed(one, held_back).loss,
        lambda one: PromiseMeter(one).measure(held_back, due).fitted,
    ):
        np.testing.assert_allclose(measure(parts), measure(whole), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("limit", [None, 1, 4, VALIDATION])
def test_no_pass_holds_more_examples_than_the_limit(limit: int | None) -> None:
    held = population(Isolation.NONE, networks_per_pass=3, examples_per_pass=limit)
    seen: list[int] = []

    def look(module: nn.Module, inputs: tuple[Tensor]) -> None:
        if isinstance(module, TokenHost):
            seen.append(inputs[0].shape[1])

    draws = Draws(instances(COUNT))
    held.decide(draws.actions(held.legal_actions()))
    train(held, [draws.batch()])
    held_back = draws.batch(VALIDATION)
    due = np.ones(held.table.stage.shape, np.bool_)
    for act in (
        lambda: train(held, [held_back]),
        lambda: evaluate(held, held_back),
        lambda: evaluate_committed(held, held_back),
        lambda: attribute_networks(held, held_back, np.random.default_rng(0)),
        lambda: PromiseMeter(held).measure(held_back, due),
    ):
        seen.clear()
        with torch.nn.modules.module.register_module_forward_pre_hook(look):
            act()
        assert max(seen) == min(limit or VALIDATION, VALIDATION)


@pytest.mark.parametrize("name", [*KEEPING, *DRAWING])
def test_hosts_that_would_learn_something_else_are_refused(name: str) -> None:
    config, specs = configure({**KEEPING, **DRAWING}[name])
    config = replace(config, examples_per_pass=2)
    if name in SAME_IN_PARTS:
        Population(config, specs)
        return
    reason = "draw random numbers in training" if name in DRAWING else "depends on all examples of a minibatch"
    with pytest.raises(ConfigError, match=rf"examples_per_pass: .*{reason}.*: set it to null"):
        Population(config, specs)


@pytest.mark.parametrize("limit", [None, 1, 3, COUNT, 2 * COUNT])
def test_no_pass_holds_more_networks_than_the_limit(limit: int | None) -> None:
    held = population(Isolation.NONE, networks_per_pass=limit)
    seen: list[int] = []

    def look(module: nn.Module, inputs: tuple[Tensor]) -> None:
        if isinstance(module, TokenHost):
            seen.append(len(inputs[0]))

    draws = Draws(instances(COUNT))
    with torch.nn.modules.module.register_module_forward_pre_hook(look):
        train(held, [draws.batch()])
        evaluate(held, draws.batch(VALIDATION))
    assert max(seen) == min(limit or COUNT, COUNT)


@pytest.mark.landing
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks are measured as on Linux")
@pytest.mark.parametrize(
    ("option", "limit"), [("networks_per_pass", 1), ("networks_per_pass", 8), ("examples_per_pass", 4)]
)
def test_parts_save_memory(option: str, limit: int) -> None:
    assert 2 * measure_growth(option, limit) < measure_growth(option, 0)
