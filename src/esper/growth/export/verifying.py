"""Whether an exported file computes, in a fresh process without Esper, what the model did."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from esper.errors import ExportError
from esper.growth.export import reloading
from esper.growth.export.formats import Format
from esper.growth.export.inputs import Inputs

TOLERANCE = 1e-5
"""Greatest difference of a finite output, relative to the largest of them or to one, whichever is larger.

Where a model computes in numbers that are coarser, it is the relative distance of neighbouring ones.
"""
_SECONDS = 600
_INPUTS = "inputs.safetensors"
_OUTPUTS = "outputs.safetensors"


def verify(
    kind: Format,
    file: Path,
    inputs: Inputs,
    expected: Sequence[Tensor],
    folder: Path,
    tolerance: float = TOLERANCE,
) -> None:
    """Load ``file`` in a fresh process, run it on ``inputs`` and compare what it returns with ``expected``.

    Args:
        kind: Of the file.
        file: Just written.
        inputs: Of another batch size than the model was traced with, unless that is fixed.
        expected: What the model returns for them.
        folder: For temporary files.
        tolerance: As `TOLERANCE`.

    Raises:
        ExportError: the file cannot be run, or returns something else.
    """
    names = ["" for _ in inputs.positional] + [f":{name}" for name in inputs.keywords]
    tensors = {f"{index}{name}": tensor for index, (name, tensor) in enumerate(zip(names, inputs.tensors, strict=True))}
    (folder / _INPUTS).write_bytes(save({name: tensor.contiguous() for name, tensor in tensors.items()}))
    _run(kind, file, folder)
    outputs = load((folder / _OUTPUTS).read_bytes())
    _compare(kind, [outputs[str(index)] for index in range(len(outputs))], expected, tolerance)


def tolerance_of(model: nn.Module) -> float:
    """The tolerance that suits the numbers in which ``model`` computes."""
    types = {tensor.dtype for tensor in (*model.parameters(), *model.buffers()) if tensor.is_floating_point()}
    return max([TOLERANCE, *(torch.finfo(one).eps for one in types)])


def verify_weights(file: Path, model: nn.Module) -> None:
    """Read ``file``, of the format ``safetensors``, and compare it with the state of ``model``.

    Raises:
        ExportError: it holds other tensors, or other bits.
    """
    found, state = load(file.read_bytes()), model.state_dict()
    different = found.keys() ^ state.keys() or [name for name in state if not _same(found[name], state[name].cpu())]
    for name in sorted(different):
        raise ExportError(f"the safetensors file holds another {name!r} than the model: nothing is written")


def _same(one: Tensor, other: Tensor) -> bool:
    """To the bit, so that NaN equals itself."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(*(each.detach().contiguous().flatten().view(torch.uint8) for each in (one, other)))


def _run(kind: Format, file: Path, folder: Path) -> None:
    words = [sys.executable, "-P", reloading.__file__, kind, str(file), str(folder / _INPUTS), str(folder / _OUTPUTS)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        done = subprocess.run(
            words, check=False, capture_output=True, text=True, timeout=_SECONDS, env=environment, cwd=folder
        )
    except subprocess.TimeoutExpired as error:
        raise ExportError(f"the {kind} file did not run within {_SECONDS} seconds: nothing is written") from error
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise ExportError(f"the {kind} file does not run without Esper ({reason}): nothing is written")


def _compare(kind: Format, found: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float) -> None:
    if [one.shape for one in found] != [one.shape for one in expected]:
        shapes = [[tuple(one.shape) for one in each] for each in (found, expected)]
        raise ExportError(f"the {kind} file returns shapes {shapes[0]}, the model {shapes[1]}: nothing is written")
    for ours, theirs in zip(expected, found, strict=True):
        difference = _difference(ours.double(), theirs.double(), tolerance)
        if difference:
            raise ExportError(
                f"the {kind} file returns something else than the model, {difference}: nothing is written; choose "
                "another format"
            )


def _difference(ours: Tensor, theirs: Tensor, tolerance: float) -> str:
    """In what two tensors of one shape differ; nothing if they are close: infinities and NaN in the same places."""
    finite = ours.isfinite()
    if not torch.equal(finite, theirs.isfinite()) or not ours[~finite].allclose(theirs[~finite], equal_nan=True):
        return "infinite or NaN in other places"
    if not finite.any():
        return ""
    scale = max(1.0, float(ours[finite].abs().max()))
    off = float((ours - theirs)[finite].abs().max()) / scale
    return "" if off <= tolerance else f"off by {off:.2g} where {tolerance:.0e} is allowed"
