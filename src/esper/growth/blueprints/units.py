"""More hidden units between two layers of a host; they become part of these layers when the model is finalized."""

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, ClassVar, TypeGuard, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import skip_init  # pyright: ignore[reportUnknownVariableType]
from torch.utils.hooks import RemovableHandle

from esper.errors import ExportError, SlotError
from esper.growth.blueprints.registry import (
    Blueprint,
    BlueprintCost,
    Context,
    Family,
    Folded,
    LayerCall,
    register,
    register_sizes,
)
from esper.growth.depth import copy_block
from esper.growth.hooks import find_submodule, find_tensors, is_close
from esper.growth.site import Hidden, Layout, Site, WideLayer, find_channel_axis
from esper.numerics.modules import Stackable, keep_generators, keep_modes

_SHARE = 8
"""``units`` adds one unit for this many existing ones."""
_LARGEST = 60.0
"""Largest standard deviation of the noise with which modules are compared."""
_KINDS = (nn.Linear, nn.Conv1d, nn.Conv2d)


@register
class Units(Blueprint):
    """``s = W2' f(W1' x + b1')``: more units between two layers ``W2 f(W1 x + b1) + b2``; ``W2' = 0`` at birth.

    ``x`` is the input of the first layer, and ``f`` consists of copies of the host's modules between the two, such as
    an activation and dropout. The layers are linear, or convolutions with the host's options. When the model is
    finalized, ``W1'`` and ``b1'`` become outputs of the first layer, and ``W2'`` inputs of the second.

    Widening as in Net2Net (Chen et al. 2015, arXiv 1511.05641), with new units that contribute nothing at birth as in
    GradMax (Evci et al. 2022, arXiv 2201.05125), faded in by alpha. ``units_K`` adds K units; ``units`` adds an eighth
    of the existing number, at least 1.
    """

    name, family, layouts = "units", Family.CHANNEL, frozenset(Layout)
    mixes_positions = False  # no more than the host itself does
    context = Context.HIDDEN
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
        first, last = (require_wide_layer(host, path, self.name) for path in (self._first_name, name))
        # Inputs that the first layer got from other units do not affect these ones.
        rows = self.first.weight.to(first.weight)
        padded = rows.new_zeros(len(rows), *first.weight.shape[1:])
        padded[:, : rows.shape[1]] = rows
        _set_weight(first, torch.cat([first.weight, padded]))
        if first.bias is not None and self.first.bias is not None:
            bias = torch.cat([first.bias, self.first.bias.to(first.bias)])
            first.bias = nn.Parameter(bias, first.bias.requires_grad)
        _set_weight(last, torch.cat([last.weight, weight * self.last.weight.to(last.weight)], dim=1))
        return Folded.WIDENED

    @classmethod
    def count_units(cls, site: Site) -> int:
        """Number of units at ``site``."""
        return cls.size or max(_require_hidden(site).width // _SHARE, 1)

    @classmethod
    def cost_at(cls, site: Site) -> BlueprintCost:
        # One unit has a row and perhaps a bias of the first layer, and a column of the last one.
        hidden = _require_hidden(site)
        units, row = cls.count_units(site), hidden.first.weight[0].numel()
        parameters = row + (hidden.first.bias is not None) + hidden.last.weight[:, 0].numel()
        # The row is applied at each of the unit's positions, the column at each output.
        products = hidden.positions * row + math.prod((*site.shape, *hidden.last.weight.shape[2:]))
        return BlueprintCost(units * parameters, 2 * units * products)

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
    """Give a layer a new weight ``[outputs, inputs, *kernel]``; one that shares the old one keeps it."""
    layer.weight = nn.Parameter(weight, layer.weight.requires_grad)
    if isinstance(layer, nn.Linear):
        layer.out_features, layer.in_features = weight.shape
    else:
        layer.out_channels, layer.in_channels = weight.shape[:2]


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
    """The hidden units between the layers ``names[0]`` and ``names[-1]``, with the modules between them in order.

    One comparison shows that these modules act on each unit alone, and that nothing else lies between: if the first
    layer returns noise, the last one gets what they make of these units among others. ``run`` calls the host with its
    example input.
    """
    first, *between, last = modules = [find_submodule(host, name) for name in names]
    described = [f"{name!r} ({type(module).__name__})" for name, module in zip(names, modules, strict=True)]

    def refuse(problem: str) -> SlotError:
        return SlotError(f"no units can be added between {names[0]!r} and {names[-1]!r}: {problem}")

    if not is_wide_layer(first) or not is_wide_layer(last):
        raise refuse(
            f"{described[-1] if is_wide_layer(first) else described[0]} is not a plain linear layer or convolution "
            "(groups=1) with a weight and a bias of its own"
        )
    otherwise = "let another blueprint, such as 'mlp', grow behind the last layer instead"
    for part, what in zip(between, described[1:], strict=False):
        if [*part.parameters(), *part.buffers()]:
            raise refuse(f"{what} has parameters or buffers, as norms and gates have: {otherwise}")
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

    returned = _run_with_hooks(
        host, run, [layer.register_forward_hook(record, with_kwargs=True) for layer in (first, last)]
    )
    if [layer for layer, *_ in calls] != [first, last]:
        raise refuse(f"{described[0]} and {described[-1]} have to be called once each in a forward pass, in this order")
    (_, _, source, made), (_, _, read, _) = calls
    # The first layer returns noise for some of more units, while the last layer gets its former input.
    axis, width = find_channel_axis(first), first.weight.shape[0]
    if axis != find_channel_axis(last) and read.dim() > 2:
        raise refuse("one of them has its channels last, and the other behind the batch")
    shape = list(made.shape)
    shape[axis] = 2 * width + 5
    generator = torch.Generator().manual_seed(0)
    scale = _LARGEST * torch.rand(shape, generator=generator) ** 4  # of any size, as clamps act on large values only
    more = (scale * torch.randn(shape, generator=generator)).to(made)
    some = torch.arange(1, 2 * width, 2, device=made.device)
    noise = more.index_select(axis, some)
    read_noise: list[Tensor] = []

    def make_noise(*_: object) -> Tensor:
        return noise.clone()

    def read_former(_: nn.Module, arguments: tuple[Tensor, ...]) -> Tensor:
        read_noise.append(arguments[0].clone())
        return read.clone()

    hooks = [first.register_forward_hook(make_noise), last.register_forward_pre_hook(read_former)]
    others = _run_with_hooks(host, run, hooks)
    if len(returned) != len(others) or not all(map(is_close, others, returned)):
        raise refuse("what the first layer returns is used elsewhere, too")
    # The modules between have to make of more units, for some of them, what the last layer got.
    with keep_modes(host), keep_generators(host), torch.no_grad():
        host.eval()
        try:
            values = more
            for part in between:
                values = part(values.clone())  # it may work in place
            acts_alone = is_close(values.index_select(axis, some), read_noise[0])
        except (RuntimeError, ValueError, TypeError, IndexError, AttributeError):  # one is for a number of units
            acts_alone = False
    if not acts_alone:
        raise refuse(
            f"{', '.join(described[1:-1]) or 'nothing'} is named between them, and more lies there or units are mixed: "
            "name all modules in the order of their calls, as in ('fc1', 'act', 'fc2'), and make each function, such "
            "as F.relu, a module that is called, such as nn.ReLU(). Where outputs of two layers are multiplied, or "
            f"units normalised, {otherwise}"
        )
    return Hidden(tuple(names), first, tuple(between), last, made[0].numel() // width, tuple(source.shape[1:]))


def is_wide_layer(module: nn.Module) -> TypeGuard[WideLayer]:
    """Whether a module is a linear layer or an ungrouped convolution whose weight can get more rows and columns.

    The result is False for subclasses that override forward, unless they are `Stackable`, and for weights and biases
    computed from other tensors (weight norm, pruning, parametrizations).
    """
    if not isinstance(module, WideLayer) or _find_plain_forward(module) is None or getattr(module, "groups", 1) != 1:
        return False
    parameters = dict(module.named_parameters(recurse=False))
    return parameters.keys() == {"weight"} | ({"bias"} if module.bias is not None else set())


def require_wide_layer(host: nn.Module, path: str, blueprint: str) -> WideLayer:
    """The submodule ``path`` of a plain host, if something can be added to its weight."""
    layer = host.get_submodule(path)
    if not is_wide_layer(layer):
        raise ExportError(
            f"the weight or bias of {path!r} is now computed from other tensors, as by a weight norm or pruning added "
            f"after {blueprint!r} grew there, so nothing can be added to it: remove that before finalize()"
        )
    return layer


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
    if not isinstance(output, Tensor) or output.is_nested:
        return False
    return expected.is_meta or is_close(output, expected, tolerance=0.01)


def _run_with_hooks(host: nn.Module, run: Callable[[], object], hooks: Sequence[RemovableHandle]) -> list[Tensor]:
    """The tensors that the host returns in evaluation mode; removes the hooks."""
    try:
        with keep_modes(host), keep_generators(host), torch.no_grad():
            host.eval()
            return [tensor.clone() for tensor in find_tensors(run())]
    finally:
        for hook in hooks:
            hook.remove()
