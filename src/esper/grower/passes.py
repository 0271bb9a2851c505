"""Measure a model as it is and with each of some seeds at another weight, by whatever measure its owner has.

The measure is a function that calls the model on data which nobody else knows. It is called once for each figure; but
in its first call every minibatch goes through the model once for all figures, so that what lies before a seed is
computed once (`esper.grower.passes`), and in the later calls the model answers with what it gave there, to the same
inputs. All else that the measure reads or calls is real. So its figures equal those of separate passes to the bit; on
the first minibatch with any set of seeds that is tried, and where it does not hold, passes are separate from then on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from esper.growth.model import GrowingModel
from esper.growth.slot import Slot
from esper.growth.taps import InputTap, OutputTap, find_global_hook_tables, find_hook_tables

_log = logging.getLogger(__name__)

MOST_KEPT = 2**30
"""Bytes of inputs and outputs that may be kept during one measurement; beyond, passes are separate."""


T = TypeVar("T")

FEWEST_BESIDE_THE_WHOLE = 3
"""Changes from which sharing pays where the figure of the model as it is need not be measured."""


class Passes:
    """Remembers of a model whether its passes may be shared."""

    def __init__(self, model: GrowingModel) -> None:
        self.model = model
        self.separate: str | None = "processes share its parameters" if model.sharded else None
        """Why passes are separate; None while they are shared."""
        self._proved: set[Any] = set()
        """Sets of seeds, and which of them change, with which sharing was found to give the same outputs."""

    def measure(
        self, evaluate: Callable[[GrowingModel], T], changes: Mapping[str, float], whole: T | None = None
    ) -> tuple[T, dict[str, T]]:
        """The model as it is, and for each slot in ``changes`` with its seed at that weight.

        ``evaluate`` must give the same for the same model. ``whole`` is what it gives for the model as it is, if that
        is known; a seed must be in every slot of ``changes``.
        """
        if self.separate is not None or len(changes) < (1 if whole is None else FEWEST_BESIDE_THE_WHOLE):
            usual = evaluate(self.model) if whole is None else whole
            return usual, {name: self._rerun(evaluate, name, changes) for name in changes}
        seeds = tuple((name, seed.blueprint.name, seed.blend) for name, seed in self.model.seeds.items())
        key = seeds, tuple(changes)
        sharing = _Sharing(self.model, changes, proving=key not in self._proved)
        with sharing.record():
            usual = evaluate(self.model)
        if sharing.trouble is not None:  # the passes in between may have left traces in the network
            usual = evaluate(self.model)
        others: dict[str, T] = {}
        for name in changes:
            with sharing.replay(name):
                others[name] = self._rerun(evaluate, name, changes)
        self.separate = sharing.trouble
        if self.separate is not None:
            _log.info("counterfactuals are measured in separate passes from now on: %s", self.separate)
        elif sharing.proved:
            self._proved.add(key)
        return usual if whole is None else whole, others

    def _rerun(self, evaluate: Callable[[GrowingModel], T], name: str, changes: Mapping[str, float]) -> T:
        with weigh_seed(self.model.slots[name], changes[name]):
            return evaluate(self.model)


@contextmanager
def weigh_seed(slot: Slot, weight: float) -> Generator[None]:
    """Within the block the slot's seed, which is there, has this weight."""
    assert slot.seed is not None
    with slot.seed.weigh(weight):
        yield


@dataclass
class _Minibatch:
    inputs: list[Any]
    outputs: dict[str, Any]
    """By the slot whose seed has another weight."""


class _Sharing:
    """One measurement: what goes in and comes out of the model in its first call, for the others."""

    def __init__(self, model: GrowingModel, changes: Mapping[str, float], *, proving: bool) -> None:
        self.trouble: str | None = None
        self.proved = False
        self._model, self._changes, self._proving = model, changes, proving
        self._slots = {name: model.slots[name] for name in changes}
        self._modules = [module for module in model.host.modules() if module is not model.host]
        self._minibatches: list[_Minibatch] = []
        self._kept = 0
        self._handler: Handler | None = None
        """Asked instead of the submodules' forwards."""
        self._hooks: list[Mapping[int, Any]] = []

    @contextmanager
    def record(self) -> Generator[None]:
        """The first call of the measure."""
        self._hooks = [table for module in self._model.host.modules() for table in find_hook_tables(module)]
        self._hooks += find_global_hook_tables()
        with (
            handle_forwards([*self._modules, *self._model.slots.values()], self._within, self._spoil),
            handle_forwards([self._model], self._take, self._spoil),
        ):
            yield

    @contextmanager
    def replay(self, name: str) -> Generator[None]:
        """A later call of the measure, in which that slot's seed has its other weight."""
        if not self._minibatches:
            yield
            return
        waiting = iter(self._minibatches)

        def give(_: nn.Module, plain: Forward, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
            minibatch = next(waiting, None)
            if minibatch is None or not _equals(minibatch.inputs, (arguments, keywords)):
                return plain(*arguments, **keywords)
            return minibatch.outputs.pop(name)

        with handle_forwards([self._model], give, self._spoil):
            yield

    def _within(self, module: nn.Module, plain: Forward, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        if self._handler is None:
            return plain(*arguments, **keywords)
        return self._handler(module, plain, arguments, keywords)

    def _take(self, _: nn.Module, plain: Forward, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """The model's output, beside which its others are kept."""
        self._spoil(self._obstacle())
        if self.trouble is not None:
            return plain(*arguments, **keywords)
        try:
            inputs = copy_tensors(flatten((arguments, keywords)))
        except IncomparableError as error:
            self._spoil(f"the network is called with {error}")
            return plain(*arguments, **keywords)
        trace = RecordedPass(list(self._slots.values()))
        proving = self._proving and not self.proved
        buffers = copy_tensors(list(self._model.host.buffers())) if proving else []
        output = self._call_with(trace.record, plain, arguments, keywords)
        try:
            outputs = {name: self._rerun(name, trace, plain, arguments, keywords) for name in self._changes}
            self._keep(inputs, output, outputs, (arguments, keywords))
            if proving and self.trouble is None:
                self._prove(output, outputs, buffers, lambda: plain(*arguments, **keywords))
        except IncomparableError as error:
            self._spoil(f"the network returns {error}")
        except StrayedError:
            self._spoil("the network calls other submodules when it is called again")
        except Exception as error:  # noqa: BLE001 - what fails only when it is shared must not reach the owner of the measure
            self._spoil(f"{type(error).__name__}: {error}")
        return output

    def _call_with(self, handler: Handler, plain: Forward, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        self._handler = handler
        try:
            return plain(*arguments, **keywords)
        finally:
            self._handler = None

    def _rerun(
        self, name: str, trace: RecordedPass, plain: Forward, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> Any:
        """The output with another weight of the seed in slot ``name``."""
        slot = self._slots[name]
        with weigh_seed(slot, self._changes[name]):
            if slot not in trace.places:
                return plain(*arguments, **keywords)
            replay = ReplayedPass(trace, slot)
            output = self._call_with(replay.answer, plain, arguments, keywords)
        if not replay.complete:
            raise StrayedError
        return output

    def _keep(self, inputs: list[Any], output: Any, outputs: dict[str, Any], given: Any) -> None:
        """For the measure's later calls, if nothing can happen to it before."""
        others, mine = flatten(list(outputs.values())), flatten((given, output))
        self._kept += count_bytes(inputs) + count_bytes(others)
        if not share_no_memory(mine, others):
            self._spoil("the network returns what it was given, or returned before")
        elif not _equals(inputs, given):
            self._spoil("the network changes its inputs")
        elif self._kept > MOST_KEPT:
            self._spoil(f"more than {MOST_KEPT >> 20} MiB would have to be kept")
        else:
            self._minibatches.append(_Minibatch(inputs, outputs))

    def _prove(self, output: Any, outputs: dict[str, Any], buffers: list[Tensor], again: Callable[[], Any]) -> None:
        """Compare with separate passes on the same minibatch."""
        if not are_equal(buffers, list(self._model.host.buffers())):
            self._spoil("the network changes its buffers")
        expected = {"": output}
        found = {"": again()}
        for name, weight in self._changes.items():
            with weigh_seed(self._slots[name], weight):
                expected[name], found[name] = again(), outputs[name]
        if all(_equals(flatten(expected[name]), found[name]) for name in found):
            self.proved = True
        else:
            self._spoil("the network's outputs do not follow from its inputs alone")

    def _obstacle(self) -> str | None:
        """What can be seen before a forward."""
        if torch.is_grad_enabled():
            return "the measure does not work under torch.no_grad() or torch.inference_mode()"
        if any(module.training for module in self._model.modules()):
            return "the measure does not put the whole network in eval mode"
        if any(not isinstance(hook, Slot | InputTap | OutputTap) for table in self._hooks for hook in table.values()):
            return "the host has forward hooks of its own"
        return None

    def _spoil(self, why: str | None) -> None:
        if why is not None and self.trouble is None:
            self.trouble = why
        if self.trouble is not None:
            self._minibatches.clear()


def _equals(leaves: list[Any], value: Any) -> bool:
    try:
        return are_equal(leaves, flatten(value))
    except IncomparableError:
        return False


Forward = Callable[..., Any]
Handler = Callable[[nn.Module, Forward, tuple[Any, ...], dict[str, Any]], Any]
"""What happens instead of a forward: gets the module, its own forward, and the arguments."""


class StrayedError(Exception):
    """The network did not call the submodules that it called before."""


@dataclass
class _Call:
    module: nn.Module
    output: Any = None
    """Before hooks, which run again."""
    end: int | None = None
    """Number of the first call after it and all within it; None while it is under way."""


class RecordedPass:
    """The calls of one forward pass in the order in which they began, up to the last of ``slots``.

    Calls within a call that is over are forgotten, unless one of ``slots`` is among them.
    """

    def __init__(self, slots: Sequence[Slot]) -> None:
        self.calls: list[_Call] = []
        self.places: dict[nn.Module, int] = {}
        """Numbers of the calls of ``slots`` that there have been."""
        self._awaited: set[nn.Module] = set(slots)

    def record(self, module: nn.Module, plain: Forward, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """A `Handler` that computes, and remembers."""
        if not self._awaited:
            return plain(*arguments, **keywords)
        number, call = len(self.calls), _Call(module)
        self.calls.append(call)
        if module in self._awaited:
            self._awaited.discard(module)
            self.places[module] = number
        known = len(self.places)
        output = plain(*arguments, **keywords)
        if len(self.places) == known:
            del self.calls[number + 1 :]
        if self._awaited:
            call.output, call.end = output, len(self.calls)
        return output


class ReplayedPass:
    """Another pass on the same inputs, in which all is as in ``trace`` until ``slot`` is entered."""

    def __init__(self, trace: RecordedPass, slot: Slot) -> None:
        self._calls = trace.calls
        self._until = trace.places[slot]
        self._next: int | None = 0
        """Number of the call to come; None once the slot was entered."""

    @property
    def complete(self) -> bool:
        """Whether the slot was entered."""
        return self._next is None

    def answer(self, module: nn.Module, plain: Forward, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """A `Handler` that computes what it must only.

        Raises:
            StrayedError: it is another module's turn.
        """
        if self._next is None:
            return plain(*arguments, **keywords)
        call = self._calls[self._next] if self._next < len(self._calls) else None
        if call is None or call.module is not module:
            raise StrayedError
        if self._next == self._until:
            self._next = None
        elif call.end is not None and call.end <= self._until:
            self._next = call.end
            return call.output
        else:
            self._next += 1
        return plain(*arguments, **keywords)


class _Stand:
    """Stands for a module's forward."""

    def __init__(self, module: nn.Module, handler: Handler, spoil: Callable[[str], None]) -> None:
        self._module, self._plain = module, module.forward
        self._handler, self._spoil = handler, spoil

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        if torch.compiler.is_compiling():
            self._spoil("the network is compiled")
            return self._plain(*arguments, **keywords)
        return self._handler(self._module, self._plain, arguments, keywords)

    def __reduce__(self) -> tuple[Any, ...]:
        # Copies of the module get the forward of their own.
        self._spoil("the network is copied while it is measured")
        return _return, (self._plain,)


def _return(forward: Forward) -> Forward:
    return forward


@contextmanager
def handle_forwards(modules: Iterable[nn.Module], handler: Handler, spoil: Callable[[str], None]) -> Generator[None]:
    """Within the block ``handler`` is asked instead of the forwards of ``modules``; their hooks run as ever.

    ``spoil`` is told if one of them is compiled or copied, which has the forward of its own all the same.
    """
    before = [(module, vars(module).get("forward")) for module in modules]
    try:
        for module, _ in before:
            vars(module)["forward"] = _Stand(module, handler, spoil)
        yield
    finally:
        for module, forward in before:
            if forward is None:
                vars(module).pop("forward", None)
            else:
                vars(module)["forward"] = forward


_PLAIN = (bool, int, float, str, torch.dtype, torch.device)


class IncomparableError(Exception):
    """A value of which nobody knows what it is made of."""


def flatten(value: Any) -> list[Any]:
    """The tensors in ``value``, and what tells how they are arranged there.

    Raises:
        IncomparableError: there is something else in it.
    """
    if value is None or isinstance(value, _PLAIN):
        return [value]
    if isinstance(value, Tensor):
        if value.is_nested or value.layout is not torch.strided:
            raise IncomparableError("a tensor that is nested or sparse")
        return [value]
    if isinstance(value, Mapping):
        parts = cast("Mapping[Any, Any]", value)
        return [type(parts), *parts, *(leaf for part in parts.values() for leaf in flatten(part))]
    if isinstance(value, tuple | list):
        items = cast("Sequence[Any]", value)
        return [type(items), len(items), *(leaf for item in items for leaf in flatten(item))]
    if is_dataclass(value) and not isinstance(value, type):
        return [type(value), *(leaf for field in fields(value) for leaf in flatten(getattr(value, field.name)))]
    raise IncomparableError(f"a {type(value).__name__}")


def copy_tensors(leaves: list[Any]) -> list[Any]:
    """With tensors of their own."""
    return [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]


def count_bytes(leaves: list[Any]) -> int:
    """Bytes."""
    return sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))


def are_equal(some: list[Any], others: list[Any]) -> bool:
    """Whether two values were equal, not-a-numbers included."""
    return len(some) == len(others) and all(_is_equal(one, other) for one, other in zip(some, others, strict=True))


def share_no_memory(some: list[Any], others: list[Any]) -> bool:
    """Whether no tensor of the one shares memory with a tensor of the other."""
    storages = {leaf.untyped_storage().data_ptr() for leaf in some if isinstance(leaf, Tensor) and leaf.numel()}
    return not any(leaf.untyped_storage().data_ptr() in storages for leaf in others if isinstance(leaf, Tensor))


def _is_equal(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return type(one) is type(other) and bool(one == other)
    if (one.shape, one.dtype, one.device) != (other.shape, other.dtype, other.device):
        return False
    return torch.equal(one, other) or bool(((one == other) | (one.isnan() & other.isnan())).all())
