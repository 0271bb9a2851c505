"""Two processes that plant by hand under DistributedDataParallel: run by `test_planting_in_processes`, one per rank."""

from __future__ import annotations

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
from esper.grower.state_dict import plant_structure
from esper.growth.model import GrowingModel
from grower.training_loop import SLOTS, data, host, validate
from growth.growing import generator

RANKS = 2
STEPS = 5
RATE = 0.3
WAYS = (
    "before",
    "germinate",
    "structure",
    "attach_inside",
    "attach_outside",
    "grower",
    "regrown",
    "accumulated",
    "clipped",
    "block",
)
"""How seeds come to a model that is wrapped; ``before`` it is."""


def plant(model: GrowingModel, blueprint: str, slot: str = "0") -> None:
    """Of other values in each process that has another random seed."""
    model.slots[slot].germinate(blueprint, alpha=1.0)


def make(how: str, several: bool) -> tuple[GrowingModel, nn.Module]:
    """A model in which something has grown, and what is called in training."""

    def wrap(module: nn.Module) -> nn.Module:
        return DistributedDataParallel(module, find_unused_parameters=how == "regrown") if several else module

    inputs = data()[0][:2]
    if how == "attach_outside":
        network = wrap(host())
        model = esper.attach(network, {"module.0" if several else "0": ["mlp"]}, inputs)
        plant(model, "mlp", *model.slots)
        return model, model
    if how == "attach_inside":
        network = wrap(host())
        model = esper.attach(network.module if several else network, {"0": ["mlp"]}, inputs)
        plant(model, "mlp")
        return model, network
    if how == "block":
        network = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2)), nn.Linear(4, 3))
        model = esper.attach(network, {"0": ["block_copy"]}, inputs)
        parallel = wrap(model)
        plant(model, "block_copy")
        return model, parallel
    model = esper.attach(host(), SLOTS, inputs)
    if how in ("before", "regrown"):
        model.slots["0"].germinate("norm", generator(), alpha=1.0)
    if how == "before":
        return model, wrap(model)
    parallel = wrap(model)
    if how == "structure":
        plant_structure(model, {"0": {"blueprint": "mlp", "blend": 0, "fossilized": False}})
        model.slots["0"].set_alpha(1.0)
    else:
        model.slots["0"].remove()
        plant(model, "mlp")
    return model, parallel


def train(how: str, rank: int, *, several: bool) -> dict[str, torch.Tensor]:
    """The model after some steps, each process on half of the data, or one on all of it."""
    torch.manual_seed(0)
    torch.random.manual_seed(rank)
    model, network = make(how, several)
    optimizer = torch.optim.SGD(model.parameter_groups(lr=RATE))
    if how == "grower":
        model.slots["0"].prune()
        grower = esper.Grower(model, optimizer, validate, controller="all_at_start", horizon=10, seed=1)
    else:
        model.link(optimizer)
        grower = None
    inputs, labels = data()
    mine = slice(rank * 48, rank * 48 + 48) if several else slice(96)
    for _ in range(STEPS):
        network.train()
        optimizer.zero_grad()
        for _ in range(2 if how == "accumulated" else 1):
            loss = F.cross_entropy(network(inputs[mine]), labels[mine])
            loss.backward()
        if how == "clipped":
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        if grower is not None:
            grower.step(train_loss=1.0)
    # Where the host is wrapped itself, so are its submodules' names.
    return {
        name.replace("module.", "").replace("module/", ""): tensor.clone()
        for name, tensor in model.state_dict().items()
    }


def refuse(rank: int) -> list[str]:
    """The sentences about processes that plant different seeds."""
    sentences: list[str] = []
    for blueprints, slots in ((("mlp", "norm"), "00"), (("mlp", "mlp"), "02")):
        model = esper.attach(host(), {"0": ["mlp", "norm"], "2": ["mlp"]}, torch.zeros(2, 4))
        parallel = DistributedDataParallel(model)
        try:
            plant(model, blueprints[rank], slots[rank])
        except DistributedError as error:
            sentences.append(str(error))
        assert not model.seeds
        del parallel
    return sentences


def train_alone(rank: int) -> bool:
    """Without a wrapper nothing waits for others: the first process plants and trains by itself."""
    model = esper.attach(host(), SLOTS, torch.zeros(2, 4))
    parallel: Any = DistributedDataParallel(model)
    parallel = None
    if rank == 0:
        plant(model, "mlp")
        inputs, labels = data()
        F.cross_entropy(model(inputs), labels).backward()
    return parallel is None


def main(folder: Path, rank: int) -> None:
    """Train in every way, and leave behind what this process held at the end."""
    torch.set_num_threads(1)
    store = distributed.FileStore(str(folder / "store"), RANKS)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=60))
    left: dict[str, Any] = {how: train(how, rank, several=True) for how in WAYS}
    left |= {"refused": refuse(rank), "alone": train_alone(rank)}
    torch.save(left, folder / f"rank-{rank}.pt")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
