"""Run an exported model where Esper cannot be imported: ``python reloading.py FORMAT FILE INPUTS OUTPUTS``.

The files INPUTS and OUTPUTS are safetensors; inputs are called by their position, then a colon and their keyword, if
they have one.

This is a script of its own, which imports nothing of Esper.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load, save
from torch import Tensor


class _Refusal:
    """Finds no module of Esper, and lets none be found."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.partition(".")[0] == "esper":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def collect_tensors(returned: Any) -> list[Tensor]:
    """The tensors in what a model returned, in order."""
    if isinstance(returned, Tensor):
        return [returned]
    if isinstance(returned, Mapping):
        returned = list(cast("Mapping[str, Any]", returned).values())
    if isinstance(returned, list | tuple):
        return [tensor for part in cast("list[Any]", returned) for tensor in collect_tensors(part)]
    return []


def _run(kind: str, file: Path, inputs: Path) -> list[Tensor]:
    named = [(key.partition(":")[::2], tensor) for key, tensor in load(inputs.read_bytes()).items()]
    named.sort(key=lambda one: int(one[0][0]))
    if kind == "onnx":
        session = importlib.import_module("onnxruntime").InferenceSession(file, providers=["CPUExecutionProvider"])
        fed = zip(session.get_inputs(), named, strict=True)
        outputs = session.run(None, {place.name: tensor.numpy() for place, (_, tensor) in fed})
        return [torch.from_numpy(output) for output in outputs]
    positional = [tensor for (_, name), tensor in named if not name]
    keywords = {name: tensor for (_, name), tensor in named if name}
    if kind == "python":
        spec = importlib.util.spec_from_file_location("exported", file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return collect_tensors(module.load()(*positional, **keywords))
    with file.open("rb") as opened:
        return collect_tensors(torch.export.load(opened).module()(*positional, **keywords))


def main(kind: str, file: str, inputs: str, outputs: str) -> None:
    """Run the model and keep what it returns."""
    sys.meta_path.insert(0, cast("Any", _Refusal()))
    with torch.no_grad():
        returned = _run(kind, Path(file), Path(inputs))
    Path(outputs).write_bytes(save({str(index): one.contiguous() for index, one in enumerate(returned)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
