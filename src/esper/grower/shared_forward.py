"""Measure a model with each of some seeds at another weight, and compute what lies before a seed only once.

The measure is a function that calls the model on data which nobody else knows. It is called once for each figure. In
its first call every minibatch runs through the model for all figures: submodules that were done before a seed was
reached return what was recorded of them, and only the rest is computed again. In its later calls the model returns what
it computed there, to the same inputs. All else that the measure reads or calls is real, so its figures equal those of
separate passes to the bit. With each new set of seeds the first minibatch is also computed in separate passes; where
these differ, or something does not allow sharing, passes are separate from then on.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from esper.growth.model import GrowingModel
from esper.growth.slot import Slot
from esper.growth.taps import (
    IncomparableError,
    InputTap,
    OutputTap,
    are_equal,
    copy_tensors,
    equals,
    find_global_hook_tables,
    find_hook_tables,
    find_storages,
    flatten,
)

_log = logging.getLogger(__name__)

MOST_KEPT = 2**30
"""Bytes of inputs and outputs that may be kept during one measurement; beyond, passes are separate."""
MIN_SHARED_VARIANTS = 3
"""Changed seeds from which sharing pays where the figure of the model as it is need not be measured."""

T = TypeVar("T")
Compute = Callable[[], Any]
"""A module's own forward on the arguments that it was called with."""
Handler = Callable[[nn.Module, Compute, Any], Any]
"""Runs in place of a module's forward; gets the module, that forward, and the arguments, positional and by keyword."""


class SharedForwardEvaluator:
    """Evaluates a model with each of some seeds changed, in shared passes for as long as these are exact."""

    def __init__(self, model: GrowingModel) -> None:
        self.model = model
        self.separate: str | None = "processes share its parameters" if model.sharded else None
        """Why passes are separate; None while they are shared."""
        self._verified: set[Any] = set()
        """Sets of seeds, and which of them change, with which sharing gave the outputs of separate passes."""
        # Of the measurement under way.
        self._minibatches: list[tuple[list[Any], dict[str, Any]]] = []
        """Flattened inputs, and outputs by the slot whose seed was changed."""
        self._kept_bytes = 0
        self._handler: Handler | None = None
        """Runs in place of the forwards of submodules, in a call of the model that is recorded or replayed."""

    def measure(
        self, evaluate: Callable[[GrowingModel], T], changes: Mapping[str, float], baseline: T | None = None
    ) -> tuple[T, dict[str, T]]:
        """The model as it is, and for each slot in ``changes`` with its seed at that weight.

        ``evaluate`` must give the same for the same model. ``baseline`` is what it gives for the model as it is, if
        that is known; a seed must be in every slot of ``changes``.
        """

        def evaluate_changed(name: str) -> T:
            with self.model.seeds[name].temporary_alpha(changes[name]):
                return evaluate(self.model)

        if self.separate is not None or len(changes) < (1 if baseline is None else MIN_SHARED_VARIANTS):
            baseline = evaluate(self.model) if baseline is None else baseline
            return baseline, {name: evaluate_changed(name) for name in changes}
        self._minibatches, self._kept_bytes = [], 0
        try:
            # In the first call every minibatch is computed for all changes.
            with self._compute_all(changes):
                measured = evaluate(self.model)
            if self.separate is not None:  # the passes in between may have left traces in the network
                measured = evaluate(self.model)
            # In the others the model returns what it computed there.
            others: dict[str, T] = {}
            for name in changes:
                with self._return_computed(name):
                    others[name] = evaluate_changed(name)
        finally:
            self._minibatches = []
        return measured if baseline is None else baseline, others

    @contextmanager
    def _compute_all(self, changes: Mapping[str, float]) -> Generator[None]:
        """Within the block a call of the model also computes, and keeps, its outputs with each seed changed."""
        model, modules = self.model, list(self.model.host.modules())
        tables = [table for module in modules for table in find_hook_tables(module)] + find_global_hook_tables()
        seeds = tuple((name, seed.blueprint.name, seed.blend) for name, seed in model.seeds.items())
        key = seeds, tuple(changes)

        def handle_submodule(module: nn.Module, compute: Compute, inputs: Any) -> Any:
            return compute() if self._handler is None else self._handler(module, compute, inputs)

        def handle_model(_: nn.Module, compute: Compute, inputs: Any) -> Any:
            if torch.is_grad_enabled():
                self._fall_back("the measure does not work under torch.no_grad() or torch.inference_mode()")
            if any(module.training for module in model.modules()):
                self._fall_back("the measure does not put the whole network in eval mode")
            hooks = [hook for table in tables for hook in table.values()]
            if not all(isinstance(hook, Slot | InputTap | OutputTap) for hook in hooks):
                self._fall_back("the host has forward hooks of its own")
            return compute() if self.separate is not None else self._compute_each(changes, key, compute, inputs)

        submodules = [*modules[1:], *model.slots.values()]
        with self._patch_forwards(submodules, handle_submodule), self._patch_forwards([model], handle_model):
            yield

    @contextmanager
    def _return_computed(self, name: str) -> Generator[None]:
        """Within the block a call of the model returns what it computed with that slot's seed changed."""
        minibatches = iter(self._minibatches)

        def handle_model(_: nn.Module, compute: Compute, inputs: Any) -> Any:
            recorded, outputs = next(minibatches, (None, dict[str, Any]()))
            return compute() if recorded is None or not equals(recorded, inputs) else outputs.pop(name)

        with self._patch_forwards([self.model] if self._minibatches else [], handle_model):
            yield

    def _compute_each(self, changes: Mapping[str, float], key: Any, compute: Compute, inputs: Any) -> Any:
        """The model's output; those with each seed changed are kept beside it."""

        def compute_with(handler: Handler) -> Any:
            self._handler = handler
            try:
                return compute()
            finally:
                self._handler = None

        try:
            recorded_inputs = copy_tensors(flatten(inputs))
        except IncomparableError as error:
            self._fall_back(f"the network is called with {error}")
            return compute()
        verify, host = key not in self._verified, self.model.host
        buffers = copy_tensors(list(host.buffers())) if verify else []
        recorded = _RecordedPass(self.model.slots[name] for name in changes)
        output, outputs = compute_with(recorded.record), dict[str, Any]()
        try:
            for name, weight in changes.items():
                with self.model.seeds[name].temporary_alpha(weight):
                    outputs[name] = compute_with(recorded.replay(self.model.slots[name]))
                if recorded.replaying:
                    self._fall_back("the network calls other submodules when it is called again")
            # Nothing may happen to what is kept before the measure's later calls.
            kept = flatten(list(outputs.values()))
            self._kept_bytes += sum(leaf.nbytes for leaf in (*recorded_inputs, *kept) if isinstance(leaf, Tensor))
            if not find_storages(kept).isdisjoint(find_storages(flatten((inputs, output)))):
                self._fall_back("the network returns what it was given, or returned before")
            if not equals(recorded_inputs, inputs):
                self._fall_back("the network changes its inputs")
            if self._kept_bytes > MOST_KEPT:
                self._fall_back(f"more than {MOST_KEPT >> 20} MiB would have to be kept")
            # Compare with separate passes, once for each set of seeds.
            if verify and self.separate is None:
                if not are_equal(buffers, list(host.buffers())):
                    self._fall_back("the network changes its buffers")
                equal = [equals(flatten(output), compute())]
                for name, weight in changes.items():
                    with self.model.seeds[name].temporary_alpha(weight):
                        equal.append(equals(flatten(compute()), outputs[name]))
                if not all(equal):
                    self._fall_back("the network's outputs do not follow from its inputs alone")
                self._verified.add(key)
        except IncomparableError as error:
            self._fall_back(f"the network returns {error}")
        except Exception as error:  # noqa: BLE001 - what fails only when it is shared must not reach the owner of the measure
            self._fall_back(f"{type(error).__name__}: {error}")
        if self.separate is None:
            self._minibatches.append((recorded_inputs, outputs))
        return output

    def _fall_back(self, reason: str) -> None:
        """Measure in separate passes from now on."""
        if self.separate is None:
            self.separate = reason
            _log.info("counterfactuals are measured in separate passes from now on: %s", reason)
        self._minibatches.clear()

    @contextmanager
    def _patch_forwards(self, modules: Iterable[nn.Module], handler: Handler) -> Generator[None]:
        """Within the block ``handler`` runs in place of the forwards of ``modules``; their hooks run as ever."""
        before = [(module, vars(module).get("forward")) for module in modules]
        try:
            for module, _ in before:
                vars(module)["forward"] = _ForwardPatch(module, handler, self._fall_back)
            yield
        finally:
            for module, forward in before:
                vars(module).pop("forward", None)
                if forward is not None:
                    vars(module)["forward"] = forward


class _ForwardPatch:
    """Runs a handler in place of a module's forward, but where the module is compiled or copied."""

    def __init__(self, module: nn.Module, handler: Handler, fall_back: Callable[[str], None]) -> None:
        self._module, self._forward, self._handler, self._fall_back = module, module.forward, handler, fall_back

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        if torch.compiler.is_compiling():
            self._fall_back("the network is compiled")
            return self._forward(*arguments, **keywords)
        return self._handler(self._module, lambda: self._forward(*arguments, **keywords), (arguments, keywords))

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of the module gets its own forward, which `copy` makes of this method.
        self._fall_back("the network is copied while it is measured")
        return operator.getitem, ([self._forward], 0)


@dataclass
class _Call:
    module: nn.Module
    output: Any = None
    """Before hooks, which run again."""
    end: int | None = None
    """Number of the first call after it and all within it; None while it is under way."""


class _RecordedPass:
    """The calls of one forward pass in the order in which they began, up to the last of ``slots``.

    Calls within a call that is over are forgotten, unless one of ``slots`` is among them.
    """

    def __init__(self, slots: Iterable[Slot]) -> None:
        self.replaying = False
        """Whether the latest replay has not come to its slot, as where the network calls other modules than before."""
        self._calls: list[_Call] = []
        self._places: dict[nn.Module, int] = {}
        """Numbers of the calls of ``slots`` that there have been."""
        self._awaited: set[nn.Module] = set(slots)

    def record(self, module: nn.Module, compute: Compute, _: Any) -> Any:
        """A `Handler` that computes, and records the call."""
        if not self._awaited:
            return compute()
        number, call = len(self._calls), _Call(module)
        self._calls.append(call)
        if module in self._awaited:
            self._awaited.discard(module)
            self._places[module] = number
        reached = len(self._places)
        output = compute()
        if len(self._places) == reached:
            del self._calls[number + 1 :]
        if self._awaited:
            call.output, call.end = output, len(self._calls)
        return output

    def replay(self, slot: Slot) -> Handler:
        """A `Handler` for another pass on the same inputs: returns what was recorded until ``slot`` is entered."""
        number, last = 0, self._places.get(slot, -1)
        self.replaying = last >= 0

        def handle(module: nn.Module, compute: Compute, _: Any) -> Any:
            nonlocal number
            if not self.replaying or number > last:
                return compute()
            call = self._calls[number]
            if call.module is not module:  # nothing is returned from the record any more
                number = last + 1
                return compute()
            if call.end is not None and call.end <= last:
                number = call.end
                return call.output
            self.replaying = number != last
            number += 1
            return compute()

        return handle
