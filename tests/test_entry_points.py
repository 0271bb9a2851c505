"""A value means the same wherever it is taken and is refused with a sentence elsewhere, as docs/settings.md says."""

import re
from collections.abc import Collection
from dataclasses import asdict
from inspect import signature
from pathlib import Path

import numpy as np
import pytest

from esper.commands import evaluate
from esper.config.loading import load_settings
from esper.config.settings import Settings
from esper.errors import ConfigError
from esper.grower.config import GrowerConfig
from esper.grower.grower import Grower
from esper.lab.experiment import Experiment
from esper.lifecycle.rules import Rules
from esper.rl.gym import GrowthSettings, GrowthVectorEnv
from esper.tasks.registry import get_suite
from esper.train.evaluation import make_evaluation_config
from esper.train.settings import TrainSettings

PAGE = Path(__file__).parents[1] / "docs" / "settings.md"
COLUMNS: dict[str, Collection[str]] = {
    "train, sweep": TrainSettings.model_fields,
    "compare": TrainSettings.model_fields,
    "evaluate": signature(evaluate.command).parameters,
    "gym environment": GrowthSettings.model_fields,
    "Grower": {*signature(Grower).parameters, *GrowerConfig.model_fields} - {"config", "fields"},
}
"""What is taken there."""
NOT_TAKEN = {"-", "own", "own, the first", "not used", "of `reset`", "where the model is"}


def table(heading: str = "# ") -> dict[str, dict[str, str]]:
    """The first table below a heading, by setting and column."""
    text = PAGE.read_text()
    blocks = text[text.index(heading) :].split("\n\n")
    found = next(block for block in blocks if block.startswith("|"))
    head, _, *rows = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in found.splitlines()]
    return {row[0].strip("`"): dict(zip(head[1:], row[1:], strict=True)) for row in rows}


def test_the_page_names_every_rule_with_its_default() -> None:
    told = table("## Rules")
    assert told.keys() == Rules.model_fields.keys()
    for name, cells in told.items():
        usual = getattr(Rules(), name)
        parts = usual if isinstance(usual, tuple) else (usual,)
        assert cells["default"] == ", ".join(
            f"{part:g}" if isinstance(part, float) else str(getattr(part, "name", part)).lower() for part in parts
        )


@pytest.mark.parametrize("column", COLUMNS)
def test_the_page_says_who_takes_what(column: str) -> None:
    for setting, cells in table().items():
        names = [setting] if cells[column] in NOT_TAKEN else re.findall(r"`(\w+)`", cells[column]) or [setting]
        assert all((name in COLUMNS[column]) == (cells[column] not in NOT_TAKEN) for name in names), setting


def test_evaluation_takes_what_the_page_calls_the_runs_own() -> None:
    settings = load_settings(
        TrainSettings,
        None,
        [
            *("suite=digits", "rules.harm_tolerance=0.1", "growth.plateau=4", "strategy=looped"),
            *(
                "networks_per_pass=3",
                "examples_per_pass=5",
                "bf16=true",
                "devices=[cuda:1, cpu]",
                "seed=7",
                "reward=sparse",
            ),
        ],
    )
    terms = asdict(make_evaluation_config(settings))
    taken = ("own", "a run's own; any for a controller")
    own = [setting for setting, cells in table().items() if cells["evaluate"] in taken and setting != "seed"]
    assert {setting: terms[setting] for setting in own} == {setting: vars(settings)[setting] for setting in own}
    assert terms["device"] == settings.devices[0]
    assert terms.keys() == {*own, "device"}  # and what the page says is not used, or is drawn from, is not there


def test_how_networks_are_computed_reaches_them_from_everywhere() -> None:
    given = {"networks_per_pass": 3, "examples_per_pass": 5, "bf16": True, "strategy": "looped"}
    settings = load_settings(TrainSettings, None, [f"{name}={str(value).lower()}" for name, value in given.items()])
    instances = get_suite(settings.suite).sample(2, "train", np.random.default_rng(0))
    environment = GrowthVectorEnv(2, **given)
    environment.reset(seed=0)
    for episodes in (make_evaluation_config(settings).create_episodes(instances), environment.episodes):
        config = vars(episodes.population.config)
        assert {name: config[name] for name in given} == given


def test_auto_is_refused_by_training_and_says_why() -> None:
    with pytest.raises(ConfigError, match=r"auto depends on timings.*set stacked or looped"):
        load_settings(TrainSettings, None, ["strategy=auto"])
    assert GrowthSettings.parse({"strategy": "auto"}).strategy == "auto"


@pytest.mark.parametrize("root", [TrainSettings, GrowthSettings])
def test_isolation_without_a_way_out_is_refused(root: type[Settings]) -> None:
    with pytest.raises(ConfigError, match=r"`rules`: with isolation .* add advance to operations"):
        load_settings(root, None, ["rules.isolation=shadow"])
    able = "rules.operations=[wait, germinate, advance, fossilize, prune]"
    load_settings(root, None, ["rules.isolation=shadow", able])


def test_devices_are_refused_alike() -> None:
    for root, override in ((TrainSettings, "devices=nonsense"), (GrowthSettings, "device=nonsense")):
        with pytest.raises(ConfigError, match="'nonsense' is not a torch device"):
            load_settings(root, None, [override])
    with pytest.raises(ConfigError, match="no device 'cuda:77' on this machine: choose from cpu"):
        GrowthVectorEnv(1, device="cuda:77")


def test_a_seed_that_a_comparison_would_not_use_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="one has seed 3, .* remove seed"):
        Experiment(tmp_path, {"one": TrainSettings(seed=3)}, 5, 2)


@pytest.mark.parametrize("root", [TrainSettings, GrowthSettings])
def test_measurements_that_never_come_are_refused(root: type[Settings]) -> None:
    """A slot's counterfactual within every so many decisions, where there are not so many."""
    with pytest.raises(ConfigError, match="counterfactual_every is 31, but there are only 30 decisions"):
        load_settings(root, None, ["growth.counterfactual_every=31"])
    load_settings(root, None, ["growth.counterfactual_every=30"])
