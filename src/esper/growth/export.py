"""Export a plain model to a file that needs no Esper, checked by running it in a process that has none."""

from __future__ import annotations

import copy
import json
import logging
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, cast

import torch
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.export import ExportedProgram

from esper.config.arguments import FilePath, check_arguments
from esper.errors import ConfigError, ExportError, RunError
from esper.extras import require_extra
from esper.files import move_durably
from esper.growth import reloading
from esper.growth.hooks import find_attached
from esper.growth.probe import Arguments
from esper.growth.reloading import collect_tensors
from esper.growth.slot import Slot
from esper.growth.tracing import Inputs, make_plain, trace_model

TOLERANCE = 1e-5
"""Greatest difference of a finite output, relative to the largest of them or to one; more in coarser numbers."""
_TRACED_BATCH = 3
_VERIFIED_BATCH = 5
_VERIFY_SECONDS = 600
_ONNX_PACKAGES = ("onnx", "onnxruntime", "onnxscript")
_NOT_FOR_ONNX = (torch.float64, torch.bfloat16)
"""Floating-point numbers that onnxruntime does not compute with throughout; it convolves no float64, for one."""
_ONNX_EXPORTER_ERRORS = (torch.onnx.OnnxExporterError, RuntimeError, ValueError)


class Format(StrEnum):
    """What a model can be exported as."""

    PT2 = "pt2"
    """For `torch.export.load`: the graph with its weights."""
    ONNX = "onnx"
    """One ONNX file with the weights inside; needs the extra ``onnx``."""
    SAFETENSORS = "safetensors"
    """The state dict alone, with the classes of all modules in the file's metadata. No Esper is needed to load it.

    It fits the module that `GrowingModel.finalize` returned, wherever that comes from, `torch.load` for one:
    ``module.load_state_dict(safetensors.torch.load_file(path))``.
    """

    @property
    def suffix(self) -> str:
        """The suffix that the file's name must have."""
        return f".{self}"


@check_arguments(ExportError, model="give an nn.Module, such as finalize() returns", path="give the path of a file")
def export(
    model: nn.Module,
    example_input: Arguments,
    format: Literal["pt2", "onnx", "safetensors"] | Format,  # noqa: A002
    path: FilePath,
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
        format: ``pt2``, ``onnx`` or ``safetensors``; `esper.growth.export.Format` says how each is loaded.
        path: Of the file; its name ends in the format's name. What was there before is replaced.
        fixed_batch: Whether the file need only work for batches as large as the example input. For models that cannot
            be traced otherwise.

    Raises:
        ConfigError: ``fixed_batch`` is given for weights alone.
        ExportError: the model still grows, or cannot be traced or written in this format, or the file does not compute
            the same.
        RunError: the file cannot be written, for instance because its folder is missing.
    """
    # Refuse what can be refused before any work.
    if find_attached(model) is not None or any(isinstance(part, Slot) for part in model.modules()):
        raise ExportError("a growing model cannot be exported, since its slots may change: export its finalize()")
    kind, path = Format(format), Path(path)
    if not path.name.endswith(kind.suffix) or path.name == kind.suffix:
        raise ExportError(f"the {kind} format needs a file name that ends in {kind.suffix}, not {path.name!r}")
    if not path.parent.is_dir():
        raise RunError(f"cannot write {path} (there is no folder {path.parent}): make it, or choose another one")
    if kind is Format.SAFETENSORS and fixed_batch:
        raise ConfigError(
            f"the {kind} format holds weights alone, which fit batches of any size: leave out fixed_batch"
        )
    inputs = None if kind is Format.SAFETENSORS else Inputs.of(example_input)
    if inputs is not None and kind is Format.ONNX:
        check_onnx(model, inputs)
    # Write and verify in a temporary folder, then move the file to its place.
    plain = copy.deepcopy(model).cpu().eval()
    try:
        with tempfile.TemporaryDirectory(prefix=".esper-export-", dir=path.parent.absolute()) as folder:
            file = Path(folder) / path.name
            if inputs is None:
                write_weights(plain, file)
                verify_weights(file, model)
            else:
                generator = torch.Generator().manual_seed(0)
                plain.register_forward_hook(lambda _module, _arguments, returned: make_plain(returned))
                example = inputs if fixed_batch else inputs.draw(_TRACED_BATCH, generator)
                program = trace_model(plain, example, fixed_batch=fixed_batch)
                fresh = inputs.draw(inputs.batch if fixed_batch else _VERIFIED_BATCH, generator)
                with torch.no_grad():
                    expected = collect_tensors(plain(*fresh.positional, **fresh.keywords))
                PROGRAM_WRITERS[kind](program, file)
                types = {one.dtype for one in (*plain.parameters(), *plain.buffers()) if one.is_floating_point()}
                verify(kind, file, fresh, expected, max([TOLERANCE, *(torch.finfo(one).eps for one in types)]))
            move_durably(file, path)
    except OSError as error:
        raise RunError(f"cannot write {path} ({error.strerror or error}): choose a writable folder") from error


def write_weights(model: nn.Module, path: Path) -> None:
    """Write the state dict of ``model``, with the classes of its modules as metadata, to a safetensors file."""
    modules = cast("Iterator[tuple[str, nn.Module]]", model.named_modules())
    classes = {name: f"{type(part).__module__}.{type(part).__qualname__}" for name, part in modules}
    path.write_bytes(save(copy_state(model), metadata={"classes": json.dumps(classes)}))


def verify_weights(file: Path, model: nn.Module) -> None:
    """Read ``file``, of the format ``safetensors``, and compare it with the state of ``model``, bit for bit.

    Raises:
        ExportError: it holds other tensors.
    """
    if save(load(file.read_bytes())) != save(copy_state(model)):
        raise ExportError("the safetensors file holds other tensors than the model: nothing is written")


def copy_state(model: nn.Module) -> dict[str, Tensor]:
    """Copies of a model's tensors on the CPU that share no memory, as tied weights do: safetensors wants that.

    Raises:
        ExportError: something else is among its state.
    """
    state: Mapping[str, object] = model.state_dict()
    copies: dict[str, Tensor] = {}
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise ExportError(f"the model's state has {name!r}, which is no tensor: choose another format")
        copies[name] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
    return copies


def write_pt2(program: ExportedProgram, path: Path) -> None:
    """Write the graph with its weights for `torch.export.load`."""
    # A file object: given a path, torch wants a certain suffix.
    with path.open("wb") as file:
        torch.export.save(program, file)


def check_onnx(model: nn.Module, inputs: Inputs) -> None:
    """Refuse, before any work, what ONNX or this installation cannot express.

    Raises:
        ExportError: a package is missing, or the model computes in other numbers than onnxruntime does.
    """
    require_extra("onnx", "export to ONNX", *_ONNX_PACKAGES, error=ExportError)
    for tensor in (*model.parameters(), *inputs.tensors):
        if tensor.dtype in _NOT_FOR_ONNX:
            raise ExportError(
                f"the model computes in {tensor.dtype}, which onnxruntime does not everywhere: export model.float() "
                "with an example input of torch.float32, or choose another format"
            )


def write_onnx(program: ExportedProgram, path: Path) -> None:
    """Write ONNX operators for the operators that the model calls, or for those that they consist of.

    Raises:
        ExportError: torch's exporter has no ONNX operator for one.
    """
    options: Any = {"f": path, "dynamo": True, "external_data": False, "verbose": False}
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)  # without torch's notes to itself, such as which torchvision operators are missing
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                torch.onnx.export(program, **options)
            except _ONNX_EXPORTER_ERRORS as error:
                try:
                    torch.onnx.export(program.run_decompositions(), **options)
                except _ONNX_EXPORTER_ERRORS:
                    cause: BaseException = error
                    while cause.__cause__ is not None:  # torch's outermost words are about its own steps
                        cause = cause.__cause__
                    reason = str(cause).strip().partition("\n")[0]
                    raise ExportError(
                        f"torch.onnx cannot express this model ({reason}): choose another format"
                    ) from error
    finally:
        logger.setLevel(level)


PROGRAM_WRITERS: dict[Format, Callable[[ExportedProgram, Path], None]] = {
    Format.PT2: write_pt2,
    Format.ONNX: write_onnx,
}


def verify(kind: Format, file: Path, inputs: Inputs, expected: Sequence[Tensor], tolerance: float = TOLERANCE) -> None:
    """Load ``file`` in a fresh process, run it on ``inputs`` and compare what it returns with ``expected``.

    Other files are written beside it. The inputs should be of another batch size than the model was traced with.

    Raises:
        ExportError: the file cannot be run, or returns something else.
    """
    folder = file.parent
    inputs_file, outputs_file = folder / "inputs.safetensors", folder / "outputs.safetensors"
    names = ["" for _ in inputs.positional] + [f":{name}" for name in inputs.keywords]
    tensors = {f"{index}{name}": tensor for index, (name, tensor) in enumerate(zip(names, inputs.tensors, strict=True))}
    inputs_file.write_bytes(save({name: tensor.contiguous() for name, tensor in tensors.items()}))
    # Run it where Esper cannot be imported.
    command = [sys.executable, "-P", reloading.__file__, kind, str(file), str(inputs_file), str(outputs_file)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, timeout=_VERIFY_SECONDS, env=environment, cwd=folder
        )
    except subprocess.TimeoutExpired as error:
        raise ExportError(
            f"the {kind} file did not run within {_VERIFY_SECONDS} seconds: nothing is written"
        ) from error
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise ExportError(f"the {kind} file does not run without Esper ({reason}): nothing is written")
    # Compare.
    outputs = load(outputs_file.read_bytes())
    returned = [outputs[str(index)] for index in range(len(outputs))]
    shapes = [[tuple(one.shape) for one in each] for each in (returned, expected)]
    if shapes[0] != shapes[1]:
        raise ExportError(f"the {kind} file returns shapes {shapes[0]}, the model {shapes[1]}: nothing is written")
    for ours, theirs in zip(expected, returned, strict=True):
        finite = ours[ours.isfinite()].double().abs()
        allowed = tolerance * max(1.0, float(finite.max()) if finite.numel() else 1.0)
        # Infinities and NaN must be in the same places.
        if not torch.allclose(theirs.double(), ours.double(), rtol=0, atol=allowed, equal_nan=True):
            raise ExportError(
                f"the {kind} file returns something else than the model (off by more than {allowed:.0e}, or infinite "
                "or NaN in other places): nothing is written; choose another format"
            )
