"""`esper.train_controller` trains in a directory, goes on there with the same settings, and with no others."""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import esper
from esper.cli import main
from esper.errors import ConfigError, EsperError
from esper.train.iteration import Iteration
from esper.train.trainer import Trainer
from train.runs import TINY, assert_same_end, tiny

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
