"""The formats: how each is written, and which files make it up."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import cast

import torch
from safetensors.torch import save as encode
from torch import Tensor, nn
from torch.export import ExportedProgram

from esper.errors import ExportError
from esper.extras import require
from esper.growth.export.inputs import Inputs
from esper.growth.export.source import WEIGHTS_SUFFIX, source_of, weights_of

STRUCTURE_SUFFIX = ".structure.json"
"""Of the file that says which classes weights alone belong to; `esper.save` writes a model.json."""
_ONNX_PACKAGES = ("onnx", "onnxruntime", "onnxscript")
_NOT_FOR_ONNX = (torch.float64, torch.bfloat16)
"""Floating-point numbers that onnxruntime does not compute with throughout; it convolves no float64, for one."""


class Format(StrEnum):
    """What a model can be exported as."""

    PT2 = "pt2"
    """For `torch.export.load`: the graph with its weights."""
    ONNX = "onnx"
    """One ONNX file with the weights inside; needs the extra ``onnx``."""
    SAFETENSORS = "safetensors"
    """The state dict alone, for a module of the same structure, and its classes in a file NAME.structure.json."""
    PYTHON = "python"
    """A Python file with the network as plain torch code, and its weights in a file NAME.weights.safetensors."""


@dataclass(frozen=True)
class ProgramWriter:
    """How to write a format that holds what the model computes."""

    write: Callable[[nn.Module, ExportedProgram, Path], None]
    """Writes the file at the path, and its companion beside it."""
    suffix: str
    """That the file's own name must have, so that no two formats write one file."""
    companion: str | None = None
    """Suffix of a second file that belongs to it; no other format writes one of that name."""
    check: Callable[[nn.Module, Inputs], None] = lambda _model, _inputs: None
    """Raises ExportError, before any work, for a model and inputs that it cannot express."""


@dataclass(frozen=True)
class WeightsWriter:
    """How to write a format that holds the model's tensors alone."""

    write: Callable[[nn.Module, Path], None]
    """As that of `ProgramWriter`."""
    suffix: str
    companion: str | None = None


def _write_pt2(_: nn.Module, program: ExportedProgram, path: Path) -> None:
    # A file object: given a path, torch wants a certain suffix.
    with path.open("wb") as file:
        torch.export.save(program, file)


def _check_onnx(model: nn.Module, inputs: Inputs) -> None:
    require("onnx", "export to ONNX", *_ONNX_PACKAGES, error=ExportError)
    for tensor in (*model.parameters(), *inputs.tensors):
        if tensor.dtype in _NOT_FOR_ONNX:
            raise ExportError(
                f"the model computes in {tensor.dtype}, which onnxruntime does not everywhere: export model.float() "
                "with an example input of torch.float32, or choose another format"
            )


def _write_onnx(_: nn.Module, program: ExportedProgram, path: Path) -> None:
    try:
        with _quiet():
            torch.onnx.export(program, f=path, dynamo=True, external_data=False, verbose=False)
    except (torch.onnx.OnnxExporterError, RuntimeError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ExportError(f"torch.onnx cannot express this model ({reason}): choose another format") from error


@contextmanager
def _quiet() -> Generator[None]:
    """Without torch's notes to itself, such as which operators of torchvision it has not found."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _write_safetensors(model: nn.Module, path: Path) -> None:
    state: Mapping[str, object] = model.state_dict()
    strange = [name for name, value in state.items() if not isinstance(value, Tensor)]
    if strange:
        raise ExportError(f"the model's state has {strange[0]!r}, which is no tensor: choose another format")
    path.write_bytes(encode(_apart(model.state_dict())))
    modules = cast("Iterator[tuple[str, nn.Module]]", model.named_modules())
    classes = {name: f"{type(part).__module__}.{type(part).__qualname__}" for name, part in modules}
    path.with_suffix(STRUCTURE_SUFFIX).write_text(json.dumps({"classes": classes}, indent=2) + "\n")


def _write_python(model: nn.Module, program: ExportedProgram, path: Path) -> None:
    path.write_text(source_of(program, type(model).__name__), encoding="utf-8")
    path.with_suffix(WEIGHTS_SUFFIX).write_bytes(encode(_apart(weights_of(program))))


WRITERS: Mapping[Format, ProgramWriter | WeightsWriter] = {
    Format.PT2: ProgramWriter(_write_pt2, ".pt2"),
    Format.ONNX: ProgramWriter(_write_onnx, ".onnx", check=_check_onnx),
    Format.SAFETENSORS: WeightsWriter(_write_safetensors, ".safetensors", companion=STRUCTURE_SUFFIX),
    Format.PYTHON: ProgramWriter(_write_python, ".py", companion=WEIGHTS_SUFFIX),
}


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous copies, which share no memory as tied weights do: safetensors wants that."""
    return {name: tensor.detach().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
