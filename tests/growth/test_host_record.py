"""A saved model is loaded on a host that computes the same, not just on one whose tensors are equal."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import esper
import tiny_transformers
from esper.errors import CheckpointError
from growth.growing import plant
from growth.hosts import Host, every_host


class Rotary(nn.Module):
    """With angles that its state dict lacks, and whose base is no attribute."""

    def __init__(self, base: float) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("angles", base ** -torch.arange(8.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x * self.angles)


def make(**changes: Any) -> nn.Sequential:
    options = {"base": 100.0, "eps": 1e-5, "heads": 2, "activation": nn.ReLU, "padding": 1, **changes}
    torch.manual_seed(0)
    attention = nn.TransformerEncoderLayer(8, options["heads"], 8, batch_first=True)
    norm = nn.LayerNorm(8, eps=options["eps"])
    return nn.Sequential(Rotary(options["base"]), attention, norm, options["activation"](), nn.Linear(8, 3))


CHANGES: dict[str, Any] = {"base": 200.0, "eps": 1e-3, "heads": 4, "activation": nn.GELU}


@pytest.mark.parametrize("freeze", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_a_host_with_equal_tensors_that_computes_something_else_is_refused(
    change: str, freeze: bool, tmp_path: Path
) -> None:
    x = torch.randn(2, 3, 8)
    model = esper.attach(make(), {"4": ["mlp"]}, x, freeze_host=freeze)
    plant(model, "4", "mlp")
    esper.save(model, tmp_path)
    other = make(**{change: CHANGES[change]})
    assert all(map(torch.equal, other.state_dict().values(), make().state_dict().values()))
    with pytest.raises(CheckpointError, match="was saved with a host of other settings"):
        esper.load(tmp_path, other, x)
    assert torch.equal(esper.load(tmp_path, make(), x).eval()(x), model.eval()(x))


@pytest.mark.parametrize("freeze", [False, True])
@pytest.mark.parametrize("change", [{"rope_theta": 500.0}, {"rms_norm_eps": 1e-2}])
def test_a_language_model_of_another_configuration_is_refused(
    change: dict[str, Any], freeze: bool, tmp_path: Path
) -> None:
    host = tiny_transformers.llama()
    x = {"input_ids": torch.arange(16).view(2, 8)}
    model = esper.attach(copy.deepcopy(host), {"model.layers.0": ["mlp"]}, x, freeze_host=freeze)
    esper.save(model, tmp_path)
    other = tiny_transformers.llama(**change)
    other.load_state_dict(host.state_dict())
    with pytest.raises(CheckpointError, match="was saved with a host of other settings"):
        esper.load(tmp_path, other, x)


@every_host
def test_a_host_that_is_built_alike_is_loaded_in_either_mode_and_another_type(host: Host, tmp_path: Path) -> None:
    model = host.attached()
    esper.save(model, tmp_path)
    fresh = host.make().eval()
    fresh(**host.arguments()) if isinstance(host.arguments(), dict) else fresh(host.arguments())
    esper.load(tmp_path, fresh, host.arguments())


@pytest.mark.parametrize("version", [1, 2, 3, 4])
def test_a_file_of_an_earlier_version_is_loaded_without_the_record(version: int, tmp_path: Path) -> None:
    x = torch.randn(2, 3, 8)
    esper.save(esper.attach(make(), {"4": ["mlp"]}, x), tmp_path)
    path = tmp_path / "model.json"
    record = json.loads(path.read_text())
    del record["host"]
    path.write_text(json.dumps({**record, "version": version}))
    assert esper.load(tmp_path, make(eps=1e-3), x)
