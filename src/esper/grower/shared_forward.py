"""Measure a model with each of some seeds at another alpha, and compute what lies before a seed only once.

``evaluate`` calls the model on data that only it knows. It is called once for each variant of the model. In its first
call every minibatch runs through the model for all variants: submodules that were finished before a seed was reached
return their recorded output, and only the rest is computed again. In its later calls the model returns what it computed
there, for the same inputs. All else that ``evaluate`` reads or calls is real, so its results equal those of separate
passes to the bit. For each new set of seeds the first minibatch is also computed in separate passes. Where these
differ, or something does not allow sharing, passes are separate from then on.
"""

from __future__ import annotations

import logging
import operator
import threading
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
    PassEnd,
    are_equal,
    copy_tensors,
    equals,
    find_global_hook_tables,
    find_hook_tables,
    find_storages,
    flatten,
)

_log = logging.getLogger(__name__)

MAX_KEPT_BYTES = 2**30
"""Bytes of inputs and outputs that may be kept during one measurement; beyond, passes are separate."""
MIN_SHARED_VARIANTS = 3
"""Variants from which sharing pays where the model as it is need not be measured."""

T = TypeVar("T")
Compute = Callable[[], Any]
"""A submodule's original forward on the arguments that it was called with."""
Handler = Callable[[nn.Module, Compute, Any], Any]
"""Replaces a submodule's forward; called with the submodule, its forward, and ``(arguments, keywords)``."""


class SharedForwardEvaluator:
    """Evaluates a model with each of some seeds changed, in shared passes as long as these are exact."""

    def __init__(self, model: GrowingModel) -> None:
        self.model = model
        self.fallback_reason: str | None = None
        """Why passes are separate; None while they are shared."""
        self._verified: set[Any] = set()
        """Sets of seeds, and which of them change, for which sharing gave the outputs of separate passes."""
        # State of one measurement.
        self._minibatches: list[tuple[list[Any], dict[str, Any]]] = []
        """Flattened inputs, and outputs by the slot whose seed was changed."""
        self._kept_bytes = 0
        self._handler: Handler | None = None
        """Replaces the forwards of submodules while a call of the model is recorded or replayed."""

    def measure(
        self, evaluate: Callable[[GrowingModel], T], changes: Mapping[str, float], baseline: T | None = None
    ) -> tuple[T, dict[str, T]]:
        """Evaluate the model as it is, and with the seed of each slot in ``changes`` at that alpha.

        Args:
            evaluate: Evaluates the model; must give the same for the same model.
            changes: Alphas by slot; each of these slots has a seed.
            baseline: The result for the model as it is, if it is known.

        Returns:
            The result for the model as it is, and the results of the variants by slot.
        """

        def evaluate_variant(name: str) -> T:
            with self.model.slots[name].temporary_alpha(changes[name]):
                return evaluate(self.model)

        few = len(changes) < (1 if baseline is None else MIN_SHARED_VARIANTS)
        if self.fallback_reason is not None or few:
            baseline = evaluate(self.model) if baseline is None else baseline
            return baseline, {name: evaluate_variant(name) for name in changes}
        self._minibatches, self._kept_bytes = [], 0
        try:
            # In the first call every minibatch is computed for all variants.
            with self._compute_variants(changes):
                measured = evaluate(self.model)
            if self.fallback_reason is not None:  # the passes in between may have left traces in the network
                measured = evaluate(self.model)
            # In the later calls the model returns what it computed there.
            variants: dict[str, T] = {}
            for name in changes:
                with self._return_computed(name):
                    variants[name] = evaluate_variant(name)
        finally:
            self._minibatches = []
        return measured if baseline is None else baseline, variants

    @contextmanager
    def _compute_variants(self, changes: Mapping[str, float]) -> Generator[None]:
        """Within the block, calls of the model also compute and keep the outputs of all variants."""
        model, modules = self.model, list(self.model.host.modules())
        tables = [table for module in modules for table in find_hook_tables(module)] + find_global_hook_tables()
        seeds = tuple((name, seed.blueprint.name, seed.blend) for name, seed in model.seeds.items())
        key = seeds, tuple(changes)
        measuring = threading.current_thread()

        def handle_submodule(module: nn.Module, compute: Compute, inputs: Any) -> Any:
            handler = self._handler
            if handler is None or threading.current_thread() is not measuring:
                return compute()
            return handler(module, compute, inputs)

        def handle_model(_: nn.Module, compute: Compute, inputs: Any) -> Any:
            if threading.current_thread() is not measuring:  # of the measure or not: it meets any of the variants
                self._fall_back("another thread calls the network meanwhile")
                return compute()
            if torch.is_grad_enabled():
                self._fall_back("the measure does not work under torch.no_grad() or torch.inference_mode()")
            if any(module.training for module in model.modules()):
                self._fall_back("the measure does not put the whole network in eval mode")
            hooks = [hook for table in tables for hook in table.values()]
            if not all(isinstance(hook, Slot | InputTap | OutputTap | PassEnd) for hook in hooks):
                self._fall_back("the host has forward hooks of its own")
            if self.fallback_reason is not None:
                return compute()
            return self._run_variants(changes, key, compute, inputs)

        submodules = [*modules[1:], *model.slots.values()]
        with self._patch_forwards(submodules, handle_submodule), self._patch_forwards([model], handle_model):
            yield

    @contextmanager
    def _return_computed(self, name: str) -> Generator[None]:
        """Within the block, calls of the model return what was computed with the seed of that slot changed."""
        minibatches, measuring = iter(self._minibatches), threading.current_thread()

        def handle_model(_: nn.Module, compute: Compute, inputs: Any) -> Any:
            if threading.current_thread() is not measuring:
                return compute()
            recorded, outputs = next(minibatches, (None, dict[str, Any]()))
            return compute() if recorded is None or not equals(recorded, inputs) else outputs.pop(name)

        with self._patch_forwards([self.model] if self._minibatches else [], handle_model):
            yield

    def _run_variants(self, changes: Mapping[str, float], key: Any, compute: Compute, inputs: Any) -> Any:
        """Return the model's output on one minibatch, and keep the outputs of the variants."""

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
            for name, alpha in changes.items():
                with self.model.slots[name].temporary_alpha(alpha):
                    outputs[name] = compute_with(recorded.replay(self.model.slots[name]))
                if recorded.replaying:
                    self._fall_back("the network calls other submodules when it is called again")
            # What is kept must not change before the later calls.
            kept = flatten(list(outputs.values()))
            self._kept_bytes += sum(leaf.nbytes for leaf in (*recorded_inputs, *kept) if isinstance(leaf, Tensor))
            if not find_storages(kept).isdisjoint(find_storages(flatten((inputs, output)))):
                self._fall_back("the network returns what it was given, or returned before")
            if not equals(recorded_inputs, inputs):
                self._fall_back("the network changes its inputs")
            if self._kept_bytes > MAX_KEPT_BYTES:
                self._fall_back(f"more than {MAX_KEPT_BYTES >> 20} MiB would have to be kept")
            # Compare with separate passes, once for each set of seeds.
            if verify and self.fallback_reason is None:
                if not are_equal(buffers, list(host.buffers())):
                    self._fall_back("the network changes its buffers")
                equal = [equals(flatten(output), compute())]
                for name, alpha in changes.items():
                    with self.model.slots[name].temporary_alpha(alpha):
                        equal.append(equals(flatten(compute()), outputs[name]))
                if not all(equal):
                    self._fall_back("the network's outputs do not follow from its inputs alone")
                self._verified.add(key)
        except IncomparableError as error:
            self._fall_back(f"the network returns {error}")
        except Exception as error:  # noqa: BLE001 - what fails only in shared passes must not reach the user
            self._fall_back(f"{type(error).__name__}: {error}")
        if self.fallback_reason is None:
            self._minibatches.append((recorded_inputs, outputs))
        return output

    def _fall_back(self, reason: str) -> None:
        """Evaluate in separate passes from now on."""
        if self.fallback_reason is None:
            self.fallback_reason = reason
            _log.info("counterfactuals are measured in separate passes from now on: %s", reason)
        self._minibatches.clear()

    @contextmanager
    def _patch_forwards(self, modules: Iterable[nn.Module], handler: Handler) -> Generator[None]:
        """Within the block, ``handler`` replaces the forwards of ``modules``; their hooks run as before."""
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
    """Replaces a submodule's forward by a handler, except where the submodule is compiled or copied."""

    def __init__(self, module: nn.Module, handler: Handler, fall_back: Callable[[str], None]) -> None:
        self._module, self._forward, self._handler, self._fall_back = module, module.forward, handler, fall_back

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        if torch.compiler.is_compiling():
            self._fall_back("the network is compiled")
            return self._forward(*arguments, **keywords)
        return self._handler(self._module, lambda: self._forward(*arguments, **keywords), (arguments, keywords))

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of the submodule gets the original forward, bound to the copy: `copy` makes it of this method.
        self._fall_back("the network is copied while it is measured")
        return operator.getitem, ([self._forward], 0)


@dataclass
class _Call:
    """One call of a submodule in a forward pass."""

    module: nn.Module
    output: Any = None
    """The output before hooks, which run again."""
    end: int | None = None
    """Number of the first call after this one and those within it; None until it returns."""


class _RecordedPass:
    """Calls of submodules in one forward pass, in the order in which they began, up to the last of ``slots``.

    Calls within a call that has returned are dropped, unless one of ``slots`` is among them.
    """

    def __init__(self, slots: Iterable[Slot]) -> None:
        self.replaying = False
        """Whether the latest replay did not reach its slot, as where the network calls other submodules than before."""
        self._calls: list[_Call] = []
        self._numbers: dict[nn.Module, int] = {}
        """Numbers of the calls of ``slots`` so far."""
        self._remaining: set[nn.Module] = set(slots)

    def record(self, module: nn.Module, compute: Compute, _: Any) -> Any:
        """The `Handler` of the recorded pass: computes, and records the call."""
        if not self._remaining:
            return compute()
        number, call = len(self._calls), _Call(module)
        self._calls.append(call)
        if module in self._remaining:
            self._remaining.discard(module)
            self._numbers[module] = number
        reached = len(self._numbers)
        output = compute()
        if len(self._numbers) == reached:
            del self._calls[number + 1 :]
        if self._remaining:
            call.output, call.end = output, len(self._calls)
        return output

    def replay(self, slot: Slot) -> Handler:
        """A `Handler` for another pass on the same inputs: returns recorded outputs until ``slot`` is called."""
        number, last = 0, self._numbers.get(slot, -1)
        self.replaying = last >= 0

        def handle(module: nn.Module, compute: Compute, _: Any) -> Any:
            nonlocal number
            if not self.replaying or number > last:
                return compute()
            call = self._calls[number]
            if call.module is not module:  # another order than recorded: compute the rest
                number = last + 1
                return compute()
            if call.end is not None and call.end <= last:
                number = call.end
                return call.output
            self.replaying = number != last
            number += 1  # its submodules are replayed one by one
            return compute()

        return handle
