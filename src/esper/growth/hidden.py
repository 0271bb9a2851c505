"""Find hidden units of a host to which others can be added, and the operations between the layers around them.

The first layers compute the units, the last layer takes them as input. The operations in between are found by calling
the host with noise as the outputs of the first layers. The noise is followed by value through the calls of modules, up
to the input of the last layer. Where no module takes the values, common activation functions are tried.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from esper.errors import SlotError, did_you_mean
from esper.growth.blueprints.registry import LayerCall
from esper.growth.positions import drop_caches, list_argument_names, pad_nested
from esper.growth.site import Hidden, Site, Step
from esper.growth.taps import find_tensors, list_named_modules
from esper.growth.widening import find_channel_axis, get_plain_forward, get_weight_shape, is_plain_norm, is_widenable
from esper.numerics.module_state import keep_generators, keep_modes

_NOISE = 3.0
"""Standard deviation of the noise, so large that activations which are similar near zero differ."""
_FAR = 30.0
"""Factor of the noise for a second check, because clamps act only on large values."""
_CLOSE = 1e-5
"""Tolerance between two ways of computing a function, relative to the largest value."""


class SquaredReLU(nn.Module):
    """``relu(x)^2``, from Primer (So et al. 2021, arXiv 2109.08668)."""

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.relu(inputs).square()


FUNCTIONS: tuple[nn.Module, ...] = (
    nn.ReLU(),
    nn.GELU(),
    nn.GELU("tanh"),
    nn.SiLU(),
    nn.Tanh(),
    nn.Sigmoid(),
    nn.LeakyReLU(),
    nn.ELU(),
    nn.SELU(),
    nn.Softplus(),
    nn.Mish(),
    nn.ReLU6(),
    nn.Hardtanh(),
    nn.Hardswish(),
    nn.Hardsigmoid(),
    nn.LogSigmoid(),
    nn.Softsign(),
    SquaredReLU(),
)
"""Activation functions that a host may call between two layers without a module."""


@dataclass(frozen=True)
class LayerPair:
    """Names of the layers that compute hidden units of a host, and of the layer that takes them as input."""

    makers: tuple[str, ...]
    """One layer, or the two of a gated MLP."""
    reader: str


def find_hidden(host: nn.Module, pairs: Collection[LayerPair], run: Callable[[], object]) -> dict[str, Hidden]:
    """The hidden units of each pair, by the name of the layer that takes them as input.

    Args:
        host: Any module.
        pairs: Names of layers.
        run: Calls the host with its example input.

    Raises:
        SlotError: there is no such layer, or it is no linear layer nor a convolution; or what lies between the layers
            is not done to each unit by itself.
    """
    modules = dict(list_named_modules(host, remove_duplicate=False))
    for name in [name for pair in pairs for name in (*pair.makers, pair.reader)]:
        if name not in modules:
            raise SlotError(f"the host has no submodule {name!r}{did_you_mean(name, modules) or ''}")
    # The calls of all modules around each pair, to call only the innermost one.
    around = {pair: _list_around((*pair.makers, pair.reader)) for pair in pairs}
    names = {name for path in around.values() for name in path if name}
    calls, _ = _record_calls({name: modules[name] for name in names}, host, run)
    found: dict[str, Hidden] = {}
    for pair, path in around.items():
        name = next((name for name in path if len(calls.get(name, ())) == 1), "")
        found[pair.reader] = _Trace(host, pair, name, _make_call(modules[name], calls[name][0]) if name else run).find()
    return found


def find_pairs(host: nn.Module, containers: Collection[str], run: Callable[[], object]) -> dict[str, LayerPair]:
    """The one pair of layers in each submodule of ``containers`` between which units can be added.

    Args:
        host: Any module.
        containers: Names of submodules, such as the MLPs of a transformer.
        run: Calls the host with its example input.

    Raises:
        SlotError: a submodule contains no such pair, or several.
    """
    modules = dict(list_named_modules(host))
    for name in containers:
        if name not in modules:
            hint = did_you_mean(name, modules) or "; print(model) shows the names"
            raise SlotError(f"the host has no submodule {name!r}{hint}")
    layers = {name: part for name, part in modules.items() if is_widenable(part)}
    inside = {
        container: {name: part for name, part in layers.items() if name.startswith(f"{container}.")}
        for container in containers
    }
    recorded = {name: modules[name] for name in {*containers, *(name for part in inside.values() for name in part)}}
    calls, order = _record_calls(recorded, host, run)
    found: dict[str, LayerPair] = {}
    for container in containers:
        names = [name for name in order if name in inside[container]]
        if len(names) < 2 or len(calls.get(container, ())) != 1:
            raise SlotError(
                f"submodule {container!r} ({type(modules[container]).__name__}) has no two linear layers or "
                "convolutions, called once each, between which units can be added: name the layers, as in ('fc1', "
                "'fc2')"
            )
        # Layers that follow each other; in a gated MLP the two before the last have the same input.
        candidates = [LayerPair((maker,), reader) for maker, reader in itertools.pairwise(names)]
        for gate, up, reader in zip(names, names[1:], names[2:], strict=False):
            first, second = (calls[name][0].first_argument for name in (gate, up))
            if first is not None and second is not None and _is_same(first, second):
                candidates.append(LayerPair((gate, up), reader))
        valid, problems = list[LayerPair](), list[SlotError]()
        for candidate in candidates:
            try:
                _Trace(host, candidate, container, _make_call(modules[container], calls[container][0])).find()
                valid.append(candidate)
            except SlotError as problem:
                problems.append(problem)
        if not valid and len(candidates) == 1:
            raise problems[0]
        if len(valid) != 1:
            shown = ", ".join(str((*pair.makers, pair.reader)) for pair in valid) or f"layers are {', '.join(names)}"
            raise SlotError(
                f"submodule {container!r} holds {len(valid)} pairs of layers between which units can be added "
                f"({shown}): name the layers, as in ('fc1', 'fc2')"
            )
        found[container] = valid[0]
    return found


def measure_site(site: Site, host: nn.Module, width: int) -> tuple[int, ...]:
    """The sizes that distinguish sites of `fit_site`: the width, and the numbers of hidden units and their inputs."""
    if site.hidden is None:
        return (width,)
    return (width, *get_weight_shape(host.get_submodule(site.hidden.names[0]))[:2])


def fit_site(site: Site, host: nn.Module, width: int) -> Site:
    """The site in a host of the same architecture, which has ``width`` channels there and may be narrower elsewhere."""
    fitted, hidden = site.with_width(width), site.hidden
    if hidden is None:
        return fitted
    layers = tuple(host.get_submodule(name) for name in hidden.names)
    units, channels = get_weight_shape(layers[0])[:2]
    shape = list(hidden.input_shape)
    shape[0 if find_channel_axis(layers[0]) == 1 else -1] = channels
    return replace(
        fitted,
        hidden=replace(
            hidden,
            layers=layers,
            reader=host.get_submodule(hidden.reader_name),
            width=units,
            input_shape=tuple(shape),
        ),
    )


def is_unaltered(layer: nn.Module, call: LayerCall, output: Any) -> bool:
    """Whether a layer returned what its class computes, up to rounding, so that no hook or other forward changed it."""
    try:
        expected = _pad_if_nested(get_plain_forward(layer)(layer, *call.arguments, **call.keywords))
    except (TypeError, RuntimeError, AttributeError):  # other arguments, or the weight is elsewhere
        return False
    output = _pad_if_nested(output)
    if not isinstance(output, Tensor) or (expected.shape, expected.dtype) != (output.shape, output.dtype):
        return False
    if expected.is_meta:  # no values to compare
        return True
    return torch.allclose(expected, output, rtol=0.01, atol=0.01 * float(expected.abs().max()), equal_nan=True)


def _list_around(names: Sequence[str]) -> list[str]:
    """Names of the modules that contain all of ``names``, from the inside out; the last is the host."""
    parts = [name.split(".")[:-1] for name in names]
    shared = len(list(itertools.takewhile(lambda group: len(set(group)) == 1, zip(*parts, strict=False))))
    return [".".join(parts[0][:length]) for length in range(shared, -1, -1)]


def _record_calls(
    modules: Mapping[str, nn.Module], host: nn.Module, run: Callable[[], object]
) -> tuple[dict[str, list[LayerCall]], list[str]]:
    """All calls of ``modules`` while the host runs in evaluation mode, and their names in the order of first calls."""
    calls: dict[str, list[LayerCall]] = {}
    order: dict[str, None] = {}

    def record(name: str, _: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        calls.setdefault(name, []).append(LayerCall(arguments, keywords))
        order[name] = None

    handles = [
        module.register_forward_pre_hook(partial(record, name), with_kwargs=True)
        for name, module in modules.items()
        if not isinstance(module, torch.jit.ScriptModule)
    ]
    with _evaluating(host):
        try:
            run()
        finally:
            for handle in handles:
                handle.remove()
    return calls, list(order)


@contextmanager
def _evaluating(host: nn.Module) -> Generator[None]:
    with keep_modes(host), keep_generators(host), torch.no_grad():
        host.eval()
        yield


def _make_call(module: nn.Module, call: LayerCall) -> Callable[[], object]:
    """A function that calls ``module`` with copies of the same arguments, without caches."""
    arguments, keywords = drop_caches(list_argument_names(module), call.arguments, call.keywords)

    def run() -> object:
        copies = [value.clone() if isinstance(value, Tensor) else value for value in arguments]
        return module(*copies, **keywords)

    return run


def _is_same(first: Tensor, second: Tensor) -> bool:
    return first.shape == second.shape and first.dtype == second.dtype and torch.equal(first, second)


@dataclass
class _Called:
    """One call of a module between two layers."""

    name: str
    module: nn.Module
    inputs: Tensor
    output: Tensor | None = None
    inner: list[_Called] = field(default_factory=list["_Called"])


class _Trace:
    """Traces the outputs of some layers up to the input of another layer.

    Args:
        host: Any module.
        pair: Names of the layers.
        around: Name of a submodule that contains all these layers; ``""`` is the host.
        run: Calls that submodule.
    """

    def __init__(self, host: nn.Module, pair: LayerPair, around: str, run: Callable[[], object]) -> None:
        self._host, self._pair, self._around, self._run = host, pair, around, run
        self._makers = [host.get_submodule(name) for name in pair.makers]
        self._reader = host.get_submodule(pair.reader)
        self._calls: list[_Called] = []
        """Calls between the layers, without nested calls."""
        self._target = torch.empty(0)
        """The input of the last layer."""

    def find(self) -> Hidden:
        """The hidden units.

        Raises:
            SlotError: there are no units to which others can be added.
        """
        for name, layer in zip((*self._pair.makers, self._pair.reader), (*self._makers, self._reader), strict=True):
            if not is_widenable(layer):
                raise self._refuse(
                    f"{name!r} ({type(layer).__name__}) is no plain linear layer or convolution (groups=1) with a "
                    "weight and a bias of its own"
                )
        if len(self._makers) > 2 or len({get_weight_shape(layer)[0] for layer in self._makers}) > 1:
            raise self._refuse("units are made by one layer, or by two of one width whose outputs are multiplied")
        with _evaluating(self._host):
            # The unchanged call: arguments and outputs of the layers, and the output of the module around them.
            calls, outputs, returned = self._call_plainly()
            source, first = calls[0].first_argument, calls[-1].first_argument
            assert source is not None
            assert first is not None
            # With noise in place of the outputs, while the last layer gets its original input.
            like = outputs[0]
            generator = torch.Generator(like.device).manual_seed(0)
            noises = [
                _NOISE * torch.randn(output.shape, generator=generator, device=output.device).to(output.dtype)
                for output in outputs[:-1]
            ]
            others = self._call_with_noise(noises, first)
            if len(returned) != len(others) or not all(map(_is_same, returned, others)):
                raise self._refuse("what the first layer returns is read elsewhere, too")
            # Follow each noise, then the product.
            steps, ends = zip(*(self._follow(noise) for noise in noises), strict=True)
            after: list[Step] = []
            if len(noises) == 1:
                value, problem = ends[0]
                if not _is_same(value, self._target):
                    raise self._refuse(problem)
            else:
                after = self._multiply(steps, [value for value, _ in ends])
            # The same must hold far from zero.
            far = [_FAR * noise for noise in noises]
            self._call_with_noise(far, first)
            values = [_compute(chain, value) for chain, value in zip(steps, far, strict=True)]
            if not _is_close(_compute(after, math.prod(values[1:], start=values[0])), self._target):
                shown = ", ".join(_describe(step) for step in (*itertools.chain(*steps), *after)) or "nothing"
                raise self._refuse(
                    f"what lies between is {shown} near zero, but not at large values, as where values are clamped: "
                    "make it a module that is called, such as nn.Hardtanh() or one of your own"
                )
            maker_axis, reader_axis = map(find_channel_axis, (self._makers[0], self._reader))
            if maker_axis != reader_axis and self._target.dim() > 2:
                raise self._refuse("one of them has its channels last, and the other behind the batch")
        width = get_weight_shape(self._makers[0])[0]
        return Hidden(
            self._pair.makers,
            tuple(self._makers),
            self._pair.reader,
            self._reader,
            tuple(map(tuple, steps)),
            tuple(after),
            width,
            like[0].numel() // width,
            tuple(source.shape[1:]),
        )

    def _refuse(self, problem: str) -> SlotError:
        makers = " and ".join(map(repr, self._pair.makers))
        return SlotError(f"no units can be added between {makers} and {self._pair.reader!r}: {problem}")

    def _call_plainly(self) -> tuple[list[LayerCall], list[Tensor], list[Tensor]]:
        """Calls and outputs of the layers, and the tensors returned by the module around them."""
        layers = {**dict(zip(self._pair.makers, self._makers, strict=True)), self._pair.reader: self._reader}
        calls: dict[str, list[tuple[LayerCall, Any, bool]]] = {name: [] for name in layers}
        read: list[tuple[Tensor, Tensor]] = []
        changed = False

        def record(
            name: str, layer: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Any
        ) -> None:
            nonlocal changed
            call = LayerCall(tuple(_copy(value) for value in arguments), {k: _copy(v) for k, v in keywords.items()})
            if layer is self._reader:
                changed = not all(_is_same(live, before) for live, before in read)
            else:
                live, before = LayerCall(arguments, keywords).first_argument, call.first_argument
                if live is not None and before is not None and not live.is_nested:
                    read.append((live, before))
            calls[name].append((call, _copy(output), is_unaltered(layer, LayerCall(arguments, keywords), output)))

        handles = [
            layer.register_forward_hook(partial(record, name), with_kwargs=True) for name, layer in layers.items()
        ]
        try:
            returned = [tensor.clone() for tensor in find_tensors(self._run())]
        finally:
            for handle in handles:
                handle.remove()
        for name, recorded in calls.items():
            if len(recorded) != 1:
                raise self._refuse(f"{name!r} is called {len(recorded)} times in a forward pass, and not once")
            call, output, unaltered = recorded[0]
            if not isinstance(output, Tensor) or output.is_nested:
                raise self._refuse(
                    f"{name!r} returns no dense tensor: leave padding out of the example input, or build torch's "
                    "TransformerEncoder with enable_nested_tensor=False"
                )
            if not call.has_single_argument or call.first_argument is None:
                raise self._refuse(f"{name!r} is called with something else than one tensor")
            if not unaltered:
                raise self._refuse(f"a hook on {name!r}, or a forward of the instance, changes what it returns")
        if changed:
            raise self._refuse("the input of the first layer is changed in place before the second one runs")
        recorded = [calls[name][0] for name in layers]
        sources = [call.first_argument for call, _, _ in recorded[:-1]]
        if any(other is None or not _is_same(sources[0], other) for other in sources[1:] if sources[0] is not None):
            raise self._refuse("they have different inputs")
        return [call for call, _, _ in recorded], [output for _, output, _ in recorded], returned

    def _call_with_noise(self, noises: list[Tensor], first: Tensor) -> list[Tensor]:
        """Call with ``noises`` as outputs and ``first`` as the input of the last layer, and record calls in between."""
        made = 0
        stack: list[_Called] = []
        done = False

        def make(noise: Tensor, *_: Any) -> Tensor:
            nonlocal made
            made += 1
            return noise.clone()

        def begin(name: str, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            inputs = LayerCall(arguments, keywords).first_argument
            if made and not done and inputs is not None:
                stack.append(_Called(name, module, inputs.clone()))

        def end(_: str, module: nn.Module, __: Any, output: Any) -> None:
            if not stack or stack[-1].module is not module:
                return
            called = stack.pop()
            if done:
                return
            called.output = output.clone() if isinstance(output, Tensor) else None
            (stack[-1].inner if stack else self._calls).append(called)

        def read(_: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            nonlocal done
            if made == len(noises):
                self._target, done = arguments[0].clone(), True
            # Calls that have not ended contain the last layer, so calls that ended inside them count.
            for called in stack:
                self._calls.extend(called.inner)
            stack.clear()
            return (first.clone(),)

        layers = {*self._makers, self._reader}
        handles = [
            layer.register_forward_hook(partial(make, noise)) for layer, noise in zip(self._makers, noises, strict=True)
        ]
        handles.append(self._reader.register_forward_pre_hook(read))
        within = self._host.get_submodule(self._around)
        for name, module in list_named_modules(within):
            if module not in layers and module is not within and not isinstance(module, torch.jit.ScriptModule):
                path = f"{self._around}.{name}" if self._around else name
                handles.append(module.register_forward_pre_hook(partial(begin, path), with_kwargs=True))
                handles.append(module.register_forward_hook(partial(end, path)))
        try:
            returned = [tensor.clone() for tensor in find_tensors(self._run())]
        finally:
            for handle in handles:
                handle.remove()
        if not done:
            raise self._refuse("the second layer does not run after the first")
        return returned

    def _follow(self, value: Tensor) -> tuple[list[Step], tuple[Tensor, str]]:
        """The steps that can be followed from ``value``, the last value, and the reason for stopping."""
        steps: list[Step] = []
        left = list(self._calls)
        problem = ""
        while True:
            called = next((called for called in left if _is_same(called.inputs, value)), None)
            if called is not None:
                left.remove(called)
                inner, value = self._take(called)
                steps += inner
                continue
            if _is_same(value, self._target):
                break
            # No module takes the value, so a function is called, and its result goes to a module or the last layer.
            function = _find_function(value, [*(called.inputs for called in left), self._target])
            if function is None:
                following = next(iter(left), None)
                problem = "what follows" if not steps else f"what follows {_describe(steps[-1])}"
                problem += (
                    "" if following is None else f", before {following.name!r} ({type(following.module).__name__}),"
                )
                problem += (
                    " is no function of each unit that is known here: make it a module that is called, such as "
                    "nn.ReLU() or one of your own"
                )
                break
            step, value = function
            steps.append(step)
        return steps, (value, problem)

    def _take(self, called: _Called) -> tuple[list[Step], Tensor]:
        """The steps of one call of a module, and its output."""
        what = f"{called.name!r} ({type(called.module).__name__})"
        if called.output is None:
            raise self._refuse(f"{what} returns no tensor")
        state = [*called.module.parameters(), *called.module.buffers()]
        if is_plain_norm(called.module):
            if called.inputs.dim() > 2 and find_channel_axis(self._makers[0]) != 1:
                raise self._refuse(f"the channels of {what} are the second axis, and the units are the last one")
            return [Step(called.module, called.name)], called.output
        if not state and self._is_unitwise(called):
            return [Step(called.module, called.name)], called.output
        # A container of modules that are applied to each unit separately.
        if called.inner:
            value, steps = called.inputs, list[Step]()
            for inner in called.inner:
                if not _is_same(inner.inputs, value):
                    raise self._refuse(f"{what} calls something else than modules in turn")
                more, value = self._take(inner)
                steps += more
            if _is_same(value, called.output):
                return steps, value
        raise self._refuse(
            f"{what} has parameters or buffers, which only batch normalisation may have here"
            if state
            else f"{what} mixes units, where only activations, dropout, pooling and batch normalisation may be"
        )

    def _is_unitwise(self, called: _Called) -> bool:
        """Whether a module applies the same operation to each unit separately."""
        axis = find_channel_axis(self._makers[0])
        output = called.output
        assert output is not None
        if output.dim() <= axis or output.shape[axis] != called.inputs.shape[axis]:
            return False
        # The result for a unit must not depend on the order, the values or the number of the others.
        inputs, width = called.inputs, called.inputs.shape[axis]
        changed = inputs.clone()
        changed.narrow(axis, 0, 1).neg_().add_(1)
        more = torch.cat([inputs, inputs.narrow(axis, 0, 1)], axis)
        expected = torch.cat([output, output.narrow(axis, 0, 1)], axis)
        try:
            return (
                _is_close(called.module(inputs.flip(axis)).flip(axis), output)
                and _is_close(*(part.narrow(axis, 1, width - 1) for part in (called.module(changed), output)))
                and _is_close(called.module(more), expected)
            )
        except RuntimeError:  # it depends on the number of units
            return False

    def _multiply(self, steps: Sequence[list[Step]], values: Sequence[Tensor]) -> list[Step]:
        """The steps after the product of two values; one of them may have another function before it."""
        readers = [*(called.inputs for called in self._calls), self._target]
        functions: list[nn.Module | None] = [None, *FUNCTIONS]
        for place, function in itertools.product((0, 1), functions):
            factors = list(values)
            if function is not None:
                factors[place] = function(values[place].clone())
            product = factors[0] * factors[1]
            exact = next((reader for reader in readers if _is_result(product, reader)), None)
            if exact is not None:
                if function is not None:
                    steps[place].append(Step(function))
                after, (value, problem) = self._follow(exact)
                if not _is_same(value, self._target):
                    raise self._refuse(problem)
                return after
        raise self._refuse("their outputs are not multiplied, with an activation of one of them")


def _find_function(value: Tensor, readers: Sequence[Tensor]) -> tuple[Step, Tensor] | None:
    """A known function of ``value`` whose result is among ``readers``, with an exact match preferred."""
    for same in (_is_same, _is_result):
        for function in FUNCTIONS:
            result: Tensor = function(value.clone())
            for reader in readers:
                if same(result, reader):
                    return Step(function), reader
    return None


def _is_result(first: Tensor, second: Tensor) -> bool:
    """Whether two results are equal; activations may differ by less than the rounding of half precision."""
    return _is_same(first, second) or (first.dtype.itemsize >= torch.float32.itemsize and _is_close(first, second))


def _compute(steps: Iterable[Step], value: Tensor) -> Tensor:
    """The value after the steps, which may work in place."""
    for step in steps:
        value = step.module(value.clone())
    return value


def _is_close(first: Tensor, second: Tensor) -> bool:
    if first.shape != second.shape or first.dtype != second.dtype or not second.numel():
        return first.shape == second.shape
    tolerance = max(_CLOSE, 4 * torch.finfo(first.dtype).eps)
    return torch.allclose(first, second, rtol=0, atol=tolerance * float(second.abs().max()))


def _pad_if_nested(output: Any) -> Any:
    return pad_nested(output) if isinstance(output, Tensor) and output.is_nested else output


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _describe(step: Step) -> str:
    return f"{step.name!r} ({type(step.module).__name__})" if step.name else type(step.module).__name__
