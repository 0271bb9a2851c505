"""Export a plain model."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path

import torch
from torch import nn

from esper.arguments import check_arguments, file_path, instance, one_of, truth
from esper.errors import ConfigError, ExportError, RunError
from esper.files import move_durably
from esper.growth.arguments import INPUTS
from esper.growth.export.formats import WRITERS, Format, ProgramWriter, WeightsWriter
from esper.growth.export.inputs import Inputs
from esper.growth.export.outputs import return_plain
from esper.growth.export.program import traced
from esper.growth.export.reloading import tensors_in
from esper.growth.export.verifying import tolerance_of, verify, verify_weights
from esper.growth.probe import Arguments
from esper.growth.seating import slotted
from esper.growth.slot import Slot

_TRACED_BATCH = 3
_VERIFIED_BATCH = 5


@check_arguments(
    ExportError,
    model=instance(nn.Module, advice="give an nn.Module, such as finalize() returns"),
    example_input=INPUTS,
    format=one_of(Format),
    path=file_path("give the path of a file"),
    fixed_batch=truth(),
)
def export(
    model: nn.Module,
    example_input: Arguments,
    format: Format | str,  # noqa: A002
    path: Path | str,
    *,
    fixed_batch: bool = False,
) -> None:
    """Write ``model``, as it computes in eval mode, to ``path``, for batches of any size.

    Before anything appears there, a fresh process that cannot import Esper loads the file and runs it on random inputs
    of another batch size than the one it was traced with; its outputs must equal the model's to 1e-5, or to the
    precision of its numbers where that is coarser. Weights alone (``safetensors``) need no model that can be traced:
    what is read back must be the model's tensors, bit for bit.

    The file returns tensors in tuples, lists and dictionaries of Python's own, also where the model returns an object
    such as Hugging Face's `ModelOutput`; what holds no tensor, such as the cache of a language model, is left out.

    Args:
        model: From `GrowingModel.finalize`, or any other module.
        example_input: What the model takes; tensors only, batch first.
        format: ``pt2``, ``onnx``, ``safetensors`` or ``python``; see `Format`. The last two write a second file beside.
        path: Of the file; its name ends as the format demands. What was exported there before is replaced.
        fixed_batch: Whether the file need only work for batches as large as the example input. For models that cannot
            be traced otherwise.

    Raises:
        ConfigError: ``fixed_batch`` is given for weights alone.
        ExportError: the model still grows, or cannot be traced or written in this format, or the file does not compute
            the same; or the second file's place is taken by one of another origin.
        RunError: the file cannot be written, for instance because its folder is missing.
    """
    if slotted(model) is not None or any(isinstance(part, Slot) for part in model.modules()):
        raise ExportError("a growing model cannot be exported, since its slots may change: export its finalize()")
    kind, path = Format(format), Path(path)
    writer = WRITERS[kind]
    _check_place(kind, writer, path)
    if isinstance(writer, ProgramWriter):
        writer.check(model, Inputs.of(example_input))
    elif fixed_batch:
        raise ConfigError(
            f"the {kind} format holds weights alone, which fit batches of any size: leave out fixed_batch"
        )
    plain = copy.deepcopy(model).cpu().eval()
    try:
        with tempfile.TemporaryDirectory(prefix=".esper-export-", dir=path.parent.absolute()) as name:
            written = Path(name) / path.name
            if isinstance(writer, WeightsWriter):
                writer.write(plain, written)
                verify_weights(written, model)
            else:
                _write_program(plain, Inputs.of(example_input), kind, writer, written, fixed_batch=fixed_batch)
            if writer.companion is not None:
                move_durably(written.with_suffix(writer.companion), path.with_suffix(writer.companion))
            move_durably(written, path)
    except OSError as error:
        raise RunError(f"cannot write {path} ({error.strerror or error}): choose a writable folder") from error


def _check_place(kind: Format, writer: ProgramWriter | WeightsWriter, path: Path) -> None:
    """Whether the files of a format can be written, as far as that can be said before any work."""
    if not path.name.endswith(writer.suffix) or path.name == writer.suffix:
        raise ExportError(f"the {kind} format needs a file name that ends in {writer.suffix}, not {path.name!r}")
    if not path.parent.is_dir():
        raise RunError(f"cannot write {path} (there is no folder {path.parent}): make it, or choose another one")
    for other, theirs in WRITERS.items():
        if theirs.companion is not None and path.name.endswith(theirs.companion):
            raise ExportError(
                f"a name that ends in {theirs.companion} is that of a {other} export's second file: choose another"
            )
    beside = None if writer.companion is None else path.with_suffix(writer.companion)
    if beside is not None and beside.exists() and not path.exists():
        raise ExportError(
            f"{beside} is there already without {path.name}, whose second file it would be: choose another name"
        )


def _write_program(
    plain: nn.Module, inputs: Inputs, kind: Format, writer: ProgramWriter, written: Path, *, fixed_batch: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    return_plain(plain)
    program = traced(plain, inputs if fixed_batch else inputs.drawn(_TRACED_BATCH, generator), fixed_batch=fixed_batch)
    fresh = inputs.drawn(inputs.batch if fixed_batch else _VERIFIED_BATCH, generator)
    with torch.no_grad():
        expected = tensors_in(plain(*fresh.positional, **fresh.keywords))
    writer.write(plain, program, written)
    work = written.parent / "work"
    work.mkdir()
    verify(kind, written, fresh, expected, work, tolerance_of(plain))
