"""More hidden units between two layers of a host; they become part of these layers when the model is finalized."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, ClassVar, TypeGuard, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import skip_init  # pyright: ignore[reportUnknownVariableType]

from esper.errors import ExportError, SlotError, did_you_mean
from esper.growth.blueprints.registry import Blueprint, Context, Family, Folded, LayerCall, register, register_sizes
from esper.growth.depth import copy_block
from esper.growth.hooks import find_tensors, list_named_modules
from esper.growth.positions import pad_nested
from esper.growth.site import Hidden, Layout, Site, WideLayer, find_channel_axis
from esper.numerics.modules import Stackable, keep_generators, keep_modes

_SHARE = 8
"""``units`` adds one unit for this many existing ones."""
_FAR = 30.0
"""Standard deviation of the noise with which hosts are compared, because clamps act only on large values."""
_KINDS = (nn.Linear, nn.Conv1d, nn.Conv2d)
_CLOSE = 1e-5
"""Tolerance between two ways of computing the same values, relative to the largest value."""


@register
class Units(Blueprint):
    """``s = W2' f(W1' x + b1')``: more units between two layers ``W2 f(W1 x + b1) + b2``; ``W2' = 0`` at birth.

    ``x`` is the input of the first layer, and ``f`` consists of copies of the host's modules between the two, such as
    an activation and dropout. The layers are linear, or convolutions with the same options as the host's. When the
    model is finalized, ``W1'`` and ``b1'`` become additional outputs of the first layer, and ``W2'`` additional inputs
    of the second.

    Widening as in Net2Net (Chen et al. 2015, arXiv 1511.05641), with new units that contribute nothing at birth as in
    GradMax (Evci et al. 2022, arXiv 2201.05125), faded in by alpha. ``units_K`` adds K units; ``units`` adds an eighth
    of the existing number, at least 1.

    Unlike other blueprints, it has dropout if the host has it at this place.
    """

    name: ClassVar[str] = "units"
    family: ClassVar[Family] = Family.CHANNEL
    layouts: ClassVar[frozenset[Layout]] = frozenset(Layout)
    mixes_positions: ClassVar[bool] = False  # no more than the host itself does
    context: ClassVar[Context] = Context.HIDDEN
    size: ClassVar[int | None] = None
    """Number of units; None: a fraction of the existing number."""

    def __init__(self, site: Site, generator: torch.Generator) -> None:
        super().__init__(site, generator)
        hidden, units = _require_hidden(site), self.count_units(site)
        has_bias = hidden.first.bias is not None
        self.first = _make_like(hidden.first, hidden.first.weight.shape[1], units, has_bias, generator)
        self.between = nn.Sequential(*map(copy_block, hidden.between))
        self.last = _make_like(hidden.last, units, hidden.last.weight.shape[0], False, generator)
        self._first_name = hidden.names[0]
        # As `nn.Linear.reset_parameters`, with an explicit generator.
        nn.init.kaiming_uniform_(self.first.weight, math.sqrt(5), generator=generator)
        if self.first.bias is not None:
            bound = 1 / math.sqrt(max(self.first.weight[0].numel(), 1))
            nn.init.uniform_(self.first.bias, -bound, bound, generator=generator)
        nn.init.zeros_(self.last.weight)

    def __reduce__(self) -> tuple[Any, ...]:
        # Classes of a given size are created on demand, so pickle cannot import them.
        return make_empty, (self.size,), self.__getstate__()

    def forward(self, features: Tensor, inputs: Tensor, /) -> Tensor:
        contribution: Tensor = self.last(self.between(self.first(inputs)))
        return contribution

    @torch.no_grad()
    def fold(self, host: nn.Module, name: str, weight: float) -> Folded:
        """Add the units to the layers of the host."""
        first, last = host.get_submodule(self._first_name), host.get_submodule(name)
        for path, layer in ((self._first_name, first), (name, last)):
            if not _is_wide_layer(layer):
                raise ExportError(
                    f"the weight of {path!r} is now computed from other tensors, as by a weight norm or pruning added "
                    f"after {self.name!r} grew there, so no units can be added to it: remove that before finalize()"
                )
        assert isinstance(first, WideLayer)
        assert isinstance(last, WideLayer)
        # Inputs that the first layer got from other units do not affect these ones.
        rows = self.first.weight.to(first.weight)
        padded = rows.new_zeros(len(rows), *first.weight.shape[1:])
        padded[:, : rows.shape[1]] = rows
        _set_weight(first, torch.cat([first.weight, padded]))
        if first.bias is not None and self.first.bias is not None:
            _set_parameter(first, "bias", torch.cat([first.bias, self.first.bias.to(first.bias)]))
        _set_weight(last, torch.cat([last.weight, weight * self.last.weight.to(last.weight)], dim=1))
        return Folded.WIDENED

    @classmethod
    def count_units(cls, site: Site) -> int:
        """Number of units at ``site``."""
        return cls.size or max(_require_hidden(site).width // _SHARE, 1)

    @classmethod
    def parameters_at(cls, site: Site) -> int:
        hidden = _require_hidden(site)
        # One unit has a row and perhaps a bias of the first layer, and a column of the last one.
        one = hidden.first.weight[0].numel() + (hidden.first.bias is not None) + hidden.last.weight[:, 0].numel()
        return cls.count_units(site) * one

    @classmethod
    def flops_at(cls, site: Site) -> int:
        hidden = _require_hidden(site)
        # One unit costs a row of the first layer at each of its positions, and a column of the last one at each output.
        one = hidden.positions * hidden.first.weight[0].numel() + math.prod(
            (*site.shape, *hidden.last.weight.shape[2:])
        )
        return 2 * cls.count_units(site) * one

    @classmethod
    def supports(cls, site: Site) -> bool:
        return super().supports(site) and site.hidden is not None


def _require_hidden(site: Site) -> Hidden:
    assert site.hidden is not None, "call supports(site) first"
    return site.hidden


def _make_like(layer: nn.Module, inputs: int, outputs: int, bias: bool, generator: torch.Generator) -> WideLayer:
    """A layer of the same class and options, without values."""
    kind = next(kind for kind in _KINDS if isinstance(layer, kind))
    names = () if kind is nn.Linear else ("kernel_size", "stride", "padding", "dilation", "padding_mode")
    options = {name: getattr(layer, name) for name in names}
    return cast("WideLayer", skip_init(kind, inputs, outputs, bias=bias, device=generator.device, **options))


def _set_weight(layer: WideLayer, weight: Tensor) -> None:
    """Set a new weight ``[outputs, inputs, *kernel]``, and update the numbers of inputs and outputs of the layer."""
    _set_parameter(layer, "weight", weight)
    if isinstance(layer, nn.Linear):
        layer.out_features, layer.in_features = weight.shape
    else:
        layer.out_channels, layer.in_channels = weight.shape[:2]


def _set_parameter(module: nn.Module, name: str, values: Tensor) -> None:
    """Replace a parameter by a new one; a module that shares the old one keeps it."""
    module.register_parameter(name, nn.Parameter(values, module.get_parameter(name).requires_grad))


@cache
def make_size(size: int) -> type[Units]:
    """The blueprint ``units_K`` for a number of units."""
    members = {"__module__": __name__, "__doc__": f"{size} more hidden units.", "name": f"units_{size}", "size": size}
    return type(f"Units{size}", (Units,), members)


def make_empty(size: int | None) -> Units:
    """An instance without any state, for copying and unpickling."""
    kind = Units if size is None else make_size(size)
    return kind.__new__(kind)


register_sizes(Units.name, make_size)


# Where units can be added ---------------------------------------------------------------------------------------------


def find_hidden(host: nn.Module, names: Sequence[str], run: Callable[[], object]) -> Hidden:
    """The hidden units between the layers ``names[0]`` and ``names[-1]``.

    The modules between them are named, and one comparison far from zero shows that these act on each unit alone, and
    that nothing else lies between: the first layer returns noise, and the last layer gets what the modules make of it,
    as they do for a part of more units.

    Args:
        host: Any module.
        names: Names of the first layer, of the modules between in the order of their calls, and of the last layer.
        run: Calls the host with its example input.
    """
    modules = dict(list_named_modules(host, remove_duplicate=False))
    for name in names:
        if name not in modules:
            raise SlotError(f"the host has no submodule {name!r}{did_you_mean(name, modules) or ''}")
    first, *between, last = (modules[name] for name in names)
    described = [f"{name!r} ({type(modules[name]).__name__})" for name in names]
    refuse = partial(_refuse, names)
    if not _is_wide_layer(first) or not _is_wide_layer(last):
        raise refuse(
            f"{described[-1] if _is_wide_layer(first) else described[0]} is no plain linear layer or convolution "
            "(groups=1) with a weight and a bias of its own"
        )
    for part, what in zip(between, described[1:], strict=False):
        if [*part.parameters(), *part.buffers()]:
            raise refuse(f"{what} has parameters or buffers, as norms and gates have: {_OTHERWISE}")
    # The unchanged call.
    calls: list[tuple[nn.Module, Tensor, Tensor, Tensor]] = []
    """Layers, their inputs, copies of these, and copies of the outputs."""

    def record(layer: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> None:
        call = LayerCall(arguments, keywords)
        inputs, what = call.first_argument, described[-1 if layer is last else 0]
        if not call.has_single_argument or inputs is None or not isinstance(output, Tensor) or output.is_nested:
            raise refuse(f"{what} does not make one dense tensor of another: leave padding out of the example input")
        if not is_unaltered(layer, call, output):
            raise refuse(f"a hook on {what}, or a forward of the instance, changes what it returns")
        if any(not torch.equal(live, copy) for _, live, copy, _ in calls):
            raise refuse("the input of the first layer is changed in place before the last one runs")
        calls.append((layer, inputs, inputs.clone(), output.clone()))

    handles = [layer.register_forward_hook(record, with_kwargs=True) for layer in (first, last)]
    returned = _run_in_eval(host, run, handles)
    if [layer for layer, *_ in calls] != [first, last]:
        raise refuse(f"{described[0]} and {described[-1]} have to be called once each in a forward pass, in this order")
    (_, _, source, made), (_, _, read, _) = calls
    # With noise as the first layer's output, for some of more units, while the last layer gets its former input.
    axis, width = find_channel_axis(first), first.weight.shape[0]
    shape = list(made.shape)
    shape[axis] = 2 * width + 5
    more = (_FAR * torch.randn(shape, generator=torch.Generator().manual_seed(0))).to(made)
    some = torch.arange(1, 2 * width, 2, device=made.device)
    noise = more.index_select(axis, some)
    read_noise: list[Tensor] = []

    def make_noise(*_: object) -> Tensor:
        return noise.clone()

    def read_former(_: nn.Module, arguments: tuple[Tensor, ...]) -> Tensor:
        read_noise.append(arguments[0].clone())
        return read.clone()

    handles = [first.register_forward_hook(make_noise), last.register_forward_pre_hook(read_former)]
    others = _run_in_eval(host, run, handles)
    if len(returned) != len(others) or not all(map(_is_close, others, returned)):
        raise refuse("what the first layer returns is used elsewhere, too")
    # The same by the modules between, for these units and for more, and for the values of the example.
    with keep_modes(host), keep_generators(host), torch.no_grad():
        host.eval()
        values = made, noise, more
        for part, what in zip(between, described[1:], strict=False):
            try:
                values = tuple(part(value.clone()) for value in values)  # it may work in place
                acts_alone = _is_close(values[2].index_select(axis, some), values[1])
            except (RuntimeError, ValueError, TypeError, IndexError, AttributeError):  # it is for a number of units
                acts_alone = False
            if not acts_alone:
                raise refuse(f"{what} mixes units, where only activations, dropout and pooling may be: {_OTHERWISE}")
    if not (_is_close(values[0], read) and _is_close(values[1], read_noise[0])):
        shown = ", ".join(described[1:-1]) or "nothing"
        raise refuse(
            f"{shown} is named between them, and more lies there: name all modules in the order of their calls, as in "
            "('fc1', 'act', 'fc2'), and make each function, such as F.relu, a module that is called, such as "
            f"nn.ReLU(). If outputs of two layers are multiplied, {_OTHERWISE}"
        )
    if axis != find_channel_axis(last) and read.dim() > 2:
        raise refuse("one of them has its channels last, and the other behind the batch")
    return Hidden(tuple(names), first, tuple(between), last, made[0].numel() // width, tuple(source.shape[1:]))


_OTHERWISE = "let another blueprint, such as 'mlp', grow behind the last layer instead"


def _refuse(names: Sequence[str], problem: str) -> SlotError:
    return SlotError(f"no units can be added between {names[0]!r} and {names[-1]!r}: {problem}")


def _is_wide_layer(module: nn.Module) -> TypeGuard[WideLayer]:
    """Whether a module is a linear layer or an ungrouped convolution whose weight can get more rows and columns.

    The result is False for subclasses that override forward, unless they are `Stackable`, and for weights and biases
    computed from other tensors (weight norm, pruning, parametrizations).
    """
    if not isinstance(module, WideLayer) or _find_plain_forward(module) is None or getattr(module, "groups", 1) != 1:
        return False
    parameters = dict(module.named_parameters(recurse=False))
    return parameters.keys() == {"weight"} | ({"bias"} if module.bias is not None else set())


def _find_plain_forward(layer: nn.Module) -> Callable[..., Any] | None:
    """The forward of torch's linear layers and convolutions that a module has, or stacks; None for others."""
    kinds = (kind for kind in _KINDS if isinstance(layer, kind))
    forwards = (kind.forward for kind in kinds if isinstance(layer, Stackable) or type(layer).forward is kind.forward)
    return next(forwards, None)


def is_unaltered(layer: nn.Module, call: LayerCall, output: Any) -> bool:
    """Whether a layer returned what its class computes, up to rounding, so that no hook or other forward changed it."""
    try:
        expected = (_find_plain_forward(layer) or type(layer).forward)(layer, *call.arguments, **call.keywords)
    except (TypeError, RuntimeError, AttributeError):  # other arguments, or the weight is elsewhere
        return False
    if not isinstance(output, Tensor):
        return False
    expected, output = (pad_nested(values) if values.is_nested else values for values in (expected, output))
    if (expected.shape, expected.dtype) != (output.shape, output.dtype):
        return False
    if expected.is_meta:  # no values to compare
        return True
    return torch.allclose(expected, output, rtol=0.01, atol=0.01 * float(expected.abs().max()), equal_nan=True)


def _run_in_eval(host: nn.Module, run: Callable[[], object], handles: Sequence[Any]) -> list[Tensor]:
    """The tensors that the host returns in evaluation mode; removes the hooks."""
    try:
        with keep_modes(host), keep_generators(host), torch.no_grad():
            host.eval()
            return [tensor.clone() for tensor in find_tensors(run())]
    finally:
        for handle in handles:
            handle.remove()


def _is_close(values: Tensor, expected: Tensor) -> bool:
    """Whether two results are equal up to rounding; infinite values must be the same."""
    if (values.shape, values.dtype) != (expected.shape, expected.dtype):
        return False
    if not expected.is_floating_point():
        return torch.equal(values, expected)
    finite = expected[expected.isfinite()].abs()
    tolerance = max(_CLOSE, 4 * torch.finfo(expected.dtype).eps) * (float(finite.max()) if len(finite) else 0.0)
    return torch.allclose(values, expected, rtol=0, atol=tolerance, equal_nan=True)
