"""`esper export` from the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import esper
from esper.cli import main

Capture = pytest.CaptureFixture[str]
HOST = """\
import torch
from parts import block

def network():
    return torch.nn.Sequential(block(4, 8), block(8, 3)), torch.zeros(2, 4)

def nothing():
    raise LookupError("no network today")

def one():
    return torch.nn.Linear(2, 2)
"""
PARTS = """\
from torch import nn

def block(inputs, outputs):
    return nn.Sequential(nn.Linear(inputs, outputs), nn.ReLU())
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A file that builds a host, what lies beside it, and a grown model."""
    (tmp_path / "own_network.py").write_text(HOST)
    (tmp_path / "parts.py").write_text(PARTS)
    first, second = (nn.Sequential(nn.Linear(*sizes), nn.ReLU()) for sizes in ((4, 8), (8, 3)))
    model = esper.attach(nn.Sequential(first, second), {"0": ["mlp"]}, torch.zeros(2, 4))
    model.slots["0"].germinate("mlp", torch.Generator().manual_seed(0), alpha=1.0)
    model.slots["0"].fossilize()
    with torch.no_grad():
        for parameter in model.seeds["0"].parameters():
            parameter.fill_(0.1)
    esper.save(model, tmp_path / "model")
    inputs = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))
    torch.save({"inputs": inputs, "outputs": model.eval()(inputs).detach()}, tmp_path / "expected.pt")
    return tmp_path


def exported(folder: Path, *words: str, host: str = "own_network.py:network") -> int:
    return main(["export", str(folder / "model"), "--host", f"{folder}/{host}", *words])


@pytest.mark.landing
def test_what_was_saved_is_exported(folder: Path, capsys: Capture) -> None:
    file = folder / "net.pt2"
    assert exported(folder, "--to", "pt2", "--out", str(file)) == 0
    assert capsys.readouterr().out == f"exported: {file}\n"
    expected = torch.load(folder / "expected.pt", weights_only=True)
    outputs = torch.export.load(file).module()(expected["inputs"])
    torch.testing.assert_close(outputs, expected["outputs"])
    assert exported(folder, "--to", "safetensors", "--out", str(folder / "net.pt2")) == 2
    assert "ends in .safetensors, not 'net.pt2'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("host", "sentence"),
    [
        ("own_network.py", "give FILE.py:FUNCTION"),
        ("missing.py:network", "give FILE.py:FUNCTION"),
        ("own_network.py:netwrk", "has no attribute 'netwrk'"),
        ("own_network.py:nothing", "LookupError: no network today"),
        ("own_network.py:one", "does not return a host and an example input: TypeError"),
    ],
)
def test_a_host_that_cannot_be_had_is_one_sentence(host: str, sentence: str, folder: Path, capsys: Capture) -> None:
    assert exported(folder, "--to", "safetensors", "--out", str(folder / "net.safetensors"), host=host) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1


def test_a_folder_that_holds_no_model_is_one_sentence(folder: Path, capsys: Capture) -> None:
    for part in (folder / "model").iterdir():
        part.unlink()
    assert exported(folder, "--to", "safetensors", "--out", str(folder / "net.safetensors")) == 2
    assert "model.json is missing: give a folder written by esper.save" in capsys.readouterr().err
