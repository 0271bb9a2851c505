"""Export a plain model."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from esper.config.arguments import check_arguments, file_path, instance, one_of, truth
from esper.errors import ConfigError, ExportError, RunError
from esper.files import move_durably
from esper.growth.export import reloading
from esper.growth.export.formats import WRITERS, Format, check_onnx
from esper.growth.export.reloading import collect_tensors
from esper.growth.export.tracing import Inputs, return_plain, trace_model
from esper.growth.hooks import find_attached
from esper.growth.probe import INPUTS, Arguments
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
    if find_attached(model) is not None or any(isinstance(part, Slot) for part in model.modules()):
        raise ExportError("a growing model cannot be exported, since its slots may change: export its finalize()")
    kind, path = Format(format), Path(path)
    _check_place(kind, path)
    inputs = None if kind is Format.SAFETENSORS else Inputs.of(example_input)
    if inputs is None and fixed_batch:
        raise ConfigError(
            f"the {kind} format holds weights alone, which fit batches of any size: leave out fixed_batch"
        )
    if inputs is not None and kind is Format.ONNX:
        check_onnx(model, inputs)
    plain = copy.deepcopy(model).cpu().eval()
    try:
        with tempfile.TemporaryDirectory(prefix=".esper-export-", dir=path.parent.absolute()) as name:
            written = Path(name) / path.name
            if inputs is None:
                WRITERS[kind](plain, None, written)
                verify_weights(written, model)
            else:
                _write_program(plain, inputs, kind, written, fixed_batch=fixed_batch)
            if kind.companion is not None:
                move_durably(written.with_suffix(kind.companion), path.with_suffix(kind.companion))
            move_durably(written, path)
    except OSError as error:
        raise RunError(f"cannot write {path} ({error.strerror or error}): choose a writable folder") from error


def _check_place(kind: Format, path: Path) -> None:
    """Whether the files of a format can be written, as far as that can be said before any work."""
    if not path.name.endswith(kind.suffix) or path.name == kind.suffix:
        raise ExportError(f"the {kind} format needs a file name that ends in {kind.suffix}, not {path.name!r}")
    if not path.parent.is_dir():
        raise RunError(f"cannot write {path} (there is no folder {path.parent}): make it, or choose another one")
    for other in Format:
        if other.companion is not None and path.name.endswith(other.companion):
            raise ExportError(
                f"a name that ends in {other.companion} is that of a {other} export's second file: choose another"
            )
    beside = None if kind.companion is None else path.with_suffix(kind.companion)
    if beside is not None and beside.exists() and not path.exists():
        raise ExportError(
            f"{beside} is there already without {path.name}, whose second file it would be: choose another name"
        )


def _write_program(plain: nn.Module, inputs: Inputs, kind: Format, written: Path, *, fixed_batch: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    return_plain(plain)
    program = trace_model(
        plain, inputs if fixed_batch else inputs.draw(_TRACED_BATCH, generator), fixed_batch=fixed_batch
    )
    fresh = inputs.draw(inputs.batch if fixed_batch else _VERIFIED_BATCH, generator)
    with torch.no_grad():
        expected = collect_tensors(plain(*fresh.positional, **fresh.keywords))
    WRITERS[kind](plain, program, written)
    work = written.parent / "work"
    work.mkdir()
    verify(kind, written, fresh, expected, work, choose_tolerance(plain))


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


def choose_tolerance(model: nn.Module) -> float:
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
