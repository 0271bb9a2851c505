"""Whether an exported file computes, in a fresh process without Esper, what the model did."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load, save
from torch import Tensor
from torch.export import ExportedProgram

from esper.errors import ExportError
from esper.growth.export import reloading
from esper.growth.export.formats import Format
from esper.growth.export.inputs import Inputs
from esper.growth.export.reloading import STRUCTURE_SUFFIX

TOLERANCE = 1e-5
"""Greatest difference of an output, relative to the largest output or to one, whichever is larger."""
_SECONDS = 600
_INPUTS = "inputs.safetensors"
_OUTPUTS = "outputs.safetensors"


def verify(
    kind: Format, file: Path, program: ExportedProgram, inputs: Inputs, expected: Sequence[Tensor], folder: Path
) -> None:
    """Load ``file`` in a fresh process, run it on ``inputs`` and compare what it returns with ``expected``.

    The format ``safetensors`` holds no structure, so the process gets that of ``program``, whose weights are
    overwritten by zeros: all that it knows of them comes from the file.

    Args:
        kind: Of the file.
        file: Just written.
        program: What the file was made of; of no use afterwards.
        inputs: Of another batch size than the program was traced with.
        expected: What the model returns for them.
        folder: For temporary files.

    Raises:
        ExportError: the file cannot be run, or returns something else.
    """
    names = ["" for _ in inputs.positional] + [f":{name}" for name in inputs.keywords]
    tensors = {f"{index}{name}": tensor for index, (name, tensor) in enumerate(zip(names, inputs.tensors, strict=True))}
    (folder / _INPUTS).write_bytes(save({name: tensor.contiguous() for name, tensor in tensors.items()}))
    if kind is Format.SAFETENSORS:
        with torch.no_grad():
            for tensor in program.state_dict.values():
                tensor.zero_()
        with (folder / _INPUTS).with_suffix(STRUCTURE_SUFFIX).open("wb") as opened:
            torch.export.save(program, opened)
    _run(kind, file, folder)
    outputs = load((folder / _OUTPUTS).read_bytes())
    _compare(kind, [outputs[str(index)] for index in range(len(outputs))], expected)


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


def _compare(kind: Format, found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    if [one.shape for one in found] != [one.shape for one in expected]:
        shapes = [[tuple(one.shape) for one in each] for each in (found, expected)]
        raise ExportError(f"the {kind} file returns shapes {shapes[0]}, the model {shapes[1]}: nothing is written")
    for ours, theirs in zip(expected, found, strict=True):
        if not ours.numel():
            continue
        scale = max(1.0, float(ours.abs().max()))
        off = float((ours.double() - theirs.double()).abs().max()) / scale
        if not off <= TOLERANCE:  # NaN, too
            raise ExportError(
                f"the {kind} file returns something else than the model, off by {off:.2g} where {TOLERANCE:.0e} is "
                "allowed: nothing is written; choose another format"
            )
