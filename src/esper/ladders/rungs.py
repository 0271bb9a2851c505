"""The rungs of a ladder: a folder with a plain model for each, and a JSON table of all."""

import json
import os
import shutil
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from safetensors.torch import save
from torch import Tensor, nn

from esper.config.settings import Settings
from esper.errors import CheckpointError, RunError
from esper.files import TEMPORARY_SUFFIX, parse_json, read_bounded, write_atomically
from esper.growth.finalize import SAVING_METHODS
from esper.growth.inputs import Arguments, call_host, fit_example
from esper.growth.summary import align_columns
from esper.ladders.plan import LadderPlan
from esper.numerics.modules import keep_buffers, keep_generators, keep_modes
from esper.serialization import MOST_MANIFEST_BYTES, copy_to_cpu

TABLE = "ladder.json"
"""The table, in the folder of a ladder."""
RUNG = "rung.json"
"""A rung's record, in the rung's folder."""
TENSORS = "model.safetensors"
"""A rung's state dict, in the rung's folder."""
LATENCY_SECONDS, LATENCY_PASSES = 0.5, 30
"""Of a latency measurement, whichever is reached first."""


class Rung(Settings):
    """A finished model of one size."""

    depth: Annotated[int, Field(ge=1)]
    """Number of blocks."""
    parameters: Annotated[int, Field(ge=0)]
    """Number of parameters of the model."""
    forward_flops: float
    """FLOPs of a forward pass, per example."""
    flops: float
    """FLOPs of all training up to the end of this rung, without evaluation."""
    flops_alone: float
    """Planned FLOPs of training this size separately."""
    loss: float | None
    """Result of ``evaluate``; None without it."""
    latency: float
    """Median seconds of a forward pass on the machine that trained the rung."""
    path: Annotated[Path, Field(exclude=True)]
    """The model, as written by ``save_pretrained`` or as a state dict in `TENSORS`."""


@dataclass(frozen=True, repr=False)
class Ladder:
    """The result of `esper.ladder`. Prints as a table."""

    plan: LadderPlan
    rungs: tuple[Rung, ...]
    """The finished sizes, smallest first."""
    folder: Path
    """Folder with `TABLE` and one folder per rung."""

    def __repr__(self) -> str:
        titles = ("blocks", "loss", "parameters", "FLOPs forward", "FLOPs so far", "FLOPs alone", "latency")
        rows = [
            (
                f"{rung.depth:,}",
                "" if rung.loss is None else f"{rung.loss:.4f}",
                f"{rung.parameters:,}",
                f"{rung.forward_flops:.3g}",
                f"{rung.flops:.3g}",
                f"{rung.flops_alone:.3g}",
                f"{1000 * rung.latency:.3g} ms",
            )
            for rung in self.rungs
        ]
        return f"{align_columns([titles, *rows], numbers_from=0)}\nin {self.folder}"


class _Table(Settings):
    """The JSON file of a ladder."""

    format: Literal["esper-ladder"] = "esper-ladder"
    version: Literal[1] = 1
    plan: dict[str, Any]
    rungs: tuple[dict[str, Any], ...] = ()
    spent: dict[str, float] = {}
    """FLOPs spent before some steps."""


class RungFolder:
    """The folder of a ladder, new or existing."""

    def __init__(self, path: Path, plan: LadderPlan) -> None:
        self.path, self.plan = path, plan
        self._table = _Table(plan=plan.describe())
        if (file := path / TABLE).exists():
            try:
                self._table = _Table.model_validate(parse_json(read_bounded(file, MOST_MANIFEST_BYTES)))
                self.list_rungs()
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise CheckpointError(
                    f"{file} is not the table of a ladder, or damaged: give another folder"
                ) from error
            if self._table.plan != plan.describe():
                raise CheckpointError(
                    f"{path} holds a ladder with another plan: give another folder, or the same model and arguments to "
                    "continue it, with example_input if batches differ in size"
                )

    def create(self) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"cannot make {self.path} ({error.strerror}): choose another folder") from error
        self._write(self._table)

    def list_rungs(self) -> tuple[Rung, ...]:
        rungs = sorted(self._table.rungs, key=lambda rung: rung["depth"])
        return tuple(Rung.model_validate({**rung, "path": self.find_path(rung["depth"])}) for rung in rungs)

    def find_path(self, depth: int) -> Path:
        """The folder of the rung with this number of blocks."""
        return self.path / f"depth-{depth}"

    def add_rung(self, model: nn.Module, rung: Rung) -> None:
        """Write a rung's model and add it to the table; a rung of the same depth is replaced."""
        # A folder appears complete or not at all.
        path = rung.path
        temporary = path.with_name(f".{path.name}{TEMPORARY_SUFFIX}")
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
            if self.plan.pretrained:
                save_pretrained: Callable[[Path], Any] = getattr(model, SAVING_METHODS[0])
                save_pretrained(temporary)
            else:
                tensors = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
                (temporary / TENSORS).write_bytes(save(copy_to_cpu(tensors)))
            content = {"class": type(model).__qualname__, **rung.model_dump()}
            (temporary / RUNG).write_text(json.dumps(content, indent=2) + "\n")
            for file in temporary.rglob("*"):
                _sync(file)
            shutil.rmtree(path, ignore_errors=True)
            temporary.rename(path)
            _sync(self.path)
        except OSError as error:
            raise RunError(f"cannot write {path} ({error.strerror}): free some space") from error
        others = tuple(each for each in self._table.rungs if each["depth"] != rung.depth)
        self._write(self._table.model_copy(update={"rungs": (*others, rung.model_dump())}))

    def record_spent(self, step: int, flops: float) -> None:
        """Record the FLOPs that were spent before a step."""
        self._write(self._table.model_copy(update={"spent": {**self._table.spent, str(step): flops}}))

    def find_spent(self, step: int) -> float | None:
        """The FLOPs that `record_spent` recorded for a step; None if there are none."""
        return self._table.spent.get(str(step))

    def _write(self, table: _Table) -> None:
        self._table = table
        write_atomically(self.path / TABLE, json.dumps(table.model_dump(), indent=2) + "\n")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def measure_latency(model: nn.Module, example: Arguments) -> float:
    """Median seconds of a forward pass of the example input in evaluation mode."""
    arguments = fit_example(model, example, next(model.parameters()))
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    found = list[float]()
    with torch.no_grad(), keep_modes(model), keep_buffers(model), keep_generators(model):
        model.eval()
        call_host(model, arguments)
        end = time.perf_counter() + LATENCY_SECONDS
        while len(found) < LATENCY_PASSES and (not found or time.perf_counter() < end):
            began = time.perf_counter()
            call_host(model, arguments)
            if accelerator is not None:
                torch.accelerator.synchronize()
            found.append(time.perf_counter() - began)
    return statistics.median(found)
