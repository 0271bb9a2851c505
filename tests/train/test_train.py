"""A run goes on exactly where it stopped, however it stopped."""

import copy
import os
import signal
import sqlite3
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import esper
from esper.cli import main
from esper.errors import ConfigError, EsperError, RunError
from esper.numerics.devices import describe_platform
from esper.rl.ppo import PolicyOptimizer
from esper.runs.events import (
    CheckpointWritten,
    InteractionsMeasured,
    PPOUpdated,
    RunEnded,
    RunFailed,
    RunResumed,
    RunStarted,
)
from esper.runs.reader import RunReader
from esper.runs.run_directory import RunDirectory
from esper.serialization import Checkpoints
from esper.tasks.registry import get_suite
from esper.train.evaluation import compute_mean_score, evaluate_controllers, make_evaluation_config
from esper.train.iteration import Iteration
from esper.train.settings import TrainSettings
from esper.train.trainer import Trainer, create_controller
from esper.train.workers import LocalWorkers
from train.runs import TINY, assert_same_end, at, figures, ignore, resumed, short_suite, started, tiny

with short_suite():
    # A policy that plants and keeps a module in every slot.
    KEEPING = (
        "policy.op_prior={wait: 0, germinate: 3, fossilize: 3, prune: -3}",
        "rules.harm_tolerance=1",
        "rules.min_training_steps=1",
    )
    SETTINGS = tiny("iterations=4", "checkpoint_every=2", "probe_every=2")


class PowerCutError(Exception):
    """The process ends here."""


def press_ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def cut_power() -> None:
    raise PowerCutError


def learned(trainer: Trainer) -> dict[str, torch.Tensor]:
    return trainer.learner.state_tensors()


def history(path: Path) -> dict[str, Any]:
    """What the newest checkpoint knows of the last updates."""
    return Checkpoints(RunDirectory(path).checkpoints).latest().state


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    path = tmp_path_factory.mktemp("train") / "whole"
    with started(path, SETTINGS) as trainer:
        trainer.train(ignore)
        return path, learned(trainer)


@pytest.mark.parametrize(
    ("number", "stop", "error", "checkpoints"),
    [(2, press_ctrl_c, KeyboardInterrupt, [0, 2]), (3, cut_power, PowerCutError, [0, 2])],
    ids=["Ctrl-C", "power cut after the checkpoint"],
)
@pytest.mark.few(1)
def test_a_resumed_run_equals_one_that_never_stopped(
    tmp_path: Path,
    uninterrupted: tuple[Path, dict[str, torch.Tensor]],
    number: int,
    stop: Callable[[], None],
    error: type[BaseException],
    checkpoints: list[int],
):
    whole_path, whole = uninterrupted
    path = tmp_path / "run"
    with started(path, SETTINGS) as trainer, pytest.raises(error):
        trainer.train(at(number, stop))
    assert Checkpoints(RunDirectory(path).checkpoints).iterations() == checkpoints
    with resumed(path) as trainer:
        assert trainer.done == 2
        trainer.train(ignore)
        final = learned(trainer)
    assert final.keys() == whole.keys()
    for name, tensor in whole.items():
        assert torch.equal(final[name], tensor), name
    assert figures(path) == figures(whole_path)
    assert history(path) == history(whole_path)
    assert len(history(path)["updates"]) == 4


def test_the_store_tells_the_whole_history(uninterrupted: tuple[Path, object]):
    with RunReader.open(RunDirectory(uninterrupted[0]).store) as reader:
        assert [step for step, _ in reader.series("objective")] == [1, 2, 3, 4]
        assert [step for step, _ in reader.series("probe_score")] == [2, 4]
        assert [event.iteration for event in reader.events(CheckpointWritten)] == [0, 2, 4]
        assert len(reader.events(RunEnded)) == 1
        assert reader.events(RunResumed) == []
        assert [event.platform for event in reader.events(RunStarted)] == [describe_platform(["cpu"])]


@pytest.mark.landing
def test_probes_record_what_the_modules_that_the_greedy_policy_kept_are_worth(tmp_path: Path):
    """The same as `esper evaluate` measures of the policy's networks, which is compared with separate passes."""
    settings = tiny("iterations=2", "probe_every=2", "probe_instances=6", "policy.advice=null", *KEEPING)
    with started(tmp_path / "run", settings) as trainer:
        trainer.train(ignore)
        trainer.store.flush()
        policy, probes = create_controller(copy.deepcopy(trainer.policy), settings), trainer._probes
        config = make_evaluation_config(settings)
        (played,) = evaluate_controllers(LocalWorkers(1), [policy], config, probes, shapley="orders")
        events = trainer.store.events(InteractionsMeasured)
    with RunReader.open(tmp_path / "run" / "run.db") as reader:
        views = {name: reader.rows(f"SELECT * FROM {name}") for name in ("module_values", "interactions")}
    assert [(event.iteration, event.instance) for event in events] == [(2, probe.name) for probe in probes]
    assert sum(len(event.pairs) for event in events) > 0
    for event, expected in zip(events, played.earnings, strict=True):
        assert [(one.slot, one.blueprint) for one in event.modules] == [
            (seed.slot, seed.blueprint) for seed in expected.seeds
        ]
        values = [seed.value for seed in expected.seeds]
        assert [one.value for one in event.modules] == pytest.approx(values, abs=1e-5)
        assert [(one.first, one.second) for one in event.pairs] == [(one.first, one.second) for one in expected.pairs]
        interactions = [one.interaction for one in expected.pairs]
        assert [one.interaction for one in event.pairs] == pytest.approx(interactions, abs=1e-5)
        assert (event.metric, event.exact) == ("accuracy", True)
    # The views have a row per module and per pair, with the modules' names.
    assert len(views["module_values"]) == sum(len(event.modules) for event in events)
    blueprints = [{one.slot: one.blueprint for one in event.modules} for event in events]
    assert [row[4:9] for row in views["interactions"]] == [
        (one.first, one.second, kept[one.first], kept[one.second], one.interaction)
        for event, kept in zip(events, blueprints, strict=True)
        for one in event.pairs
    ]


def test_a_checkpoint_whose_record_a_kill_swallowed_is_recorded_when_the_run_goes_on(tmp_path: Path):
    with started(tmp_path / "run", SETTINGS) as trainer:
        events = trainer.store.events(CheckpointWritten)
    with closing(sqlite3.connect(tmp_path / "run" / "run.db")) as connection, connection:
        connection.execute("DELETE FROM events WHERE type = ?", (CheckpointWritten.name,))
    with resumed(tmp_path / "run") as trainer:
        trainer.store.flush()
        assert trainer.store.events(CheckpointWritten) == events
    with resumed(tmp_path / "run") as trainer:
        trainer.store.flush()
        assert trainer.store.events(CheckpointWritten) == events, "once"


def test_an_error_is_part_of_the_history(tmp_path: Path):
    def fail() -> None:
        raise RunError("the machine is on fire")

    with started(tmp_path / "run", tiny()) as trainer, pytest.raises(RunError):
        trainer.train(at(1, fail))
    with RunReader.open(tmp_path / "run" / "run.db") as reader:
        assert reader.events(RunFailed) == [RunFailed(iteration=1, reason="the machine is on fire")]


EVERY_CHOICE = (
    "rules={operations: [wait, germinate, advance, set_alpha, fossilize, prune], blends: [add, multiply], "
    "tempos: [3, 5, 8], alpha_targets: [.5, .7, 1], alpha_speeds: [0, 3], alpha_curves: [linear, cosine]}"
)
"""Rules that leave no head of the policy without a choice."""


def weights_changed(path: Path, *overrides: str) -> dict[str, bool]:
    """Whether training changed each weight of the policy, as opposed to its statistics."""
    with started(path, tiny("iterations=2", EVERY_CHOICE, *overrides)) as trainer:
        before = {name: weight.detach().clone() for name, weight in trainer.policy.named_parameters()}
        trainer.train(ignore)
        return {
            name: not torch.allclose(weight, before[name], rtol=0, atol=1e-9)
            for name, weight in trainer.policy.named_parameters()
        }


def test_an_update_learns_from_thousands_of_decisions_by_default():
    settings = TrainSettings()
    assert settings.environments * get_suite(settings.suite).steps >= 3000
    assert settings.environments >= 16 * settings.ppo.minibatches, "whole episodes in each minibatch"


def test_learning_changes_every_weight_of_the_policy(tmp_path: Path):
    changed = weights_changed(tmp_path / "run")
    assert [name for name, moved in changed.items() if not moved] == []


@pytest.mark.landing
def test_the_record_of_an_update_says_what_the_learner_did(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    taken: list[int] = []
    original = PolicyOptimizer.step

    def counted(optimizer: PolicyOptimizer, rate: float) -> None:
        taken[-1] += 1
        original(optimizer, rate)

    monkeypatch.setattr(PolicyOptimizer, "step", counted)
    taken.append(0)
    with started(tmp_path / "run", SETTINGS) as trainer:
        trainer.train(lambda iteration: taken.append(0))
        records = trainer.store.events(PPOUpdated)
    assert all(taken[:-1])
    assert [record.optimizer_steps for record in records] == taken[:-1]
    assert [record.metrics["optimizer_steps"] for record in records] == taken[:-1]


def test_baselines_are_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with started(tmp_path / "run", SETTINGS) as trainer:
        levels = trainer.measure_baseline_levels()
        curve, untrained = trainer.store.series("probe_score"), create_controller(trainer.policy, SETTINGS)
        (played,) = evaluate_controllers(
            LocalWorkers(1), [untrained], make_evaluation_config(SETTINGS), trainer._probes
        )
    assert {"none", "random", "all_at_start", "periodic", "heuristic", "untrained"} <= levels.keys()
    assert levels["untrained"] == pytest.approx(compute_mean_score(played)), "the policy that has not learned yet"
    assert curve == [(0, levels["untrained"])]

    def refuse(*arguments: object) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr("esper.train.trainer.evaluate_controllers", refuse)
    with resumed(tmp_path / "run") as trainer:
        assert trainer.measure_baseline_levels() == levels


@pytest.mark.slow
def test_processes_do_not_change_the_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    settings = tiny("suite=tokens", "iterations=1", "shards=2")
    with started(tmp_path / "apart", settings) as trainer:
        trainer.train(ignore)
        apart = learned(trainer)
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    with started(tmp_path / "together", settings) as trainer:
        trainer.train(ignore)
        together = learned(trainer)
    assert all(torch.equal(together[name], tensor) for name, tensor in apart.items())


# `esper.train_controller` trains in a directory, goes on there with the same settings, and with no others.


SMALL = {
    "suite": "short",
    "environments": 8,
    "shards": 1,
    "probe_instances": 2,
    "policy": {"hidden": 16, "width": 16},
    "ppo": {"group": 4, "minibatches": 2},
    "ppo.epochs": 2,
    "iterations": 2,
}


@pytest.mark.landing
def test_it_ends_as_the_command_does_also_in_two_calls(tmp_path: Path) -> None:
    words = [word for setting in (*TINY, "iterations=2") for word in ("--set", setting)]
    assert main(["train", "--run-dir", str(tmp_path / "command"), *words]) == 0

    @contextmanager
    def stop_after_one(trainer: Trainer) -> Generator[Any]:
        trainer.measure_baseline_levels()

        def stop(iteration: Iteration) -> None:
            raise KeyboardInterrupt

        yield stop

    with pytest.raises(KeyboardInterrupt):
        esper.train_controller(SMALL, tmp_path / "mine", watch=stop_after_one)
    summary = esper.train_controller(SMALL, tmp_path / "mine")
    assert summary.iterations == 2
    assert summary.probe_score is not None
    assert "look" in summary.baselines
    assert "untrained" not in summary.baselines
    assert summary.untrained is not None
    assert_same_end(tmp_path / "mine", tmp_path / "command")
    assert esper.train_controller(tiny("iterations=2"), tmp_path / "mine") == summary, "it is only read"
    with pytest.raises(ConfigError, match="was trained with other settings"):
        esper.train_controller({**SMALL, "seed": 1}, tmp_path / "mine")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ppo.epoch": 1}, r"unknown key `ppo\.epoch`, did you mean `ppo\.epochs`"),
        ({"seed.x": 1}, "setting seed.x: `seed` is a value"),
        (None, "settings are a NoneType: give a mapping"),
        ({"start_from": "nowhere"}, "nowhere"),
        ({"devices": ["cuda:77"]}, "no device 'cuda:77' on this machine"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_there_is_a_directory(
    settings: Any, message: str, tmp_path: Path
) -> None:
    with pytest.raises(EsperError, match=message):
        esper.train_controller(settings, tmp_path / "mine")
    assert not (tmp_path / "mine").exists()
