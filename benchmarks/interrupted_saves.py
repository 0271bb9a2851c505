"""Is a training that was killed at any moment of a save resumed as if nothing had happened?

`python benchmarks/interrupted_saves.py LOOP FOLDER` runs one of `LOOPS` on a tiny problem, saves at every step, and
writes the result to FOLDER/result.safetensors. Called again, it resumes from what is in FOLDER. Another package,
`pip install ckpt-chaos==0.1.8`, kills a copy of the command at every file that it writes, moves or removes, and once
more with that file cut in half. It calls the command again, compares the result with that of an uninterrupted run, byte
for byte, and prints a table:

    ckpt-chaos run --max-points 1000 --step-regex "resum\\w+ (?:after|from) \\w+ (\\d+)" \\
        --result-file "{out}/result.safetensors" -- python benchmarks/interrupted_saves.py LOOP {out}
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import tyro
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import esper
from esper.cli import main as esper_command
from esper.files import write_atomically
from esper.runs.reader import RunReader
from esper.runs.run_directory import RunDirectory
from esper.serialization import Checkpoints
from esper.train.workers import prepare_process

DECISIONS = 2
TRAIN = (
    *("suite=tokens", "iterations=2", "environments=2", "shards=1", "probe_instances=2", "probe_every=2"),
    *("checkpoint_every=1", "ppo.group=2", "ppo.minibatches=1", "ppo.epochs=1"),
    *("policy.hidden=8", "policy.width=8", "policy.advice=null"),
)
_generator = torch.Generator().manual_seed(0)
INPUTS = torch.randn(96, 6, generator=_generator)
LABELS = (INPUTS[:, 0] * INPUTS[:, 1] > 0).long()
BATCHES = DataLoader(TensorDataset(INPUTS[:64], LABELS[:64]), batch_size=32)
Tensors = dict[str, Tensor]


def make_host() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))


def validate(model: nn.Module) -> float:
    return float(F.cross_entropy(model(INPUTS[64:]), LABELS[64:]))


GROWTH: dict[str, Any] = {"controller": "all_at_start", "horizon": DECISIONS + 1}
SLOTS = {"0": ["mlp"]}


def train_one_epoch(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    losses: list[float] = []
    for inputs, labels in BATCHES:
        loss = F.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses) / len(losses)


# The loops: each trains in a folder, goes on with what is there, and returns all that was learned.


def grow_in_own_loop(folder: Path) -> Tensors:
    """As in docs/grow-your-model.md: all parts of a checkpoint are written into a new folder, which is then renamed."""
    names = (re.fullmatch(r"decision-(\d+)", path.name) for path in folder.iterdir())
    newest = max((int(name[1]) for name in names if name is not None), default=None)
    if newest is None:
        model = esper.attach(make_host(), SLOTS, example_input=INPUTS[:2])
    else:
        model = esper.load(folder / f"decision-{newest}", make_host(), INPUTS[:2])
    optimizer = torch.optim.AdamW(model.parameter_groups(lr=1e-2))
    grower = esper.Grower(model, optimizer, evaluate=validate, **GROWTH)
    if newest is not None:
        state = torch.load(folder / f"decision-{newest}" / "training.pt", weights_only=True)
        optimizer.load_state_dict(state["optimizer"])
        grower.load_state_dict(state["grower"])
        write(f"resumed from decision {newest}")
    while grower.decisions < DECISIONS:
        grower.step(train_loss=train_one_epoch(model, optimizer))
        partial = folder / "partial"
        esper.save(model, partial)
        torch.save({"optimizer": optimizer.state_dict(), "grower": grower.state_dict()}, partial / "training.pt")
        os.rename(partial, folder / f"decision-{grower.decisions}")
    grower.finish()
    return model.finalize().state_dict()


def grow_in_lightning(folder: Path) -> Tensors:
    # Imported where it is needed: each of some hundred processes would wait for the libraries of all loops.
    from lightning.pytorch import LightningModule, Trainer  # noqa: PLC0415
    from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: PLC0415

    from esper.integrations.lightning import LightningGrower  # noqa: PLC0415

    class Classifier(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = esper.attach(make_host(), SLOTS, example_input=INPUTS[:2])

        def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
            return F.cross_entropy(self.model(batch[0]), batch[1])

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            write(f"resumed from step {checkpoint['global_step']}")

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.model.parameter_groups(lr=1e-2))

    classifier = Classifier()
    trainer = Trainer(
        max_epochs=DECISIONS,
        callbacks=[LightningGrower(validate, **GROWTH), ModelCheckpoint(folder, save_top_k=-1, save_last=True)],
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(classifier, BATCHES, ckpt_path="last")
    return classifier.model.finalize().state_dict()


class WithLoss(nn.Module):
    """What Hugging Face's Trainer trains."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_host()

    def forward(self, inputs: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.net(inputs)
        return {"logits": logits} if labels is None else {"loss": F.cross_entropy(logits, labels), "logits": logits}


def find_complete_checkpoint(folder: Path) -> str | None:
    """The newest checkpoint of a Trainer with its last file, whole; `get_last_checkpoint` takes one that was cut."""
    for path in sorted(folder.glob("checkpoint-*"), key=lambda path: -int(path.name.partition("-")[2])):
        try:
            json.loads((path / "trainer_state.json").read_text())
        except (OSError, ValueError):
            continue
        return str(path)
    return None


def grow_in_transformers(folder: Path) -> Tensors:
    from transformers import Trainer, TrainingArguments  # noqa: PLC0415

    from esper.integrations.transformers import TransformersGrower  # noqa: PLC0415

    model = esper.attach(WithLoss(), {"net.0": ["mlp"]}, example_input={"inputs": INPUTS[:2]})
    trainer = Trainer(
        model,
        TrainingArguments(
            str(folder),
            num_train_epochs=DECISIONS,
            per_device_train_batch_size=32,
            save_strategy="epoch",
            save_only_model=False,
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        ),
        train_dataset=[{"inputs": one, "labels": label} for one, label in zip(INPUTS[:64], LABELS[:64], strict=True)],
        optimizers=(torch.optim.AdamW(model.parameter_groups(lr=1e-2)), None),
    )
    trainer.add_callback(TransformersGrower(trainer, lambda model: validate(model.host.net), **GROWTH))
    checkpoint = find_complete_checkpoint(folder)
    if checkpoint is not None:
        write(f"resumed from step {checkpoint.rpartition('-')[2]}")
    trainer.train(resume_from_checkpoint=checkpoint)
    return model.finalize().state_dict()


def climb_ladder(folder: Path) -> Tensors:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Sequential(Block()), nn.Linear(8, 2))

    def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: list[Tensor]) -> None:
        loss = F.cross_entropy(model(batch[0]), batch[1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    esper.ladder(model, train_step, depths=[1, 2], steps=10, data=BATCHES, folder=folder / "sizes")
    return model.state_dict()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.linear(x))


def train_controller(folder: Path) -> Tensors:
    """`esper train`; a run without its settings was never begun."""
    run = RunDirectory(folder / "run")
    if run.config.exists():
        words = ["--resume", str(run.path)]
    else:
        words = ["--run-dir", str(run.path), *(word for setting in TRAIN for word in ("--set", setting))]
    status = esper_command(["train", *words])
    if status:
        sys.exit(status)
    with RunReader.open(run.store) as reader:
        figures = {name: reader.series(name) for name in reader.scalar_names() if name != "seconds"}
    scalars = {name: torch.tensor(series, dtype=torch.float64) for name, series in figures.items()}
    return {**Checkpoints(run.checkpoints).latest().tensors, **scalars}


LOOPS: dict[str, Callable[[Path], Tensors]] = {
    "grower": grow_in_own_loop,
    "lightning": grow_in_lightning,
    "transformers": grow_in_transformers,
    "ladder": climb_ladder,
    "train": train_controller,
}


def write(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main(loop: tyro.conf.Positional[str], folder: tyro.conf.Positional[Path], /) -> None:
    """Train in FOLDER, or go on with what is there.

    Args:
        loop: One of grower, lightning, transformers, ladder and train.
        folder: Is made if need be.
    """
    prepare_process()
    folder.mkdir(parents=True, exist_ok=True)
    tensors = LOOPS[loop](folder)
    write_atomically(folder / "result.safetensors", save({name: one.contiguous() for name, one in tensors.items()}))


if __name__ == "__main__":
    tyro.cli(main)
