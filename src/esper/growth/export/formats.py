"""The formats: how each is written, and which files make it up."""

from __future__ import annotations

import json
import logging
import math
import operator
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save as encode
from torch import Tensor, fx, nn
from torch.export import ExportedProgram

from esper.errors import ExportError
from esper.extras import require
from esper.growth.export.tracing import Inputs
from esper.growth.fossils import is_assertion

WEIGHTS_SUFFIX = ".weights.safetensors"
"""Suffix of the file that the module reads; weights alone are a file of another name."""
STRUCTURE_SUFFIX = ".structure.json"
"""Suffix of the file that says which classes weights alone belong to; `esper.save` writes a model.json."""
_ONNX_PACKAGES = ("onnx", "onnxruntime", "onnxscript")
_NOT_FOR_ONNX = (torch.float64, torch.bfloat16)
"""Floating-point numbers that onnxruntime does not compute with throughout; it convolves no float64, for one."""
_NOT_TRANSLATED = (torch.onnx.OnnxExporterError, RuntimeError, ValueError)
"""What torch's exporter to ONNX raises."""


class Format(StrEnum):
    """What a model can be exported as."""

    PT2 = "pt2"
    """For `torch.export.load`: the graph with its weights."""
    ONNX = "onnx"
    """One ONNX file with the weights inside; needs the extra ``onnx``."""
    SAFETENSORS = "safetensors"
    """The state dict alone, for a module of the same structure, and its classes in a file NAME.structure.json."""
    PYTHON = "python"
    """A Python file with the network as plain torch code, and its weights in a file NAME.weights.safetensors."""

    @property
    def suffix(self) -> str:
        """That the file's own name must have, so that no two formats write one file."""
        return ".py" if self is Format.PYTHON else f".{self}"

    @property
    def companion(self) -> str | None:
        """Suffix of a second file that belongs to it; no other format writes one of that name."""
        return {Format.SAFETENSORS: STRUCTURE_SUFFIX, Format.PYTHON: WEIGHTS_SUFFIX}.get(self)


def _write_pt2(_: nn.Module, program: ExportedProgram, path: Path) -> None:
    # A file object: given a path, torch wants a certain suffix.
    with path.open("wb") as file:
        torch.export.save(program, file)


def check_onnx(model: nn.Module, inputs: Inputs) -> None:
    """Refuse, before any work, what ONNX or this installation cannot express.

    Raises:
        ExportError: a package is missing, or the model computes in other numbers than onnxruntime does.
    """
    require("onnx", "export to ONNX", *_ONNX_PACKAGES, error=ExportError)
    for tensor in (*model.parameters(), *inputs.tensors):
        if tensor.dtype in _NOT_FOR_ONNX:
            raise ExportError(
                f"the model computes in {tensor.dtype}, which onnxruntime does not everywhere: export model.float() "
                "with an example input of torch.float32, or choose another format"
            )


def _write_onnx(_: nn.Module, program: ExportedProgram, path: Path) -> None:
    """Of the operators that the model calls; where torch's exporter fails on these, of those that they consist of."""
    try:
        _translate(program, path)
    except _NOT_TRANSLATED as error:
        try:
            _translate(program.run_decompositions(), path)
        except _NOT_TRANSLATED:
            cause: BaseException = error
            while cause.__cause__ is not None:  # torch's outermost words are about its own steps
                cause = cause.__cause__
            reason = str(cause).strip().partition("\n")[0]
            raise ExportError(f"torch.onnx cannot express this model ({reason}): choose another format") from error


def _translate(program: ExportedProgram, path: Path) -> None:
    with _silence_torch():
        torch.onnx.export(program, f=path, dynamo=True, external_data=False, verbose=False)


@contextmanager
def _silence_torch() -> Generator[None]:
    """Without torch's notes to itself, such as which operators of torchvision it has not found."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _write_safetensors(model: nn.Module, _: ExportedProgram | None, path: Path) -> None:
    state: Mapping[str, object] = model.state_dict()
    strange = [name for name, value in state.items() if not isinstance(value, Tensor)]
    if strange:
        raise ExportError(f"the model's state has {strange[0]!r}, which is no tensor: choose another format")
    path.write_bytes(encode(_copy_apart(model.state_dict())))
    modules = cast("Iterator[tuple[str, nn.Module]]", model.named_modules())
    classes = {name: f"{type(part).__module__}.{type(part).__qualname__}" for name, part in modules}
    path.with_suffix(STRUCTURE_SUFFIX).write_text(json.dumps({"classes": classes}, indent=2) + "\n")


def _write_python(model: nn.Module, program: ExportedProgram, path: Path) -> None:
    path.write_text(write_source(program, type(model).__name__), encoding="utf-8")
    path.with_suffix(WEIGHTS_SUFFIX).write_bytes(encode(_copy_apart(collect_weights(program))))


WRITERS: dict[Format, Callable[[nn.Module, Any, Path], None]] = {
    Format.PT2: _write_pt2,
    Format.ONNX: _write_onnx,
    Format.SAFETENSORS: _write_safetensors,
    Format.PYTHON: _write_python,
}
"""How to write a model, given its program, to a path, with the format's second file beside it."""


def _copy_apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous copies, which share no memory as tied weights do: safetensors wants that."""
    return {name: tensor.detach().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}


_OPERATOR = type(torch.ops.aten.relu.default)
_HEADER = '''"""{name} in eval mode, as Esper exported it; the weights are in the file beside it that ends in {suffix}.

`load()` returns the model. It needs torch and safetensors only.
"""

import math
import operator
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

aten = torch.ops.aten


def load(weights=Path(__file__).with_suffix("{suffix}")):
    """The model with its weights, ready to use."""
    model = Model()
    model.load_state_dict(load_file(weights))
    return model.eval()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
'''


def write_source(program: ExportedProgram, name: str) -> str:
    """The text. Its class ``Model`` has the tensors of `collect_weights`; ``name`` says in the docstring what it was.

    Raises:
        ExportError: the graph holds more than calls of functions, for instance control flow.
    """
    lines = [_HEADER.format(name=name, suffix=WEIGHTS_SUFFIX).rstrip("\n")]
    for attribute, tensor in collect_weights(program).items():
        made = f"torch.empty({list(tensor.shape)}, dtype={tensor.dtype})"
        if isinstance(tensor, nn.Parameter):
            lines.append(f"        self.{attribute} = nn.Parameter({made})")
        else:
            lines.append(f'        self.register_buffer("{attribute}", {made})')
    return "\n".join([*lines, "", *_forward(program), ""])


def collect_weights(program: ExportedProgram) -> dict[str, Tensor]:
    """Parameters, buffers and constants that the program reads, by the attributes that hold them in the text."""
    held = cast("dict[str, Tensor]", {**program.constants, **program.state_dict})
    return {
        _attribute(target): held[target]
        for target in (spec.target for spec in program.graph_signature.input_specs)
        if target is not None
    }


def _attribute(target: str) -> str:
    """None of `nn.Module`'s own, and distinct for distinct targets, but for such as ``a_.b`` and ``a._b``."""
    return "w_" + target.replace("_", "__").replace(".", "_")


def _forward(program: ExportedProgram) -> list[str]:
    targets = {spec.arg.name: spec.target for spec in program.graph_signature.input_specs}
    nodes: list[fx.Node] = list(program.graph.nodes)
    inputs = [node.name for node in nodes if node.op == "placeholder" and targets[node.name] is None]
    names = {
        node: f"self.{_attribute(target)}"
        for node in nodes
        if node.op == "placeholder" and (target := targets[node.name]) is not None
    }
    write = _Expressions(names, inputs[0])
    lines = [f"    def forward(self, {', '.join(inputs)}):"]
    place = ""
    for node in nodes:
        if node.op == "placeholder" or is_assertion(node):
            continue
        if node.op == "output":
            returned = cast("tuple[Any, ...]", node.args[0])
            lines.append(f"        return {write.value(returned[0] if len(returned) == 1 else returned)}")
            continue
        if (now := _place(node)) and now != place:
            place = now
            lines.append(f"        # {place}")
        lines.append(f"        {node.name} = {write.call(node)}")
    return lines


def _place(node: fx.Node) -> str:
    """The submodule that a node comes from: its name and class; empty if it comes from the whole or nobody knows."""
    stack = cast("dict[str, tuple[str, Any]]", node.meta.get("nn_module_stack", {}))
    name, kind = list(stack.values())[-1] if stack else ("", "")
    path, _, short = str(kind).rpartition(".")
    return f"{name}: {short}" if name and path else ""


class _Expressions:
    """Nodes of a graph as expressions, given those of its placeholders that are no inputs, and the first input."""

    def __init__(self, names: dict[fx.Node, str], first: str) -> None:
        self._names = names
        self._first = first

    def call(self, node: fx.Node) -> str:
        """The right side of an assignment to the node's name."""
        if node.op != "call_function":
            raise ExportError(f"the graph has a {node.op} at {node.name!r}, as control flow leads to: choose pt2")
        arguments = [self.value(argument) for argument in node.args]
        if node.target is operator.getitem:
            return f"{arguments[0]}[{arguments[1]}]"
        if node.target is torch.ops.aten.sym_size.int:
            return f"{arguments[0]}.shape[{arguments[1]}]"
        keywords = [f"{name}={self.value(argument)}" for name, argument in node.kwargs.items()]
        return f"{_function(node)}({', '.join([*arguments, *keywords])})"

    def value(self, argument: Any) -> str:
        """An argument."""
        match argument:
            case fx.Node():
                return self._names.get(argument, argument.name)
            case list():
                return f"[{', '.join(map(self.value, cast('list[Any]', argument)))}]"
            case tuple():
                return f"({', '.join(map(self.value, cast('tuple[Any, ...]', argument)))},)"
            case torch.device():
                return f"{self._first}.device"
            case float() if not math.isfinite(argument):
                return f"math.{argument}" if argument > 0 or math.isnan(argument) else "-math.inf"
            case _:
                return repr(argument)


def _function(node: fx.Node) -> str:
    """The name of a node's function, as the text can reach it."""
    function = node.target
    if isinstance(function, _OPERATOR):
        namespace, name, _ = str(cast("object", function)).split(".")  # which overload is meant shows in the arguments
        return f"aten.{name}" if namespace == "aten" else f"torch.ops.{namespace}.{name}"
    if not isinstance(function, str) and function.__module__ in ("math", "torch", "_operator"):
        return f"{function.__module__.removeprefix('_')}.{function.__name__}"
    raise ExportError(f"the graph calls {function}, which plain torch code cannot: choose pt2")
