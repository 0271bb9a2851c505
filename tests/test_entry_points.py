"""A value means the same wherever it is taken and is refused with a sentence elsewhere, as docs/settings.md says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from esper.config import load_settings
from esper.errors import ConfigError
from esper.experiments.compare.trials import Contest
from esper.experiments.play import terms_of
from esper.experiments.settings import TrainSettings
from esper.grower.practice.settings import GrowSettings
from esper.rl.gym.growth import Growth, GrowthSettings
from esper.settings import Settings

PAGE = Path(__file__).parents[1] / "docs" / "settings.md"
COLUMNS: dict[str, type[Settings]] = {
    "train, sweep": TrainSettings,
    "gym environment": GrowthSettings,
    "grow": GrowSettings,
}


def table() -> dict[str, dict[str, str]]:
    """By setting and column."""
    head, _, *rows = [
        [cell.strip() for cell in line.strip("|\n").split("|")]
        for line in PAGE.read_text().splitlines()
        if line.startswith("|")
    ]
    return {row[0].strip("`"): dict(zip(head[1:], row[1:], strict=True)) for row in rows}


@pytest.mark.parametrize("column", COLUMNS)
def test_the_page_says_who_takes_what(column: str) -> None:
    fields = COLUMNS[column].model_fields
    for setting, cells in table().items():
        names = re.findall(r"`(\w+)`", cells[column]) or [setting]
        elsewhere = cells[column] == "of `reset`"
        assert (cells[column] != "-" and not elsewhere) == all(name in fields for name in names), setting


def test_auto_is_refused_by_training_and_says_why() -> None:
    with pytest.raises(ConfigError, match=r"auto goes by the clock.*name stacked or looped"):
        load_settings(TrainSettings, None, ["strategy=auto"])
    assert GrowthSettings.of({"strategy": "auto"}).strategy == "auto"


@pytest.mark.parametrize("root", [TrainSettings, GrowSettings, GrowthSettings])
@pytest.mark.parametrize("isolation", ["shadow", "straight_through"])
def test_isolation_without_a_way_out_is_refused(root: type[Settings], isolation: str) -> None:
    with pytest.raises(ConfigError, match=r"`rules`: under isolation .* add advance to operations"):
        load_settings(root, None, [f"rules.isolation={isolation}"])
    able = "rules.operations=[wait, germinate, advance, fossilize, prune]"
    load_settings(root, None, [f"rules.isolation={isolation}", able])


def test_devices_are_refused_alike() -> None:
    for root, override in ((TrainSettings, "devices=nonsense"), (GrowSettings, "device=nonsense")):
        with pytest.raises(ConfigError, match="torch knows no device 'nonsense'"):
            load_settings(root, None, [override])
    with pytest.raises(ConfigError, match="no device 'cuda:77' on this machine: choose from cpu"):
        Growth(1, GrowthSettings(device="cuda:77"))


def test_a_seed_that_a_comparison_would_not_use_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="one has seed 3, .* leave seed out"):
        Contest(tmp_path, {"one": TrainSettings(seed=3)}, 5, 2)


def test_who_plays_for_a_run_runs_networks_as_it_does() -> None:
    settings = load_settings(TrainSettings, None, ["strategy=looped", "networks_per_pass=3", "conduct.plateau=4"])
    terms = terms_of(settings)
    assert (terms.strategy, terms.networks_per_pass, terms.conduct) == ("looped", 3, settings.conduct)
