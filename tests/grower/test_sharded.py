"""A grower of a model that two processes share by FSDP2 decides as one of the whole model does in one process."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, multiprocessing, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from esper import Grower, GrowingModel
from esper.control.promises import PromiseSettings
from esper.control.rules.look import LookRule, LookSettings
from esper.errors import CheckpointError, ConfigError
from esper.grower.distributed import Processes
from esper.training.governor.model import Governor
from grower.training_loop import APART, HELD, data, growing, packed, validate

RANKS, DECISIONS, SAVED_AFTER, BLOWN_UP = 2, 12, 6, 9
EAGER = LookRule(LookSettings(promise=PromiseSettings(every=2, first=1, examples=96), threshold=-1.0), 20)
"""Plants what promises most, however little that is."""
CONTROLLERS = {"random": "random", "look": EAGER, "all_at_start": "all_at_start"}


def share(model: GrowingModel, size: int) -> None:
    mesh = init_device_mesh("cpu", (size,))
    model.shard_growth(mesh=mesh)
    fully_shard(model.host.get_submodule("2"), mesh=mesh)
    fully_shard(model.host, mesh=mesh)


def make(model: GrowingModel, how: str) -> Grower:
    optimizer = torch.optim.AdamW(model.parameter_groups(lr=1e-2))
    return Grower(model, optimizer, CONTROLLERS[how], evaluate=validate, horizon=20, seed=7)


def train(grower: Grower, part: slice, *, blown_up: bool) -> str:
    """Two minibatches and one decision."""
    inputs, labels = data()
    grower.model.train()
    for _ in range(2):
        loss = F.cross_entropy(grower.model(inputs[part]), labels[part])
        grower.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(grower.model.parameters(), 0.5)
        grower.optimizer.step()
    # Which the first process tells: the others' losses are of other examples.
    whole = F.cross_entropy(grower.model(inputs), labels)
    return str(grower.step(train_loss=float("nan") if blown_up else whole.detach()))


def live(grower: Grower, part: slice, rank: int) -> dict[str, Any]:
    """All decisions; the second process is told something else of the training now and then, which does not matter."""
    told, norms = list[str](), list[Tensor]()
    listen = grower.optimizer.register_step_post_hook(lambda *_: norms.append(grower._gradients._norms[-1]))
    for at in range(DECISIONS):
        told.append(train(grower, part, blown_up=at == (BLOWN_UP if rank == 0 else 3)))
    listen.remove()
    return {"told": told, "ending": str(grower.finish()), "values": whole(grower.model), "norms": torch.stack(norms)}


def whole(model: nn.Module) -> dict[str, Tensor]:
    values: dict[str, Any] = dict(model.named_parameters())
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach() for name, value in values.items()
    }


def _work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = distributed.FileStore(f"{folder}/store", RANKS)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=60))
    mine = slice(rank * 48, rank * 48 + 48)
    for how in CONTROLLERS:
        model = growing()
        share(model, RANKS)
        torch.save(live(make(model, how), mine, rank), f"{folder}/{how}-{rank}.pt")
    _resume(mine, folder, rank)
    torch.save(_find_broken(rank), f"{folder}/broken-{rank}.pt")
    distributed.destroy_process_group()


def _resume(mine: slice, folder: str, rank: int) -> None:
    """Each process saves its own part of the state, and another grower goes on with it."""
    model = growing()
    share(model, RANKS)
    grower = make(model, "random")
    for _ in range(SAVED_AFTER):
        train(grower, mine, blown_up=False)
    saved = grower.state_dict()
    again = make_again(grower)
    again.load_state_dict(saved)
    elsewhere = make(growing(), "random").state_dict()
    with pytest.raises(CheckpointError, match="the governor"):
        make_again(grower).load_state_dict({**elsewhere, "seeds": saved["seeds"]})
    torch.save({"saved": packed(saved), "again": packed(again.state_dict())}, f"{folder}/resumed-{rank}.pt")


def _find_broken(rank: int) -> dict[str, Any]:
    """Whether a governor finds all well, before and after a number that only the second process has is none."""
    model = growing()
    share(model, RANKS)
    governor = Governor(model, torch.optim.AdamW(model.parameter_groups(lr=1e-2)))
    before, bias = governor.finite(), model.host.get_parameter("0.bias")
    assert isinstance(bias, DTensor)
    if rank == 1:
        with torch.no_grad():
            bias.to_local().fill_(float("nan"))
    after = governor.finite()
    governor.rollback()
    return {"found": [before, after, governor.finite()]}


def make_again(grower: Grower) -> Grower:
    """Another grower of the same model."""
    return Grower(grower.model, grower.optimizer, "random", evaluate=validate, horizon=20, seed=7)


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharded")
    multiprocessing.start_processes(_work, (str(folder),), RANKS, start_method="spawn")
    return folder


def read(folder: Path, name: str) -> list[dict[str, Any]]:
    return [torch.load(folder / f"{name}-{rank}.pt") for rank in range(RANKS)]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["random", "all_at_start"])
def test_it_decides_as_in_one_process(left: Path, how: str) -> None:
    expected = live(make(growing(), how), slice(None), rank=0)
    for found in read(left, how):
        assert found["told"] == expected["told"]
        assert found["ending"] == expected["ending"]
        torch.testing.assert_close(found["values"], expected["values"], rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(found["norms"], expected["norms"], rtol=1e-3, atol=1e-4)
    assert any("germinate" in told for told in expected["told"])
    assert [at for at, told in enumerate(expected["told"]) if "rollback" in told] == [BLOWN_UP]


@pytest.mark.slow
def test_what_the_first_hears_is_planted_by_all(left: Path) -> None:
    first, second = read(left, "look")
    assert first["told"] == second["told"]
    assert any("germinate" in told for told in first["told"])
    torch.testing.assert_close(first["values"], second["values"], rtol=0, atol=0)


@pytest.mark.slow
def test_what_one_process_finds_broken_is_broken_for_all(left: Path) -> None:
    for one in read(left, "broken"):
        assert one["found"] == [True, False, True]


@pytest.mark.slow
def test_each_process_saves_its_part_and_goes_on_with_it(left: Path) -> None:
    found = read(left, "resumed")
    for one in found:
        assert torch.equal(one["saved"], one["again"])
    assert len(found[0]["saved"]) != len(found[1]["saved"]), "the parts differ in size"


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[GrowingModel]:
    """Shared by one process, which has all of it."""
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    model = growing()
    share(model, 1)
    yield model
    distributed.destroy_process_group()


def test_passes_are_separate(alone: GrowingModel) -> None:
    """What a process finds out about its own passes must not make their number another one."""
    assert make(alone, "random").passes.separate == "processes share its parameters"


def test_what_learns_apart_is_refused(alone: GrowingModel) -> None:
    optimizer = torch.optim.AdamW(alone.parameter_groups(lr=1e-2))
    for told in ({"rules": APART}, {"evidence": "refit", "rules": HELD}):
        with pytest.raises(ConfigError, match="nothing learns apart.*take isolation none and evidence dependence"):
            Grower(alone, optimizer, "random", evaluate=validate, loss=F.cross_entropy, **told)


def test_a_rehearsal_is_refused(alone: GrowingModel) -> None:
    with pytest.raises(ConfigError, match="there is no rehearsal"):
        make(alone, "random").rehearse()


def test_validation_between_leaves_nothing_behind(alone: GrowingModel) -> None:
    """A pass without a backward one leaves parameters gathered, which are none of the optimizer's."""
    grower = make(alone, "all_at_start")
    for _ in range(4):
        train(grower, slice(None), blown_up=False)
        validate(alone)
    before = {name: value.clone() for name, value in whole(alone).items()}
    for _ in range(2):
        train(grower, slice(None), blown_up=False)
    assert "rollback" in train(grower, slice(None), blown_up=True)
    assert all(isinstance(parameter, DTensor) for parameter in alone.parameters())
    after = whole(alone)
    assert any(not torch.equal(after[name], value) for name, value in before.items() if name in after)


def test_without_processes_to_share_with_all_is_as_ever() -> None:
    assert Processes(sharing=True).agree_on_model(lambda: 3) == 3
