"""A GPT-2 whose parameters two processes share by FSDP2, and that grows deeper; it comes back whole in one process.

torchrun --nproc-per-node 2 examples/deeper_gpt_sharded.py
"""

import tempfile
from pathlib import Path

import torch
from counting import network, score, sequences
from torch import distributed, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import esper

EPOCHS, BATCH, GROWS = 12, 16, 4
"""Epochs, examples of a minibatch in each process, and the epoch at which blocks are planted."""
SLOTS = {r"re:transformer\.h\.\d+": ["block_zero"]}
train, test = sequences(512, seed=0), sequences(256, seed=2)


def grow(model: esper.GrowingModel) -> None:
    """A block behind each; all processes give it the same values."""
    for place, slot in enumerate(model.slots.values()):
        slot.germinate("block_zero", torch.Generator().manual_seed(place), alpha=1.0)
        slot.fossilize()


def fitted(model: esper.GrowingModel, *, grows: bool) -> esper.GrowingModel:
    """The model, sharded and trained for `EPOCHS`."""
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    model.shard_growth(mesh=mesh)  # before the host itself
    for block in model.host.transformer.h:
        fully_shard(block, mesh=mesh)
    fully_shard(model.host, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameter_groups(lr=3e-3))
    model.link(optimizer)
    mine = train[distributed.get_rank() :: distributed.get_world_size()]
    for epoch in range(EPOCHS):
        if grows and epoch == GROWS:
            grow(model)
        model.train()
        for batch in mine.split(BATCH):
            loss = model(input_ids=batch, labels=batch).loss
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    return model


def attached() -> esper.GrowingModel:
    """A fresh one."""
    return esper.attach(network(), SLOTS, example_input=train[:2])


def main(folder: Path) -> None:
    """Train in all processes, and use in the first what they saved together."""
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    folders = [str(folder)]
    distributed.broadcast_object_list(folders)
    for name in ("bare", "grown"):
        model = fitted(attached(), grows=name == "grown")
        checkpoint.save(get_model_state_dict(model), checkpoint_id=f"{folders[0]}/{name}")
    distributed.destroy_process_group()
    if rank == 0:
        use(folder)


def use(folder: Path) -> None:
    """In one process: whole models again, of which the grown one becomes an ordinary deeper GPT-2."""
    plain = {}
    for name in ("bare", "grown"):
        model = attached()
        if name == "grown":
            grow(model)
            print(model.summary())
        values = get_model_state_dict(model)
        checkpoint.load(values, checkpoint_id=folder / name)
        set_model_state_dict(model, values)
        plain[name] = model.finalize().eval()
    print(f"{plain['grown'].config.n_layer} blocks")
    scores = {name: score(one, test)[1] for name, one in plain.items()}
    print(f"accuracy without growth {scores['bare']:.3f}, with growth {scores['grown']:.3f}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(temporary))
