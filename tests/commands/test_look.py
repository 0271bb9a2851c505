"""`esper look` from the command line."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from esper.cli import main

Capture = pytest.CaptureFixture[str]
QUICK = ("--task", "digits", "--host", "mlp", "--set", "batch_size=64", "--examples", "64", "--draws", "1")


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_it_prints_a_table_draws_a_map_and_tells_machines(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "map.svg"
    assert main(["look", *QUICK, "--after", "1", "--layers", "--svg", str(path), "--json"]) == 0
    captured = capsys.readouterr()
    record = json.loads(captured.out)
    best = record["rows"][0]
    assert {"slot", "blueprint", "promise", "promise_held_out", "error", "parameters", "flops"} <= best.keys()
    assert 0 < best["promise"] < 1
    assert best["promise"] == max(row["promise"] for row in record["rows"])
    assert {layer["kind"] for layer in record["layers"]} >= {"Linear"}
    assert "epoch 1/1" in captured.err
    assert "64 examples, mean loss" in captured.err
    assert f"{best['promise']:.3f}" in captured.err
    assert best["blueprint"] in "".join(ET.parse(path).getroot().itertext())


def test_what_was_learned_before_changes_what_is_promised(capsys: Capture) -> None:
    losses = []
    for after in ("0", "2"):
        assert main(["look", *QUICK, "--after", after]) == 0
        losses.append(float(capsys.readouterr().out.splitlines()[-1].split()[-1]))
    assert losses[1] < losses[0]


@pytest.mark.parametrize(("words", "wrong"), [(("--after", "-1"), "--after -1"), (("--examples", "1"), "--examples 1")])
def test_wrong_numbers_are_refused(words: tuple[str, str], wrong: str, capsys: Capture) -> None:
    assert main(["look", *QUICK, *words]) == 2
    assert wrong in capsys.readouterr().err


def test_it_takes_the_configuration_of_a_run_that_grows(tmp_path: Path, capsys: Capture) -> None:
    config = tmp_path / "grow.yaml"
    config.write_text(
        "host: mlp\nepochs: 3\nevidence: refit\ncontroller: heuristic\nconduct: {counterfactual_every: 3}\n"
    )
    assert main(["look", *QUICK, "--config", str(config), "--after", "0"]) == 0
    assert "counterfactual_every: 3" in capsys.readouterr().out
    assert main(["look", *QUICK, "--config", str(config), "--after", "4"]) == 0
    assert "epoch 4/4" in capsys.readouterr().out
