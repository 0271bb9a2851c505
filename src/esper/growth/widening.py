"""Add outputs or inputs to linear layers, convolutions and batch normalisation of a host.

Linear layers of Hugging Face's class `Conv1D`, as in GPT-2, store their weight transposed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import skip_init  # pyright: ignore[reportUnknownVariableType]

from esper.growth.depth import CONFIGURATION
from esper.growth.site import Hidden
from esper.numerics.stacking import Stackable

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d)
_TRANSPOSED = "transformers.pytorch_utils.Conv1D"
"""Class of linear layers whose weight is ``[inputs, outputs]``."""


def is_widenable(module: nn.Module) -> bool:
    """Whether a module is a linear layer or a convolution whose weight can get more rows and columns.

    The result is False for subclasses that override forward, unless they are `Stackable`, for grouped convolutions,
    for weights and biases computed from other tensors (weight norm, pruning, parametrizations), and for integers.
    """
    plain = _is_transposed(module) or _find_plain_class(module) is not None
    if not plain or (isinstance(module, CONVOLUTIONS) and module.groups != 1):
        return False
    parameters = dict(module.named_parameters(recurse=False))
    if cast("Any", module).bias is not None and "bias" not in parameters:
        return False
    return "weight" in parameters and parameters["weight"].is_floating_point()


def get_plain_forward(layer: nn.Module) -> Callable[..., Any]:
    """The function that computes a layer's output from layer and input: the forward of torch's class if it is plain."""
    return (_find_plain_class(layer) or type(layer)).forward


def _find_plain_class(module: nn.Module) -> type[nn.Module] | None:
    """The class of torch's linear layers and convolutions whose forward a module has, or stacks; None for others."""
    for kind in (nn.Linear, *CONVOLUTIONS):
        if isinstance(module, kind) and (isinstance(module, Stackable) or type(module).forward is kind.forward):
            return kind
    return None


def is_plain_norm(module: nn.Module) -> bool:
    """Whether a module is torch's plain batch normalisation, to which channels can be added."""
    return any(type(module).forward is kind.forward for kind in NORMS) and isinstance(module, NORMS)


def _is_transposed(layer: nn.Module) -> bool:
    return f"{type(layer).__module__}.{type(layer).__qualname__}" == _TRANSPOSED


def get_weight(layer: nn.Module) -> Tensor:
    """The weight of a layer, ``[outputs, inputs, *kernel]``."""
    weight = layer.get_parameter("weight")
    return weight.T if _is_transposed(layer) else weight


def get_weight_shape(layer: nn.Module) -> tuple[int, ...]:
    """The shape of a layer's weight, ``(outputs, inputs, *kernel)``."""
    shape = tuple(layer.get_parameter("weight").shape)
    return shape[::-1] if _is_transposed(layer) else shape


def find_channel_axis(layer: nn.Module) -> int:
    """The axis of the channels in a layer's input and output."""
    return 1 if isinstance(layer, CONVOLUTIONS) else -1


def make_with_outputs(layer: nn.Module, outputs: int, generator: torch.Generator) -> nn.Module:
    """A layer with the inputs of ``layer`` and this number of ``outputs``, with torch's initial values."""
    made = _make_like(layer, get_weight_shape(layer)[1], outputs, _has_bias(layer), generator)
    # As `nn.Linear.reset_parameters`, with an explicit generator.
    weight = made.get_parameter("weight")
    nn.init.kaiming_uniform_(weight, math.sqrt(5), generator=generator)
    if _has_bias(made):
        bound = 1 / math.sqrt(max(weight[0].numel(), 1))
        nn.init.uniform_(made.get_parameter("bias"), -bound, bound, generator=generator)
    return made


def make_with_inputs(layer: nn.Module, inputs: int, generator: torch.Generator) -> nn.Module:
    """A layer with the outputs of ``layer`` and this number of ``inputs``, with zero weights and no bias."""
    made = _make_like(layer, inputs, get_weight_shape(layer)[0], False, generator)
    nn.init.zeros_(made.get_parameter("weight"))
    return made


def make_with_channels(norm: nn.Module, channels: int, generator: torch.Generator) -> nn.Module:
    """New batch normalisation with this number of ``channels`` and the options of ``norm``."""
    assert isinstance(norm, NORMS)
    kind = nn.BatchNorm1d if isinstance(norm, nn.BatchNorm1d) else nn.BatchNorm2d
    return kind(channels, norm.eps, norm.momentum, norm.affine, norm.track_running_stats, device=generator.device)


def _make_like(layer: nn.Module, inputs: int, outputs: int, bias: bool, generator: torch.Generator) -> nn.Module:
    """A layer of the same class and options, without values."""
    if not isinstance(layer, CONVOLUTIONS):
        return skip_init(nn.Linear, inputs, outputs, bias=bias, device=generator.device)
    options: dict[str, Any] = {
        name: getattr(layer, name) for name in ("kernel_size", "stride", "padding", "dilation", "padding_mode")
    }
    kind = nn.Conv1d if isinstance(layer, nn.Conv1d) else nn.Conv2d
    return skip_init(kind, inputs, outputs, bias=bias, device=generator.device, **options)


def _has_bias(layer: nn.Module) -> bool:
    return "bias" in dict(layer.named_parameters(recurse=False))


@torch.no_grad()
def add_outputs(layer: nn.Module, added: nn.Module, kept: Tensor) -> None:
    """Append the outputs ``kept`` of ``added`` to those of ``layer``.

    Inputs that were added to ``layer`` after ``added`` was created do not affect the new outputs.
    """
    weight = get_weight(layer)
    rows = added.get_parameter("weight")[kept].to(weight)
    padded = rows.new_zeros(len(rows), *weight.shape[1:])
    padded[:, : rows.shape[1]] = rows
    _set_weight(layer, torch.cat([weight, padded]))
    if _has_bias(layer):
        bias = layer.get_parameter("bias")
        _set_parameter(layer, "bias", torch.cat([bias, added.get_parameter("bias")[kept].to(bias)]))


@torch.no_grad()
def add_inputs(layer: nn.Module, added: nn.Module, kept: Tensor, factor: float) -> None:
    """Append the inputs ``kept`` of ``added`` to those of ``layer``, with ``factor`` times their weights."""
    weight = get_weight(layer)
    columns = factor * added.get_parameter("weight")[:, kept].to(weight)
    _set_weight(layer, torch.cat([weight, columns], dim=1))


@torch.no_grad()
def add_channels(norm: nn.Module, added: nn.Module, kept: Tensor) -> None:
    """Append the channels ``kept`` of ``added``, with their running statistics, to batch normalisation."""
    for name, parameter in list(norm.named_parameters(recurse=False)):
        _set_parameter(norm, name, torch.cat([parameter, added.get_parameter(name)[kept].to(parameter)]))
    for name, buffer in list(norm.named_buffers(recurse=False)):
        if buffer.dim():  # all but the count of batches
            setattr(norm, name, torch.cat([buffer, added.get_buffer(name)[kept].to(buffer)]))
    setattr(norm, "num_features", cast("Any", norm).num_features + len(kept))  # noqa: B010


WIDTHS = ("intermediate_size", "n_inner", "ffn_dim", "d_ff", "ffn_hidden_size", "encoder_ffn_dim", "decoder_ffn_dim")
"""Names that a configuration or module may use for the number of hidden units; a value of None means the default."""


def widen_configurations(host: nn.Module, widened: Mapping[str, Hidden]) -> None:
    """Set the new numbers of hidden units in configurations and in the modules around the layers.

    A configuration is changed if all layers widened under it now have the same width. Whether it is then correct for
    all other layers is checked by `esper.growth.pretrained.is_built_alike`.

    Args:
        host: The host with the widened layers.
        widened: The former hidden units, by the layer that takes them as input.
    """
    changes: dict[int, tuple[Any, str, set[int]]] = {}
    for reader, hidden in widened.items():
        width = get_weight_shape(host.get_submodule(reader))[1]
        counted = False
        # From the layer outwards: plain attributes, and the nearest configuration.
        parts = reader.split(".")
        for length in range(len(parts) - 1, -1, -1):
            module = host.get_submodule(".".join(parts[:length]))
            for name in WIDTHS:
                if type(vars(module).get(name)) is int and vars(module)[name] == hidden.width:
                    setattr(module, name, width)
            configuration = vars(module).get(CONFIGURATION)
            values = {name: getattr(configuration, name, hidden) for name in WIDTHS}
            for before in (hidden.width, None):
                name = next((name for name, value in values.items() if value == before), None)
                if name is not None and not counted:
                    changes.setdefault(id(configuration), (configuration, name, set()))[2].add(width)
                    counted = True
    for configuration, name, found in changes.values():
        if len(found) == 1:
            setattr(configuration, name, *found)


def _set_weight(layer: nn.Module, weight: Tensor) -> None:
    """Set a new weight ``[outputs, inputs, *kernel]``, and update the numbers of inputs and outputs of the layer."""
    transposed = _is_transposed(layer)
    _set_parameter(layer, "weight", weight.T.contiguous() if transposed else weight)
    names = ("nf", "nx") if transposed else ("out_features", "in_features")
    names = ("out_channels", "in_channels") if isinstance(layer, CONVOLUTIONS) else names
    for name, size in zip(names, weight.shape[:2], strict=True):
        setattr(layer, name, size)


def _set_parameter(module: nn.Module, name: str, values: Tensor) -> None:
    """Replace a parameter by a new one; a module that shares the old one keeps it."""
    learns = module.get_parameter(name).requires_grad
    module.register_parameter(name, nn.Parameter(values, learns))
