"""Settings of `esper grow`: what is not said follows from task and host."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from esper.config.loading import dump_settings, load_settings
from esper.config.settings import compare_settings
from esper.errors import ConfigError, TaskError
from esper.lifecycle.rules import Rules
from esper.practice.settings import GrowSettings
from esper.runs.run_directory import RunDirectory
from esper.runs.store import RunStore
from esper.tasks.practice.registry import TASKS, get_host, get_task
from esper.train.settings import TrainSettings


def load(*overrides: str) -> GrowSettings:
    return load_settings(GrowSettings, None, overrides)


@pytest.mark.parametrize("task", TASKS)
def test_a_task_alone_is_enough(task: str) -> None:
    settings = load(f"task={task}")
    kind = get_host(settings.host)
    assert settings.host == get_task(task).hosts[0]
    assert (settings.epochs, settings.learning_rate) == (kind.recipe.epochs, kind.recipe.learning_rate)
    assert settings.slots == kind.slots


def test_what_is_said_counts() -> None:
    settings = load("host=vit", "epochs=3", "slots={block2: auto}")
    assert (settings.task, settings.host, settings.epochs) == ("digits", "vit", 3)
    assert settings.slots == {"block2": "auto"}


@pytest.mark.parametrize("controller", ["none", "all_from_start"])
def test_evidence_for_nobody_is_refused(controller: str) -> None:
    load(f"controller={controller}")
    with pytest.raises(ConfigError, match=f"controller {controller} puts no seed on trial"):
        load(f"controller={controller}", "evidence=refit")


def test_settings_are_written_and_read_back_whole(tmp_path: Path) -> None:
    settings = load("task=charlm", "text=some/where.txt", "conduct.governor=null", "rent=0.1")
    dump_settings(settings, tmp_path / "config.yaml")
    assert load_settings(GrowSettings, tmp_path / "config.yaml") == settings


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("text=a.txt", "task digits reads no text"),
        ("epochz=3", "did you mean `epochs`"),
        ("task=3", "`task` is 3"),
        ("host=[a]", "`host` is"),
        ("learning_rate=0", "must be above 0"),
        ("slots={a: b}", "slots"),
    ],
)
def test_settings_that_cannot_be(override: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        load(override)


def test_a_budget_that_is_not_kept_is_refused() -> None:
    with pytest.raises(ConfigError, match="all_from_start fills every slot whatever it costs: leave the budget out"):
        load("controller=all_from_start", "conduct.budget.flops=9")


@pytest.mark.parametrize("override", ["task=digitz", "host=gpt"])
def test_tasks_and_hosts_that_cannot_be(override: str) -> None:
    with pytest.raises(TaskError):
        load(override)


def test_some_rules_leave_a_policys_own_others(tmp_path: Path) -> None:
    """By override and by file; nothing of a resumed run depends on whether the policy is still there."""
    trained = load_settings(TrainSettings, None, ["rules.tempos=[5, 8]", "rules.harm_tolerance=0.2"])
    run = tmp_path / "trained"
    with RunStore.create(RunDirectory.create(run).store):
        dump_settings(trained, run / "config.yaml")
    whose = f"controller={run}"
    assert load(whose).rules == trained.rules
    changed = trained.rules.model_copy(update={"harm_tolerance": 0.3})
    (tmp_path / "mine.yaml").write_text(f"controller: {run}\nrules: {{harm_tolerance: 0.3}}\n")
    for found in (load(whose, "rules.harm_tolerance=0.3"), load_settings(GrowSettings, tmp_path / "mine.yaml")):
        assert found.rules == changed
        assert [str(one) for one in compare_settings(found, found.usual())] == [
            "rules.harm_tolerance: 0.3 (default 0.2)"
        ]
    dump_settings(load(whose, "rules.harm_tolerance=0.3"), tmp_path / "config.yaml")
    shutil.rmtree(run)
    assert load_settings(GrowSettings, tmp_path / "config.yaml").rules == changed
    assert load("rules.harm_tolerance=0.3").rules == Rules(harm_tolerance=0.3)
