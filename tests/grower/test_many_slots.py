"""A deep model of its owner's with a hundred slots, from `esper.attach` to files that need no Esper."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import esper
from esper import Grower, GrowingModel
from esper.control.rules import Planting, Schedule
from esper.lifecycle.stages import Stage
from open_rules import open_rules

BLOCKS, SEEDS, KEPT = 100, 50, 10
WIDTH, CLASSES = 6, 3
HORIZON = 200


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, features: Tensor) -> Tensor:
        return features + self.mlp(self.norm(features))


def host() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, WIDTH), nn.Sequential(*(Block() for _ in range(BLOCKS))), nn.Linear(WIDTH, 3))


def examples(count: int = 16) -> Tensor:
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(1))


def grown() -> tuple[GrowingModel, Grower]:
    """Fifty seeds, of which ten are fossils already."""
    model = esper.attach(host(), {r"re:1\.\d+": ["norm", "lowrank"]}, examples(2))
    optimizer = torch.optim.AdamW(model.parameter_groups(lr=1e-3))
    plantings = [Planting(0, 2 * place, place % 2) for place in range(SEEDS)]
    grower = Grower(
        model,
        optimizer,
        controller=Schedule(plantings, HORIZON),
        evaluate=lambda _: (1.0, 0.5),
        rules=open_rules(),
        horizon=HORIZON,
    )
    labels = torch.arange(len(examples())) % CLASSES
    for _ in range(SEEDS + KEPT):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(examples()), labels)
        loss.backward()
        optimizer.step()
        grower.step(train_loss=loss)
    return model, grower


@pytest.mark.slow
def test_it_grows_is_saved_finalized_and_exported(tmp_path: Path) -> None:
    model, grower = grown()
    stages = grower.network.table.stage[0]
    assert len(model.slots) == BLOCKS
    assert (stages == Stage.FOSSILIZED).sum() == KEPT
    assert (stages == Stage.HOLDING).sum() == SEEDS - KEPT
    assert [seed.fossilized for seed in model.seeds.values()].count(True) == KEPT

    esper.save(model, tmp_path / "saved")
    again = esper.load(tmp_path / "saved", host(), examples(2))
    assert torch.equal(again.eval()(examples()), model.eval()(examples()))

    plain = model.finalize("drop")
    for seed in model.seeds.values():
        if not seed.fossilized:
            seed.alpha.zero_()
    torch.testing.assert_close(plain(examples()), model(examples()))
    assert not torch.equal(plain(examples()), host()(examples()))

    esper.export(plain, tmp_path / "net.pt2", examples(2))
    exported = torch.export.load(tmp_path / "net.pt2").module()
    torch.testing.assert_close(exported(examples()), plain(examples()), atol=1e-5, rtol=1e-5)
