"""Passes on the side, of which nothing remains; by them, what a model's loss asks for at every place, per example."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from esper.config.arguments import describe_value
from esper.errors import LookError
from esper.growth.blueprints.registry import LayerCall
from esper.growth.seed import Seed
from esper.growth.slot import Slot


@contextmanager
def side_pass(network: nn.Module, seeds: Iterable[Seed]) -> Generator[None]:
    """Within the block ``seeds`` of ``network`` count fully, in isolation or not.

    What forward passes there do to buffers is lost, and the random numbers that they draw are drawn again afterwards.
    The buffers are other tensors meanwhile, so a pass from before the block can still be differentiated after it.
    Nobody listens to the slots.
    """
    listeners = [(module, module.listener) for module in network.modules() if isinstance(module, Slot)]
    buffers = [(module, *named) for module in network.modules() for named in module.named_buffers(recurse=False)]
    for module, name, buffer in buffers:
        setattr(module, name, buffer.clone())
    for slot, _ in listeners:
        slot.feature_hook = None
    try:
        with ExitStack() as weights:
            weights.enter_context(keep_generators(network))
            for seed in seeds:
                weights.enter_context(seed.weigh(1.0))
            yield
    finally:
        for module, name, buffer in buffers:
            setattr(module, name, buffer)
        for slot, listener in listeners:
            slot.feature_hook = listener


@contextmanager
def keep_generators(network: nn.Module) -> Generator[None]:
    """Afterwards torch's random numbers go on as if nothing had drawn any within the block."""
    states = [(generator, generator.get_state()) for generator in global_generators(network)]
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)


def global_generators(network: nn.Module) -> list[torch.Generator]:
    """Torch's own sources of randomness: of the CPU, and of all CUDA devices in use by ``network``."""
    devices = {parameter.device.index for parameter in network.parameters() if parameter.is_cuda}
    return [torch.default_generator, *(torch.cuda.default_generators[device] for device in sorted(devices))]


@contextmanager
def keep_modes(network: nn.Module) -> Generator[None]:
    """Afterwards every module of ``network`` is in the mode in which it was before, also where modes are mixed."""
    modes = [(module, module.training) for module in network.modules()]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@dataclass
class Asked:
    """What is asked of one module's output, over the examples that were looked at."""

    arguments: list[tuple[Tensor, ...]] = field(default_factory=list[tuple[Tensor, ...]])
    """What the module was called with, a batch each."""
    features: list[Tensor] = field(default_factory=list[Tensor])
    """Outputs of the calls, ``[B, ...]`` each."""
    wishes: list[Tensor] = field(default_factory=list[Tensor])
    """Gradient of each example's loss with respect to that, ``[B, ...]``."""
    firsts: list[Tensor] = field(default_factory=list[Tensor])
    """First arguments of the calls, where each was a tensor; otherwise there are fewer than calls."""
    alone: bool = True
    """Whether no call had any other argument that says anything."""


@dataclass
class _Call:
    """One call of a module in the forward pass under way."""

    arguments: tuple[Tensor, ...]
    features: Tensor
    first: Tensor | None
    alone: bool
    leaf: Tensor
    """Zeros that were added to the features: their gradient is that of the features, frozen or not."""


class FeatureRecorder:
    """Forward hooks that note what modules are called with and return, and let a gradient be asked for.

    Args:
        modules: By name.
        first: Whether the hooks come before the others that the modules have, such as growth slots.
        arguments: Whether to keep what modules are called with, and pass over calls with anything but tensors.
    """

    def __init__(self, modules: Mapping[str, nn.Module], *, first: bool, arguments: bool) -> None:
        self.asked = {name: RecordedGradients() for name in modules}
        self._keeps_arguments = arguments
        self._calls: dict[str, list[_Call]] = {name: [] for name in modules}
        self._handles = [
            module.register_forward_hook(self._hook(name), prepend=first, with_kwargs=True)
            for name, module in modules.items()
        ]

    def _hook(self, name: str) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Any], Any]:
        def note(_: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> Any:
            if not isinstance(output, Tensor) or not output.is_floating_point():
                return output
            leaf = torch.zeros_like(output, requires_grad=True)
            tensors = tuple(one.detach() for one in arguments if isinstance(one, Tensor))
            if self._keeps_arguments and (not tensors or len(tensors) < len(arguments)):
                return output
            call = LayerCall(arguments, keywords)
            kept, first = tensors if self._keeps_arguments else (), call.first_argument
            kept_first = None if first is None else first.detach()
            self._calls[name].append(_Call(kept, output.detach(), kept_first, call.has_single_argument, leaf))
            return output + leaf

        return note

    def leaves(self) -> Iterator[Tensor]:
        """Those of the calls of the pass under way, module by module."""
        return (call.leaf for calls in self._calls.values() for call in calls)

    def keep(self, gradients: Iterator[Tensor | None], count: int) -> None:
        """What was asked in the pass under way by its ``count`` examples; ``gradients`` belong to `leaves`.

        Modules that did not run once, for one batch whose examples come first, are given up.
        """
        for name, calls in self._calls.items():
            gradients_of_calls = [(call, next(gradients)) for call in calls]
            calls.clear()
            if name not in self.asked:
                continue
            if len(gradients_of_calls) != 1 or len(gradients_of_calls[0][0].features) != count:
                del self.asked[name]
                continue
            call, gradient = gradients_of_calls[0]
            asked = self.asked[name]
            asked.arguments.append(call.arguments)
            asked.features.append(call.features)
            asked.alone &= call.has_single_argument
            if call.first_argument is not None:
                asked.firsts.append(call.first_argument)
            asked.gradients.append(torch.zeros_like(call.features) if gradient is None else gradient)

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()


@dataclass(frozen=True)
class Measured:
    """What came of the passes."""

    examples: int
    loss: float
    """Mean over them."""


def ask(
    model: nn.Module,
    recorders: Iterable[FeatureRecorder],
    loss: Callable[[Any, Any], Any],
    batches: Iterable[Any],
    examples: int,
    after: Callable[[], object],
) -> Measured:
    """Run ``loss(model, batch)`` until ``examples`` were seen, and let ``recorders`` note all they can.

    It is called within `quietly`. ``after`` is called after each batch's forward and backward pass.

    Raises:
        LookError: the loss is not one number per example, nor their mean; it is not finite; no gradient follows from
            it; or there are no batches.
    """
    recorders, seen, total = list(recorders), 0, 0.0
    for batch in batches:
        losses = loss(model, batch)
        leaves = [leaf for recorder in recorders for leaf in recorder.leaves()]
        count = len(leaves[0]) if leaves else 0
        summed = _sum(losses, count)
        gradients = iter(torch.autograd.grad(summed, leaves, allow_unused=True))
        for recorder in recorders:
            recorder.keep(gradients, count)
        after()
        seen, total = seen + count, total + float(summed.detach())
        if seen >= examples:
            break
    if seen < 2:
        raise LookError(f"batches held {seen} examples: give two or more, in batches that loss(model, batch) takes")
    return Measured(seen, total / seen)


def _sum(losses: Any, count: int) -> Tensor:
    """Over the examples of a batch."""
    if not isinstance(losses, Tensor):
        raise LookError(
            f"loss(model, batch) returned {describe_value(losses)}: return a tensor [B], the loss of each example"
        )
    if not count:
        raise LookError("loss(model, batch) called no module with a slot: call the model that it is given, as a whole")
    if losses.dim() and losses.shape != (count,):
        raise LookError(
            f"loss(model, batch) returned shape {tuple(losses.shape)} for a batch of {count} examples: return "
            f"[{count}], the loss of each example (a sequence is one example: the mean over its tokens), or their mean"
        )
    if not losses.requires_grad:
        raise LookError("no gradient follows from what loss(model, batch) returned: leave out detach() and no_grad()")
    if not bool(losses.isfinite().all()):
        raise LookError("loss(model, batch) is not finite: look at the model before it diverges")
    return losses.sum() if losses.dim() else losses * count


@contextmanager
def quietly(model: nn.Module) -> Generator[None]:
    """Within the block ``model`` is in evaluation mode, differentiable and uncompiled.

    Nothing of it remains: modes, buffers and random numbers are as they were.
    """
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        if any(isinstance(module, nn.RNNBase) for module in model.modules()):
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))  # its RNNs learn in training mode only
        stack.enter_context(side_pass(model, ()))
        stack.enter_context(keep_modes(model))
        model.eval()
        yield
