"""Two processes with one model under DistributedDataParallel: run by `test_distributed`, one per rank."""

import copy
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import esper
from esper.errors import DistributedError
from esper.growth.model import GrowingModel
from esper.growth.persist import plant_structure
from factories import SLOTS, make_data, make_host, validate

RANKS = 2
STEPS = 5
WAYS = ("planted", "inside", "regrown", "accumulated", "clipped", "block")
"""How a grower's seeds come to a model that is wrapped, and what its loop does."""


def make(how: str, several: bool) -> tuple[GrowingModel, nn.Module]:
    """A model in which something may grow, and what is called in training."""

    def wrap(module: nn.Module) -> nn.Module:
        return DistributedDataParallel(module, find_unused_parameters=how == "regrown") if several else module

    inputs = make_data()[0][:2]
    if how == "inside":
        network = wrap(make_host())
        return esper.attach(network.module if several else network, {"0": ["mlp"]}, inputs), network
    if how == "block":
        network = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2)), nn.Linear(4, 3))
        model = esper.attach(network, {"0": ["block_copy"]}, inputs)
        return model, wrap(model)
    model = esper.attach(make_host(), SLOTS, inputs)
    if how == "regrown":
        plant_structure(model, {"0": {"blueprint": "norm", "blend": 0, "fossilized": False}})
        parallel = wrap(model)
        model.slots["0"].prune()
        return model, parallel
    return model, wrap(model)


def train(how: str, rank: int, *, several: bool) -> dict[str, torch.Tensor]:
    """The model after some steps, each process on half of the data, or one on all of it."""
    torch.manual_seed(0)
    torch.random.manual_seed(rank)
    model, network = make(how, several)
    optimizer = torch.optim.SGD(model.parameter_groups(lr=0.3))
    grower = esper.Grower(model, optimizer, validate, controller="all_at_start", horizon=10, seed=1)
    inputs, labels = make_data()
    mine = slice(rank * 48, rank * 48 + 48) if several else slice(96)
    at_birth: dict[str, torch.Tensor] = {}
    for _ in range(STEPS):
        network.train()
        optimizer.zero_grad()
        for _ in range(2 if how == "accumulated" else 1):
            loss = F.cross_entropy(network(inputs[mine]), labels[mine])
            loss.backward()
        if how == "clipped":
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        grower.step(train_loss=1.0)
        statistics = [tensor for seed in model.seeds.values() for tensor in seed.buffers()]
        at_birth = at_birth or {f"at birth {number}": tensor.clone() for number, tensor in enumerate(statistics)}
    return at_birth | {name: tensor.clone() for name, tensor in model.state_dict().items()}


def refuse() -> list[str]:
    """The sentences about a seed planted by hand in a wrapped model, and in one that is not wrapped yet."""
    sentences: list[str] = []
    for wrap in (DistributedDataParallel, nn.Identity):
        model = esper.attach(make_host(), SLOTS, torch.zeros(2, 4))
        _ = wrap(model)
        try:
            model.slots["0"].germinate("mlp", alpha=1.0)
        except DistributedError as error:
            sentences.append(str(error))
        assert not model.seeds
    return sentences


def follow(folder: Path, rank: int) -> list[bool]:
    """Whether copies, averages and saved models have what grew before, in one process without the others."""
    if rank:
        return []
    model = esper.attach(make_host(), SLOTS, torch.zeros(2, 4))
    average = copy.deepcopy(model)
    model.mirror(average)
    plant_structure(model, {"0": {"blueprint": "mlp", "blend": 0, "fossilized": True}})
    esper.save(model, folder / "saved")
    loaded = esper.load(folder / "saved", make_host(), torch.zeros(2, 4))
    return [list(other.seeds) == ["0"] for other in (average, copy.deepcopy(model), loaded)]


def main(folder: Path, rank: int) -> None:
    """Train in every way, and leave behind what this process held at the end."""
    torch.set_num_threads(1)
    store = distributed.FileStore(str(folder / "store"), RANKS)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=60))
    left: dict[str, Any] = {how: train(how, rank, several=True) for how in WAYS}
    torch.save(left | {"refused": refuse(), "followed": follow(folder, rank)}, folder / f"rank-{rank}.pt")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
