"""A GPT-2 whose parameters two processes share by FSDP2, and that grows deeper; it comes back whole in one process.

torchrun --nproc-per-node 2 examples/deeper_gpt_sharded.py
"""

import tempfile
from pathlib import Path

import torch
from counting import VOCABULARY, network, score, sequences
from torch import distributed, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import esper

EPOCHS, BATCH = 12, 16
"""Decisions of the grower, and examples of a minibatch in each process."""
CONTROLLERS = {"bare": "none", "grown": "all_at_start"}
SLOTS = {r"re:transformer\.h\.\d+": ["block_zero"]}
train, validation, test = sequences(512, seed=0), sequences(256, seed=1), sequences(256, seed=2)


def fitted(model: esper.GrowingModel, *, controller: str) -> esper.GrowingModel:
    """The model, sharded and trained for `EPOCHS`, in which what the controller wants has grown."""
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    model.shard_growth(mesh=mesh)  # before the host itself
    for block in model.host.transformer.h:
        fully_shard(block, mesh=mesh)
    fully_shard(model.host, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameter_groups(lr=3e-3))
    grower = esper.Grower(
        model,
        optimizer,
        controller=controller,
        evaluate=lambda model: score(model, validation),  # in all processes, which share the model
        classes=VOCABULARY,
        horizon=EPOCHS,
        verbose=True,
    )
    mine = train[distributed.get_rank() :: distributed.get_world_size()]
    for _ in range(EPOCHS):
        model.train()
        for batch in mine.split(BATCH):
            loss = model(input_ids=batch, labels=batch).loss
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        grower.step(train_loss=loss)
    grower.finish()
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
    for name, controller in CONTROLLERS.items():
        model = fitted(attached(), controller=controller)
        values = {"model": get_model_state_dict(model), "grown": list(model.seeds)}
        checkpoint.save(values, checkpoint_id=f"{folders[0]}/{name}")
    distributed.destroy_process_group()
    if rank == 0:
        use(folder)


def use(folder: Path) -> None:
    """In one process: whole models again, of which the grown one becomes an ordinary deeper GPT-2."""
    plain = {}
    for name in CONTROLLERS:
        model, grown = attached(), {"grown": list[str]()}
        checkpoint.load(grown, checkpoint_id=folder / name)
        for slot in grown["grown"]:
            model.slots[slot].germinate("block_zero", alpha=1.0)
            model.slots[slot].fossilize()
        values = get_model_state_dict(model)
        checkpoint.load({"model": values}, checkpoint_id=folder / name)
        set_model_state_dict(model, values)
        print(model.summary())
        plain[name] = model.finalize().eval()
    print(f"{plain['grown'].config.n_layer} blocks")
    scores = {name: score(one, test)[1] for name, one in plain.items()}
    print(f"accuracy without growth {scores['bare']:.3f}, with growth {scores['grown']:.3f}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(temporary))
