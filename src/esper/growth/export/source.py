"""An exported program as the text of a Python module that needs torch and safetensors only."""

from __future__ import annotations

import math
import operator
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram

from esper.errors import ExportError
from esper.growth.fossil_graph import is_assertion

WEIGHTS_SUFFIX = ".weights.safetensors"
"""Of the file that the module reads; weights alone are a file of another name."""
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


def source_of(program: ExportedProgram, name: str) -> str:
    """The text. Its class ``Model`` has the tensors of `weights_of`; ``name`` says in the docstring what it was.

    Raises:
        ExportError: the graph holds more than calls of functions, for instance control flow.
    """
    lines = [_HEADER.format(name=name, suffix=WEIGHTS_SUFFIX).rstrip("\n")]
    for attribute, tensor in weights_of(program).items():
        made = f"torch.empty({list(tensor.shape)}, dtype={tensor.dtype})"
        if isinstance(tensor, nn.Parameter):
            lines.append(f"        self.{attribute} = nn.Parameter({made})")
        else:
            lines.append(f'        self.register_buffer("{attribute}", {made})')
    return "\n".join([*lines, "", *_forward(program), ""])


def weights_of(program: ExportedProgram) -> dict[str, Tensor]:
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
