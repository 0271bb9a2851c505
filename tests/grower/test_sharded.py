"""A grower of a model that two processes share by FSDP2 decides as one of the whole model does in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, distributed, multiprocessing, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from esper import Constrained, Grower, GrowingModel, Refit, Score, attach
from esper.control.rules import LookRule, LookSettings
from esper.engine.promises import PromiseSettings
from esper.errors import CheckpointError, ConfigError, DistributedError, SlotError
from esper.grower.distributed import Processes
from esper.grower.governor import ModelSnapshot
from esper.grower.state_dict import GrowthInStateDict
from esper.growth.sharding import count_copies
from grower.training_loop import APART, CLASSES, HELD, WIDTH, data, growing, packed, validate

RANKS, DECISIONS, SAVED_AFTER, BLOWN_UP = 2, 12, 6, 9
WHEN = "then", "now"
EARLY = 5
"""Decisions after which something is unfinished."""
EAGER = LookRule(LookSettings(promise=PromiseSettings(every=2, first=1, examples=96), threshold=-1.0), 20)
"""Plants what promises most, however little that is."""


class Block(nn.Module):
    """Residual."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, features: Tensor) -> Tensor:
        return features + self.inner(features).relu()


def growing_blocks() -> GrowingModel:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, WIDTH), nn.ReLU(), Block(), nn.ReLU(), nn.Linear(WIDTH, CLASSES))
    return attach(net, {"0": ["mlp"], "2": ["block_copy"], "4": ["lora_2"]}, torch.zeros(2, 4))


class Scenario(NamedTuple):
    """A growth."""

    controller: Any
    decisions: int = DECISIONS
    build: Callable[[], GrowingModel] = growing
    constrained: bool = False


SCENARIOS = {
    "random": Scenario("random"),
    "everything": Scenario("all_at_start"),
    "early": Scenario("all_at_start", EARLY),
    "constrained": Scenario("all_at_start", constrained=True),
    "look": Scenario(EAGER),
    "frozen": Scenario(EAGER, build=partial(growing, frozen=True)),
    "blocks": Scenario(EAGER, build=growing_blocks),
}
ALIKE = ["random", "everything", "early", "constrained"]
"""That do not go by what the first process alone hears of training."""


def share(model: GrowingModel, size: int) -> None:
    mesh = init_device_mesh("cpu", (size,))
    model.shard_growth(mesh=mesh)
    fully_shard(model.host.get_submodule("2"), mesh=mesh)
    fully_shard(model.host, mesh=mesh)


@torch.no_grad()
def validate_sets(model: nn.Module, rank: int, *, constrained: bool) -> Any:
    """On data of each process's own, of which the first one's count; the other set asks for other answers."""
    model.eval()
    inputs, labels = data(64, seed=1 + rank)
    logits = model(inputs)
    target = F.cross_entropy(logits, labels)
    if not constrained:
        return target
    return {"target": Score(target), "source": Score(F.cross_entropy(logits, (labels + 1) % CLASSES))}


def make(model: GrowingModel, how: str, rank: int = 0) -> Grower:
    scenario = SCENARIOS[how]
    evaluate = partial(validate_sets, rank=rank, constrained=scenario.constrained)
    return Grower(
        model,
        torch.optim.AdamW(model.parameter_groups(lr=1e-2)),
        Constrained(evaluate, "target", {"source": 0.01}) if scenario.constrained else evaluate,
        controller=scenario.controller,
        horizon=20,
        seed=7,
    )


def train(grower: Grower, part: slice, *, blown_up: bool = False) -> str:
    """Two minibatches and one decision."""
    inputs, labels = data()
    grower.model.train()
    for _ in range(2):
        loss = F.cross_entropy(grower.model(inputs[part]), labels[part])
        grower.optimizer.zero_grad()
        if loss.requires_grad:
            loss.backward()
        nn.utils.clip_grad_norm_(grower.model.parameters(), 0.5)
        grower.optimizer.step()
    whole = F.cross_entropy(grower.model(inputs), labels)  # alike in all, as what one process has is not
    return str(grower.step(train_loss=float("nan") if blown_up else whole.detach()))


def live(grower: Grower, part: slice, decisions: int, rank: int = 0) -> dict[str, Any]:
    """All decisions; the second process is told something else of the training now and then, which does not matter."""
    told, norms = list[str](), list[Tensor]()
    listen = grower.optimizer.register_step_post_hook(lambda *_: norms.append(grower._gradients._norms[-1]))
    for at in range(decisions):
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
    for how, scenario in SCENARIOS.items():
        model = scenario.build()
        share(model, RANKS)
        grower = make(model, how, rank)
        torch.save(live(grower, mine, scenario.decisions, rank), f"{folder}/{how}-{rank}.pt")
    _resume(mine, folder, rank)
    torch.save(_find_broken(rank), f"{folder}/broken-{rank}.pt")
    with pytest.raises(ZeroDivisionError if rank == 0 else DistributedError):  # and nobody waits for ever
        Processes(sharing=True).agree(lambda: 1 // 0)
    distributed.destroy_process_group()


def _resume(mine: slice, folder: str, rank: int) -> None:
    """Each process saves its own part of the state, and another grower goes on with it."""
    model = growing()
    share(model, RANKS)
    grower = make(model, "random")
    for _ in range(SAVED_AFTER):
        train(grower, mine)
    saved, then = grower.state_dict(), whole(model)
    inputs, labels = data()
    F.cross_entropy(model(inputs), labels).backward()
    grower.optimizer.step()
    again = make_again(grower)  # whose governor would return to what is now
    again.load_state_dict(saved)
    loaded = packed(again.state_dict())
    elsewhere = make(growing(), "random").state_dict()
    with pytest.raises(CheckpointError, match="the governor"):
        make_again(grower).load_state_dict({**elsewhere, "seeds": saved["seeds"]})
    again._snapshot.restore()
    values = dict(zip(WHEN, (then, whole(model)), strict=True))
    torch.save({"saved": packed(saved), "loaded": loaded, **values}, f"{folder}/resumed-{rank}.pt")


def make_again(grower: Grower) -> Grower:
    """Another grower of the same model."""
    return Grower(
        grower.model, grower.optimizer, controller="random", evaluate=grower.backend._evaluate, horizon=20, seed=7
    )


def _find_broken(rank: int) -> dict[str, Any]:
    """Whether a governor finds all well, before and after a number that only the second process has is none."""
    model = growing()
    share(model, RANKS)
    snapshot = ModelSnapshot(model, torch.optim.AdamW(model.parameter_groups(lr=1e-2)))
    snapshot.take()
    before, bias = snapshot.is_finite(), model.host.get_parameter("0.bias")
    assert isinstance(bias, DTensor)
    if rank == 1:
        with torch.no_grad():
            bias.to_local().fill_(float("nan"))
    after = snapshot.is_finite()
    snapshot.restore()
    return {"found": [before, after, snapshot.is_finite()]}


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharded")
    multiprocessing.start_processes(_work, (str(folder),), RANKS, start_method="spawn")
    return folder


def read(folder: Path, name: str) -> list[dict[str, Any]]:
    return [torch.load(folder / f"{name}-{rank}.pt") for rank in range(RANKS)]


@pytest.mark.slow
@pytest.mark.parametrize("how", ALIKE)
def test_it_decides_as_in_one_process(left: Path, how: str) -> None:
    expected = live(make(growing(), how), slice(None), SCENARIOS[how].decisions)
    for found in read(left, how):
        assert found["told"] == expected["told"]
        assert found["ending"] == expected["ending"]
        torch.testing.assert_close(found["values"], expected["values"], rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(found["norms"], expected["norms"], rtol=1e-3, atol=1e-4)
    assert any("germinate" in told for told in expected["told"])
    if how == "early":
        assert "kept" in expected["ending"] or "pruned" in expected["ending"]
    else:
        assert [at for at, told in enumerate(expected["told"]) if "rollback" in told] == [BLOWN_UP]
    if how == "constrained":
        assert any("source loss up" in told for told in expected["told"])


@pytest.mark.slow
@pytest.mark.parametrize("how", [how for how in SCENARIOS if how not in ALIKE])
def test_what_the_first_hears_is_planted_by_all(left: Path, how: str) -> None:
    """Where nothing learns before a slot, and where a block would have to be gathered to be measured, too."""
    first, second = read(left, how)
    assert first["told"] == second["told"]
    assert first["ending"] == second["ending"]
    assert any("germinate" in told for told in first["told"])
    assert not any("block_copy" in told for told in first["told"])
    torch.testing.assert_close(first["values"], second["values"], rtol=0, atol=0)


@pytest.mark.slow
def test_what_one_process_finds_broken_is_broken_for_all(left: Path) -> None:
    for one in read(left, "broken"):
        assert one["found"] == [True, False, True]


@pytest.mark.slow
def test_each_process_saves_its_part_and_goes_on_with_it(left: Path) -> None:
    found = read(left, "resumed")
    for one in found:
        assert torch.equal(one["saved"], one["loaded"])
        hosts = [{name: value for name, value in one[when].items() if name.startswith("host")} for when in WHEN]
        torch.testing.assert_close(*hosts, rtol=0, atol=0)  # what was growing is gone, as after any rollback
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
    assert make(alone, "random").backend.evaluator.fallback_reason == "processes share its parameters"


def test_what_learns_apart_is_refused(alone: GrowingModel) -> None:
    optimizer = torch.optim.AdamW(alone.parameter_groups(lr=1e-2))
    for evaluate, rules in ((validate, APART), (Refit(validate), HELD)):
        with pytest.raises(ConfigError, match="cannot train in isolation.*use isolation none and no esper.Refit"):
            Grower(alone, optimizer, evaluate, controller="random", loss=F.cross_entropy, rules=rules)


def test_a_rehearsal_is_refused(alone: GrowingModel) -> None:
    with pytest.raises(ConfigError, match="cannot be rehearsed"):
        make(alone, "random").rehearse()


def test_validation_between_leaves_nothing_behind(alone: GrowingModel) -> None:
    """A pass without a backward one leaves parameters gathered, which are none of the optimizer's."""
    validate(alone)
    grower = make(alone, "everything")
    owned = {parameter for group in grower.optimizer.param_groups for parameter in group["params"]}
    assert owned == set(alone.parameters())
    for _ in range(8):
        train(grower, slice(None))
        validate(alone)
    assert alone.seeds, "the test means to see seeds that are kept"
    validate(alone)
    before = {name: value.clone() for name, value in whole(alone).items()}
    assert "rollback" in train(grower, slice(None), blown_up=True)
    assert all(isinstance(parameter, DTensor) for parameter in alone.parameters())
    torch.testing.assert_close(whole(alone), before, rtol=0, atol=0)


def test_a_grower_made_between_minibatches_is_no_other_optimizers(alone: GrowingModel) -> None:
    optimizer = torch.optim.AdamW(alone.parameter_groups(lr=1e-2))
    inputs, labels = data()
    F.cross_entropy(alone(inputs), labels).backward()
    optimizer.step()
    validate(alone)
    grower = Grower(alone, optimizer, controller="none", evaluate=validate)
    assert grower.step(train_loss=1.0).number == 1


def test_what_is_to_be_shared_and_is_not_is_told() -> None:
    model = growing()
    model.sharded = True  # as shard_growth leaves it, before fully_shard
    with pytest.raises(SlotError, match="but the host is whole"):
        make(model, "random")


def test_a_state_dict_does_not_hold_what_grew_in_all(alone: GrowingModel) -> None:
    with pytest.raises(SlotError, match="save it by torch.distributed.checkpoint"):
        GrowthInStateDict(alone)
    model = growing()
    GrowthInStateDict(model)
    model.sharded = True
    with pytest.raises(SlotError, match="save it by torch.distributed.checkpoint"):
        model.state_dict()


@pytest.mark.parametrize(("shape", "parts"), [((1,), {}), ((1, 1), {"mesh_dim_names": ("replicate", "shard")})])
def test_copies_are_counted(alone: GrowingModel, shape: tuple[int, ...], parts: dict[str, Any]) -> None:
    net = nn.Linear(2, 2)
    fully_shard(net, mesh=init_device_mesh("cpu", shape, **parts))
    assert count_copies(net.weight) == 1
    assert count_copies(torch.zeros(2)) == 1


def test_without_processes_to_share_with_all_is_as_ever() -> None:
    assert Processes(sharing=True).run_on_model(lambda: 3) == 3
