"""Settings of `esper grow`: what is not said follows from task and host."""

from __future__ import annotations

from pathlib import Path

import pytest

from esper.config import dump_settings, load_settings
from esper.errors import ConfigError, TaskError
from esper.grower.practice.settings import GrowSettings
from esper.tasks.practice.registry import get_host, get_task, task_names


def load(*overrides: str) -> GrowSettings:
    return load_settings(GrowSettings, None, overrides)


@pytest.mark.parametrize("task", task_names())
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


@pytest.mark.parametrize("override", ["task=digitz", "host=gpt"])
def test_tasks_and_hosts_that_cannot_be(override: str) -> None:
    with pytest.raises(TaskError):
        load(override)
