"""Export a plain model to a file that does not need Esper, and check the file in a process without Esper."""

from __future__ import annotations

import dataclasses
import inspect
import json
import logging
import os
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, cast

import torch
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from esper.config.arguments import FilePath, check_arguments
from esper.errors import ConfigError, ExportError, RunError
from esper.extras import require_extra
from esper.files import move_durably
from esper.growth import reloading
from esper.growth.copies import copy_module
from esper.growth.fossils import TRACING_ERRORS
from esper.growth.hooks import find_attached
from esper.growth.probe import Arguments
from esper.growth.reloading import collect_tensors
from esper.growth.slot import Slot
from esper.growth.taps import list_named_modules

TOLERANCE = 1e-5
"""Largest difference of finite outputs, relative to the largest output or 1; more for less precise dtypes."""
_TRACED_BATCH = 3
_VERIFIED_BATCH = 5
_VERIFY_SECONDS = 600
_TORCH, _STANDARD_LIBRARY = Path(torch.__file__).parent, Path(tempfile.__file__).parent
_ONNX_PACKAGES = ("onnx", "onnxruntime", "onnxscript")
_NOT_FOR_ONNX = (torch.float64, torch.bfloat16)
"""Dtypes that onnxruntime does not support in all operators; for instance, it has no convolution in float64."""
_ONNX_EXPORTER_ERRORS = (torch.onnx.OnnxExporterError, RuntimeError, ValueError)


class Format(StrEnum):
    """File formats of exported models."""

    PT2 = "pt2"
    """The graph with its weights, for `torch.export.load`."""
    ONNX = "onnx"
    """One ONNX file with the weights inside; needs the extra ``onnx``."""
    SAFETENSORS = "safetensors"
    """Only the state dict, with the classes of all modules in the file's metadata. Loading it does not need Esper.

    The finalized module can load it, even after `torch.load`:
    ``module.load_state_dict(safetensors.torch.load_file(path))``.
    """

    @property
    def suffix(self) -> str:
        """The suffix of file names."""
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
    """Export ``model`` in evaluation mode to the file ``path``, for any batch size.

    The file is first loaded in a process that cannot import Esper, and run on random inputs of a batch size other than
    the traced one. Its outputs must equal the model's to 1e-5, or to the precision of its numbers if that is coarser.
    ``safetensors`` has only weights and needs no tracing: the file must hold the model's tensors bit for bit.

    The exported program returns tensors in plain tuples, lists and dictionaries, even if the model returns an object
    such as Hugging Face's `ModelOutput`. Parts without a tensor, such as a language model's cache, are left out.

    Args:
        model: From `GrowingModel.finalize`, or any other module.
        example_input: Arguments of the model; tensors only, batch first.
        format: ``pt2``, ``onnx`` or ``safetensors``; see `esper.growth.export.Format`.
        path: Path of the file, whose name must end in the format's name. An existing file is replaced.
        fixed_batch: Whether the file works only for batches as large as the example input; for models that cannot be
            traced for all sizes.

    Raises:
        ConfigError: ``fixed_batch`` is set for weights alone.
        ExportError: the model still grows, or cannot be traced or written in this format, or the file computes other
            outputs.
        RunError: the file cannot be written, for instance because its folder is missing.
    """
    # Refuse invalid arguments before any work.
    if find_attached(model) is not None or any(isinstance(part, Slot) for part in model.modules()):
        raise ExportError("a growing model cannot be exported, because it may still change: export its finalize()")
    kind, path = Format(format), Path(path)
    if not path.name.endswith(kind.suffix) or path.name == kind.suffix:
        raise ExportError(f"the {kind} format needs a file name that ends in {kind.suffix}, not {path.name!r}")
    if not path.parent.is_dir():
        raise RunError(f"cannot write {path} (there is no folder {path.parent}): make it, or choose another one")
    if kind is Format.SAFETENSORS and fixed_batch:
        raise ConfigError(f"the {kind} format has only weights, which fit any batch size: omit fixed_batch")
    inputs = None if kind is Format.SAFETENSORS else Inputs.from_arguments(example_input)
    if inputs is not None and kind is Format.ONNX:
        require_extra("onnx", "export to ONNX", *_ONNX_PACKAGES, error=ExportError)
        for tensor in (*model.parameters(), *inputs.tensors):
            if tensor.dtype in _NOT_FOR_ONNX:
                raise ExportError(
                    f"the model uses {tensor.dtype}, which onnxruntime does not support in all operators: export "
                    "model.float() with a torch.float32 example input, or choose another format"
                )
    # Write and verify in a temporary folder, then move the file to its place.
    plain = copy_module(model, ExportError).cpu().eval()
    try:
        with tempfile.TemporaryDirectory(prefix=".esper-export-", dir=path.parent.absolute()) as folder:
            file = Path(folder) / path.name
            if inputs is None:
                write_weights(plain, file)
                if save(load(file.read_bytes())) != save(_copy_state(model)):
                    raise ExportError("the safetensors file differs from the model's tensors: nothing was written")
            else:
                generator = torch.Generator().manual_seed(0)
                plain.register_forward_hook(lambda _module, _arguments, returned: make_plain(returned))
                example = inputs if fixed_batch else inputs.draw(_TRACED_BATCH, generator)
                program = trace_model(plain, example, fixed_batch=fixed_batch)
                fresh = inputs.draw(inputs.batch if fixed_batch else _VERIFIED_BATCH, generator)
                with torch.no_grad():
                    expected = collect_tensors(plain(*fresh.positional, **fresh.keywords))
                if kind is Format.ONNX:
                    _write_onnx(program, file)
                else:
                    with file.open("wb") as opened:  # given a path, torch wants a certain suffix
                        torch.export.save(program, opened)
                values = (*plain.parameters(), *plain.buffers())
                types = {tensor.dtype for tensor in values if tensor.is_floating_point()}
                verify(kind, file, fresh, expected, max([TOLERANCE, *(torch.finfo(dtype).eps for dtype in types)]))
            move_durably(file, path)
    except OSError as error:
        raise RunError(f"cannot write {path} ({error.strerror or error}): choose a writable folder") from error


def write_weights(model: nn.Module, path: Path) -> None:
    """Write the state dict of ``model``, with the classes of its modules as metadata, to a safetensors file.

    Raises:
        ExportError: the state contains values other than tensors.
    """
    classes = {name: f"{type(part).__module__}.{type(part).__qualname__}" for name, part in list_named_modules(model)}
    path.write_bytes(save(_copy_state(model), metadata={"classes": json.dumps(classes)}))


def _copy_state(model: nn.Module) -> dict[str, Tensor]:
    """Copies of a model's tensors on the CPU without shared memory, even for tied weights, as safetensors requires."""
    # A module may put anything into its state dict, by `get_extra_state`.
    state: Mapping[str, object] = model.state_dict()
    copies: dict[str, Tensor] = {}
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise ExportError(f"the model's state has {name!r}, which is not a tensor: choose another format")
        copies[name] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
    return copies


def _write_onnx(program: ExportedProgram, path: Path) -> None:
    """Write a program as ONNX operators, decomposing operators that ONNX does not have."""
    options: Any = {"f": path, "dynamo": True, "external_data": False, "verbose": False}
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)  # without messages that do not concern this model
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
                    while cause.__cause__ is not None:  # the outermost errors describe torch's own steps
                        cause = cause.__cause__
                    reason = str(cause).strip().partition("\n")[0]
                    raise ExportError(
                        f"torch.onnx cannot express this model ({reason}): choose another format"
                    ) from error
    finally:
        logger.setLevel(level)


def verify(kind: Format, file: Path, inputs: Inputs, expected: Sequence[Tensor], tolerance: float = TOLERANCE) -> None:
    """Load ``file`` in a fresh process, run it on ``inputs`` and compare its outputs with ``expected``.

    Other files are written to the same folder. The inputs should have another batch size than the traced one.

    Raises:
        ExportError: the file cannot be run, or its outputs differ.
    """
    # Write the inputs, by position and keyword.
    folder = file.parent
    inputs_file, outputs_file = folder / "inputs.safetensors", folder / "outputs.safetensors"
    names = ["" for _ in inputs.positional] + [f":{name}" for name in inputs.keywords]
    tensors = {f"{index}{name}": tensor for index, (name, tensor) in enumerate(zip(names, inputs.tensors, strict=True))}
    inputs_file.write_bytes(save({name: tensor.contiguous() for name, tensor in tensors.items()}))
    # Run the file where Esper cannot be imported.
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
    # Compare the outputs.
    outputs = load(outputs_file.read_bytes())
    returned = [outputs[str(index)] for index in range(len(outputs))]
    shapes, expected_shapes = ([tuple(tensor.shape) for tensor in part] for part in (returned, expected))
    if shapes != expected_shapes:
        raise ExportError(f"the {kind} file returns shapes {shapes}, the model {expected_shapes}: nothing is written")
    for ours, theirs in zip(expected, returned, strict=True):
        finite = ours[ours.isfinite()].double().abs()
        allowed = tolerance * max(1.0, float(finite.max()) if finite.numel() else 1.0)
        # Infinities and NaN must be in the same places.
        if not torch.allclose(theirs.double(), ours.double(), rtol=0, atol=allowed, equal_nan=True):
            raise ExportError(
                f"the outputs of the {kind} file differ from the model's by more than {allowed:.0e}, or are infinite "
                "or NaN in other places: nothing was written; choose another format"
            )


def trace_model(model: nn.Module, inputs: Inputs, *, fixed_batch: bool = False) -> ExportedProgram:
    """Trace ``model`` in evaluation mode, for any batch size or a fixed one, with at least two examples.

    Raises:
        ExportError: `torch.export` cannot trace the model, or only for a fixed batch size.
    """
    # The first axis of all tensors with a batch varies.
    axes = None
    if not fixed_batch:
        arguments = inspect.signature(model.forward).bind(*inputs.positional, **inputs.keywords).arguments
        axes = {name: _choose_dynamic_axes(argument, inputs) for name, argument in arguments.items()}
    # Copies, because torch marks the tensors themselves as dynamic.
    positional = tuple(tensor.clone() for tensor in inputs.positional)
    keywords = {name: tensor.clone() for name, tensor in inputs.keywords.items()}
    try:
        return torch.export.export(model, positional, keywords, dynamic_shapes=axes)
    except TRACING_ERRORS as error:
        name, reason = type(model).__name__, str(error).strip().partition("\n")[0] or type(error).__name__
        # Name the line of the model's code at which it failed: the innermost outside torch and the standard library.
        files = [(Path(frame.filename), frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
        inner = [
            (file, line)
            for file, line in files
            if file.is_file() and file.parent != _STANDARD_LIBRARY and not file.is_relative_to(_TORCH)
        ]
        if inner and inner[-1][0] != Path(__file__):
            reason += f", at {inner[-1][0].name}:{inner[-1][1]}"
        # Is the batch size the reason? Then a fixed one would help.
        if not fixed_batch:
            try:
                trace_model(model, inputs, fixed_batch=True)
            except ExportError:
                pass  # the reason below holds for any batch
            else:
                raise ExportError(
                    f"torch.export cannot trace {name} for any batch size ({reason}): fix the batch size to that of "
                    "the example input with fixed_batch=True (or --fixed-batch), or rewrite the failing code"
                ) from error
        raise ExportError(
            f"torch.export cannot trace {name} ({reason}): rewrite the failing code, export only the weights as "
            "safetensors, or save the finalized module with torch.save"
        ) from error


def _choose_dynamic_axes(argument: Any, inputs: Inputs) -> Any:
    """Dynamic axes in the structure of an argument: a tuple for ``*args``, a dictionary for ``**kwargs``."""
    if isinstance(argument, Tensor):
        return {0: Dim.DYNAMIC} if inputs.has_batch(argument) else None
    if isinstance(argument, tuple):
        return tuple(_choose_dynamic_axes(part, inputs) for part in cast("tuple[Any, ...]", argument))
    return {name: _choose_dynamic_axes(part, inputs) for name, part in argument.items()}


@dataclass(frozen=True)
class Inputs:
    """Tensor arguments of a model; tensors as long as the first one have the batch as their first axis."""

    positional: tuple[Tensor, ...]
    keywords: dict[str, Tensor]

    @classmethod
    def from_arguments(cls, arguments: Arguments) -> Inputs:
        """The tensors in ``arguments``, on the CPU.

        Raises:
            ExportError: an argument is empty or not a tensor, there are none, or the first has no batch axis.
        """
        # Positional arguments and keywords, each of which must be a tensor with numbers.
        positional: tuple[Any, ...] = (arguments,) if isinstance(arguments, Tensor) else ()
        keywords: dict[str, Any] = {}
        if isinstance(arguments, tuple):
            positional = arguments
        elif isinstance(arguments, Mapping):
            keywords = dict(arguments)
        values = [*positional, *keywords.values()]
        for value in values:
            if not isinstance(value, Tensor):
                raise ExportError(
                    f"the example input holds a {type(value).__name__}, but an exported model takes tensors only: "
                    "wrap the model in a module that fills in the rest"
                )
        if not values or values[0].dim() == 0:
            raise ExportError("the example input needs a first tensor whose first axis is the batch")
        empty = [tuple(value.shape) for value in values if not value.numel()]
        if empty:
            raise ExportError(f"the example input has a tensor of shape {empty[0]}: give an example or more")
        return cls(tuple(value.cpu() for value in positional), {name: value.cpu() for name, value in keywords.items()})

    @property
    def batch(self) -> int:
        """Number of examples."""
        return len(self.tensors[0])

    @property
    def tensors(self) -> list[Tensor]:
        """All arguments, positional ones first."""
        return [*self.positional, *self.keywords.values()]

    def has_batch(self, tensor: Tensor) -> bool:
        """Whether the first axis of ``tensor``, one of these, is the batch."""
        return tensor.dim() > 0 and len(tensor) == self.batch

    def draw(self, batch: int, generator: torch.Generator) -> Inputs:
        """Random inputs with another batch size.

        Floating-point tensors are normal, with the mean and deviation of the originals. Other tensors, and tensors with
        infinities, may be indices and masks that belong together: their examples are drawn from the originals, and
        tensors without a batch are kept.
        """
        # All tensors that are not random have the same examples, in the same order.
        examples = torch.randint(self.batch, (batch,), generator=generator)

        def draw_like(like: Tensor) -> Tensor:
            if like.is_floating_point() and like.isfinite().all():
                shape = (batch, *like.shape[1:]) if self.has_batch(like) else like.shape
                noise = torch.randn(shape, generator=generator).to(like.dtype)
                return like.mean() + noise * (like.std() if like.numel() > 1 else 1.0)
            return like[examples] if self.has_batch(like) else like

        return Inputs(
            tuple(map(draw_like, self.positional)), {name: draw_like(value) for name, value in self.keywords.items()}
        )


def make_plain(returned: Any) -> Any:
    """A model's output with dictionaries for mappings and dataclasses, and tuples or lists for sequences.

    Parts without a tensor are left out, such as the cache that a language model returns beside its logits.

    Raises:
        ExportError: no tensor is left.
    """
    plain = _make_part_plain(returned)
    if not collect_tensors(plain):
        raise ExportError(
            f"the model returns a {type(returned).__name__} that contains no tensor: wrap the model in a module that "
            "returns a tensor, or a tuple, list, mapping or dataclass of tensors"
        )
    return plain


def _make_part_plain(part: Any) -> Any:
    """A part of an output, as `make_plain` converts it; None if it has no tensor."""
    if isinstance(part, Tensor):
        return part
    if dataclasses.is_dataclass(part) and not isinstance(part, Mapping | type):
        part = {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}
    if isinstance(part, Mapping):
        mapping = {name: _make_part_plain(value) for name, value in cast("Mapping[Any, Any]", part).items()}
        return {name: value for name, value in mapping.items() if value is not None} or None
    if isinstance(part, Sequence) and not isinstance(part, str | bytes):
        values = [value for value in map(_make_part_plain, cast("Sequence[Any]", part)) if value is not None]
        return (tuple(values) if isinstance(part, tuple) else values) or None
    return None
