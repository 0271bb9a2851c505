"""Export a plain model."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path

import torch
from torch import nn

from esper.errors import ExportError, RunError
from esper.files import move_durably
from esper.growth.export.formats import WRITERS, Format, ProgramWriter, WeightsWriter
from esper.growth.export.inputs import Inputs
from esper.growth.export.program import traced
from esper.growth.export.reloading import tensors_in
from esper.growth.export.verifying import verify, verify_weights
from esper.growth.probe import Arguments

_TRACED_BATCH = 3
_VERIFIED_BATCH = 5


def export(model: nn.Module, example_input: Arguments, format: Format | str, path: Path | str) -> None:  # noqa: A002
    """Write ``model``, as it computes in eval mode, to ``path``, for batches of any size.

    Before anything appears there, a fresh process that cannot import Esper loads the file and runs it on random inputs
    of another batch size than the one it was traced with; its outputs must equal the model's to 1e-5. Weights alone
    (``safetensors``) need no model that can be traced: what is read back must be the model's tensors, bit for bit.

    Args:
        model: From `GrowingModel.finalize`, or any other module.
        example_input: What the model takes; tensors only, batch first.
        format: ``pt2``, ``onnx``, ``safetensors`` or ``python``; see `Format`. The last two write a second file beside.
        path: Of the file. Existing files are replaced.

    Raises:
        ExportError: the model cannot be traced or written in this format, or the file does not compute the same.
        RunError: the file cannot be written, for instance because its folder is missing.
    """
    kind, path = _format(format), Path(path)
    writer = WRITERS[kind]
    if writer.suffix is not None and path.suffix != writer.suffix:
        raise ExportError(f"the {kind} format needs a file name that ends in {writer.suffix}, not {path.name!r}")
    if not path.parent.is_dir():
        raise RunError(f"cannot write {path} (there is no folder {path.parent}): make it, or choose another one")
    plain = copy.deepcopy(model).cpu().eval()
    try:
        with tempfile.TemporaryDirectory(prefix=".esper-export-", dir=path.parent.absolute()) as name:
            written = Path(name) / path.name
            if isinstance(writer, WeightsWriter):
                writer.write(plain, written)
                verify_weights(written, model)
            else:
                _write_program(plain, Inputs.of(example_input), kind, writer, written)
            if writer.companion is not None:
                move_durably(written.with_suffix(writer.companion), path.with_suffix(writer.companion))
            move_durably(written, path)
    except OSError as error:
        raise RunError(f"cannot write {path} ({error.strerror or error}): choose a writable folder") from error


def _write_program(plain: nn.Module, inputs: Inputs, kind: Format, writer: ProgramWriter, written: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    program = traced(plain, inputs.drawn(_TRACED_BATCH, generator))
    fresh = inputs.drawn(_VERIFIED_BATCH, generator)
    with torch.no_grad():
        expected = tensors_in(plain(*fresh.positional, **fresh.keywords))
    writer.write(plain, program, written)
    work = written.parent / "work"
    work.mkdir()
    verify(kind, written, fresh, expected, work)


def _format(given: str) -> Format:
    try:
        return Format(given)
    except ValueError as error:
        raise ExportError(f"unknown format {given!r}: choose from {', '.join(Format)}") from error
