"""Run an exported model where Esper cannot be imported: ``python reloading.py FORMAT FILE INPUTS OUTPUTS``.

The files INPUTS and OUTPUTS are safetensors. The name of an input is its position, followed by a colon and its keyword
if it has one. This script imports nothing from Esper.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load, save
from torch import Tensor


def collect_tensors(returned: Any) -> list[Tensor]:
    """The tensors in a model's output, in order."""
    if isinstance(returned, Tensor):
        return [returned]
    if isinstance(returned, Mapping):
        returned = list(cast("Mapping[str, Any]", returned).values())
    if isinstance(returned, list | tuple):
        return [tensor for part in cast("list[Any]", returned) for tensor in collect_tensors(part)]
    return []


def main(kind: str, file: str, inputs: str, outputs: str) -> None:
    """Run the model and write its outputs."""
    cast("dict[str, Any]", sys.modules)["esper"] = None  # makes every import of it fail
    # Inputs in the order of their positions, with keywords or without.
    named = [(key.partition(":")[::2], tensor) for key, tensor in load(Path(inputs).read_bytes()).items()]
    named.sort(key=lambda entry: int(entry[0][0]))
    # ONNX takes inputs by its own names, in order; a program of torch.export is called as the model was.
    if kind == "onnx":
        session = importlib.import_module("onnxruntime").InferenceSession(file, providers=["CPUExecutionProvider"])
        feeds = zip(session.get_inputs(), named, strict=True)
        arrays = session.run(None, {place.name: tensor.numpy() for place, (_, tensor) in feeds})
        returned = [torch.from_numpy(array) for array in arrays]
    else:
        positional = [tensor for (_, name), tensor in named if not name]
        keywords = {name: tensor for (_, name), tensor in named if name}
        with Path(file).open("rb") as opened, torch.no_grad():
            returned = collect_tensors(torch.export.load(opened).module()(*positional, **keywords))
    Path(outputs).write_bytes(save({str(index): tensor.contiguous() for index, tensor in enumerate(returned)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
