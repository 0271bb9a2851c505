"""Passes without side effects on a model, and functional gradients of its loss per example, measured with them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from esper.config.arguments import describe_value
from esper.errors import LookError, plural
from esper.growth.blueprints.registry import LayerCall
from esper.growth.seed import Seed
from esper.growth.slot import Slot
from esper.growth.taps import find_features, holds_features, replace_features
from esper.numerics.module_state import keep_buffers, keep_generators, keep_modes


@contextmanager
def side_pass(network: nn.Module, seeds: Iterable[Seed]) -> Generator[None]:
    """Context manager in which ``seeds`` of ``network`` are at full weight, and passes have no side effects.

    Changes of buffers are undone, and random generators are restored. The buffers are other tensors within the context,
    so a pass from before it can still be differentiated after it. Feature hooks of slots are off.
    """
    # Passes write to clones of the buffers, and no hook records them.
    feature_hooks = [(module, module.feature_hook) for module in network.modules() if isinstance(module, Slot)]
    for slot, _ in feature_hooks:
        slot.feature_hook = None
    try:
        with ExitStack() as stack:
            stack.enter_context(keep_buffers(network))
            stack.enter_context(keep_generators(network))
            for seed in seeds:
                stack.enter_context(seed.temporary_alpha(1.0))
            yield
    finally:
        for slot, feature_hook in feature_hooks:
            slot.feature_hook = feature_hook


@contextmanager
def eval_without_side_effects(model: nn.Module) -> Generator[None]:
    """Context manager in which ``model`` is in evaluation mode, differentiable and uncompiled.

    Modes, buffers and random generators are restored afterwards.
    """
    with ExitStack() as stack:
        # Gradients are needed even if the caller has disabled them, and hooks do not run in compiled code.
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        if any(isinstance(module, nn.RNNBase) for module in model.modules()):
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))  # its RNNs learn in training mode only
        stack.enter_context(side_pass(model, ()))
        stack.enter_context(keep_modes(model))
        model.eval()
        yield


@dataclass
class RecordedGradients:
    """Calls of one module and the functional gradients of its outputs, batch by batch."""

    arguments: list[tuple[Tensor, ...]] = field(default_factory=list[tuple[Tensor, ...]])
    """The module's arguments."""
    features: list[Tensor] = field(default_factory=list[Tensor])
    """The module's outputs, ``[B, ...]`` each."""
    gradients: list[Tensor] = field(default_factory=list[Tensor])
    """Gradient of each example's loss with respect to the output, ``[B, ...]``."""
    first_arguments: list[Tensor] = field(default_factory=list[Tensor])
    """First arguments of the calls; fewer than calls if one was not a tensor."""
    single_argument: bool = True
    """Whether no call had a second argument with a value."""
    sources: list[Tensor] = field(default_factory=list[Tensor])
    """Inputs of the layer that computes the hidden units before the module, if such units may grow in its slot."""


@dataclass
class _Call:
    """One call of a module in the current forward pass."""

    arguments: tuple[Tensor, ...]
    features: Tensor
    first_argument: Tensor | None
    single_argument: bool
    leaf: Tensor
    """Zeros added to the features, whose gradient equals that of the features, frozen or not."""


class FeatureRecorder:
    """Forward hooks that record calls and outputs of modules, and add leaves by which a loss is differentiated.

    Args:
        modules: The modules by name.
        first: Whether the hooks come before other hooks of the modules, such as growth slots.
        arguments: Whether to record all arguments, and skip calls with arguments other than tensors and calls that
            return more than features.
    """

    def __init__(self, modules: Mapping[str, nn.Module], *, first: bool, arguments: bool) -> None:
        self.records = {name: RecordedGradients() for name in modules}
        self._keeps_arguments = arguments
        self._calls: dict[str, list[_Call]] = {name: [] for name in modules}
        self._handles = [
            module.register_forward_hook(self._make_hook(name), prepend=first, with_kwargs=True)
            for name, module in modules.items()
        ]

    def _make_hook(self, name: str) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Any], Any]:
        def record_call(_: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> Any:
            # Calls that cannot be recorded do not count.
            features = find_features(output)
            if not isinstance(features, Tensor) or not features.is_floating_point():
                return output
            tensors = tuple(argument.detach() for argument in arguments if isinstance(argument, Tensor))
            if self._keeps_arguments and (not tensors or len(tensors) < len(arguments) or holds_features(output)):
                return output
            call = LayerCall(arguments, keywords)
            first = call.first_argument
            # The loss is differentiated by the leaf, which also exists in frozen parts of the network.
            leaf = torch.zeros_like(features, requires_grad=True)
            self._calls[name].append(
                _Call(
                    arguments=tensors if self._keeps_arguments else (),
                    features=features.detach(),
                    first_argument=None if first is None else first.detach(),
                    single_argument=call.has_single_argument,
                    leaf=leaf,
                )
            )
            return replace_features(output, features + leaf)

        return record_call

    def list_leaves(self) -> list[Tensor]:
        """The leaves of all calls in the current pass, module by module."""
        return [call.leaf for calls in self._calls.values() for call in calls]

    def store_gradients(self, gradients: Iterator[Tensor | None], examples: int) -> None:
        """End the current pass, which had ``examples`` examples; ``gradients`` belong to `list_leaves`.

        Modules are dropped from the records unless they ran exactly once with the examples along the first axis.
        """
        for name, calls in self._calls.items():
            gradients_of_calls = [next(gradients) for _ in calls]
            if len(calls) != 1 or len(calls[0].features) != examples:
                self.records.pop(name, None)
            elif name in self.records:
                call, gradient, record = calls[0], gradients_of_calls[0], self.records[name]
                record.arguments.append(call.arguments)
                record.features.append(call.features)
                record.single_argument &= call.single_argument
                if call.first_argument is not None:
                    record.first_arguments.append(call.first_argument)
                record.gradients.append(torch.zeros_like(call.features) if gradient is None else gradient)
            calls.clear()

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()


def record_gradients(
    model: nn.Module,
    recorders: Iterable[FeatureRecorder],
    loss: Callable[[Any, Any], Any],
    batches: Iterable[Any],
    examples: int,
    after_batch: Callable[[], object],
) -> tuple[int, float]:
    """Run ``loss(model, batch)`` forward and backward on at least ``examples`` examples; returns their number and loss.

    Call it within `eval_without_side_effects`. ``after_batch`` is called after each batch.
    """
    recorders, seen, total = list(recorders), 0, 0.0
    for batch in batches:
        # The forward pass leaves a leaf at every recorded module.
        losses = loss(model, batch)
        leaves = [leaf for recorder in recorders for leaf in recorder.list_leaves()]
        count = len(leaves[0]) if leaves else 0
        if leaves and not count:
            raise LookError("a batch is empty: remove empty batches")
        # The gradient of the sum has each example's own functional gradient in its row.
        summed = _sum_losses(losses, count)
        gradients = iter(torch.autograd.grad(summed, leaves, allow_unused=True))
        for recorder in recorders:
            recorder.store_gradients(gradients, count)
        after_batch()
        seen, total = seen + count, total + float(summed.detach())
        if seen >= examples:
            break
    if seen < 2:
        raise LookError(
            f"batches held {plural(seen, 'example')}: give two or more, in batches that loss(model, batch) takes"
        )
    return seen, total / seen


def _sum_losses(losses: Any, count: int) -> Tensor:
    """The sum of a user's loss over the ``count`` examples of a batch."""
    if not isinstance(losses, Tensor):
        raise LookError(
            f"loss(model, batch) returned {describe_value(losses)}: return a tensor [B], the loss of each example"
        )
    if not count:
        raise LookError("loss(model, batch) called no module with a slot: call the whole model passed to it")
    if losses.shape != (count,):
        examples = plural(count, "example")
        raise LookError(
            f"loss(model, batch) returned shape {tuple(losses.shape)} for a batch of {examples}: return "
            f"[{count}], the loss of each example (reduction='none'; of a sequence the mean over its tokens), or where "
            f"there is only a mean over them, mean.expand({count})"
        )
    if losses.is_complex():
        raise LookError(f"loss(model, batch) returned {losses.dtype}: return real numbers, such as its absolute value")
    if not losses.requires_grad:
        raise LookError("the result of loss(model, batch) has no gradient: remove detach() and no_grad()")
    if not bool(losses.isfinite().all()):
        raise LookError("loss(model, batch) is not finite: look at the model before it diverges")
    return losses.sum()
