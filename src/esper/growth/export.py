"""Export a plain model to a file that does not need Esper."""

import importlib
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ShapesCollection

from esper.config.arguments import FilePath, check_arguments
from esper.errors import EsperError, ExportError, RunError
from esper.extras import require_extra
from esper.files import move_durably
from esper.growth.hooks import find_attached, find_tensors
from esper.growth.inputs import Arguments
from esper.growth.slot import Slot
from esper.numerics.modules import copy_with

TOLERANCE = 1e-5
"""Largest difference of finite outputs, relative to the largest output or 1; more for less precise dtypes."""


@check_arguments(ExportError, model="give an nn.Module, such as finalize() returns", path="give the path of a file")
def export(model: nn.Module, path: FilePath, example_input: Arguments) -> None:
    """Export ``model``, from `GrowingModel.finalize`, in evaluation mode to the file ``path``, for any batch size.

    A name that ends in ``.pt2`` gives a file for `torch.export.load`, one in ``.onnx`` one for ONNX (extra ``onnx``).
    It is run on a batch of another size before it replaces an older file: its outputs must equal the model's to 1e-5,
    or to the precision of its numbers. It returns one tensor, or a tuple of all tensors in what the model returns.

    Args:
        model: Any module that does not grow.
        path: Path of the file.
        example_input: Arguments of the model; tensors only. Those as long as the first one have the batch first.

    Raises:
        ExportError: the model still grows, or cannot be traced or written, or the file computes other outputs.
        RunError: the file cannot be written, for instance because its folder is missing.
    """
    path = Path(path)
    if find_attached(model) is not None or any(isinstance(part, Slot) for part in model.modules()):
        raise ExportError("a growing model cannot be exported, because it may still change: export its finalize()")
    if path.suffix not in (".pt2", ".onnx"):
        raise ExportError(
            f"the file name {path.name!r} ends in neither .pt2 nor .onnx: add one of them, or write the weights alone "
            "by safetensors.torch.save_model"
        )
    if path.suffix == ".onnx":
        require_extra("onnx", "export to ONNX", "onnx", "onnxruntime", "onnxscript", error=ExportError)
    example = (example_input,) if isinstance(example_input, Tensor) else example_input
    tensors: list[Any] = list(example.values() if isinstance(example, Mapping) else example)
    if not tensors or not all(isinstance(tensor, Tensor) and tensor.numel() for tensor in tensors):
        raise ExportError("the example input must hold tensors only, none of them empty: wrap the model for the rest")
    if not tensors[0].dim():
        raise ExportError("the example input needs a first tensor whose first axis is the batch")
    batch = len(tensors[0])

    def repeat(size: int) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        """Positional and keyword arguments with a batch of ``size`` examples."""
        places = torch.arange(size) % batch
        values = [(tensor[places] if tensor.shape[:1] == (batch,) else tensor.clone()).cpu() for tensor in tensors]
        return ((), dict(zip(example, values, strict=True))) if isinstance(example, Mapping) else (tuple(values), {})

    # Two batches of different sizes, of which the first has two examples or more.
    (traced, named), (others, others_named) = repeat(max(batch, 2)), repeat(batch + 3)
    shapes = ShapesCollection()
    for tensor, like in zip((*traced, *named.values()), tensors, strict=True):
        if like.shape[:1] == (batch,):
            shapes[tensor] = {0: Dim.DYNAMIC}
    plain = copy_with(model, model, ExportError).cpu().eval()
    plain.register_forward_hook(
        lambda _, __, returned: returned if isinstance(returned, Tensor) else tuple(find_tensors(returned))
    )
    what = "torch.export cannot trace the model for any batch size"
    try:
        with tempfile.TemporaryDirectory(prefix=".esper-export-", dir=path.parent.absolute()) as folder:
            file = Path(folder) / path.name
            expected = list(find_tensors(plain(*others, **others_named)))
            if not expected:
                raise ExportError("the model returns no tensor: wrap it in a module that does")
            dims = shapes.dynamic_shapes(plain, traced, named)
            program = torch.export.export(plain, traced, named, dynamic_shapes=dims)
            what = "the file does not run as the model does"
            if path.suffix == ".onnx":
                torch.onnx.export(program, f=file, dynamo=True, external_data=False, verbose=False)
                session = importlib.import_module("onnxruntime").InferenceSession(file)
                feeds = zip(session.get_inputs(), (*others, *others_named.values()), strict=True)
                arrays = session.run(None, {place.name: tensor.numpy() for place, tensor in feeds})
                returned = [torch.from_numpy(array) for array in arrays]
            else:
                torch.export.save(program, file)
                returned = find_tensors(torch.export.load(file).module()(*others, **others_named))
            types = {tensor.dtype for tensor in plain.state_dict().values() if tensor.is_floating_point()}
            tolerance = max([TOLERANCE, *(torch.finfo(dtype).eps for dtype in types)])
            for ours, theirs in zip(expected, returned, strict=True):
                scale = float(torch.cat([torch.ones(1), ours[ours.isfinite()].detach()]).abs().max())
                torch.testing.assert_close(theirs, ours, rtol=0, atol=tolerance * scale, equal_nan=True)
            move_durably(file, path)
    except EsperError:
        raise
    except OSError as error:
        raise RunError(f"cannot write {path} ({error.strerror or error}): choose a writable folder") from error
    except Exception as error:  # the model's code and the ONNX runtime may raise anything
        reason = " ".join(str(error).split())[:500] or type(error).__name__
        raise ExportError(
            f"{what} ({reason}): rewrite that code, call torch.export.export yourself with a fixed batch size, or keep "
            "the module by torch.save"
        ) from error
