"""What follows the growth of a model: an optimizer, which gets the parameters of seeds, and copies of the model."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from esper.errors import SlotError

if TYPE_CHECKING:
    from esper.growth.model import GrowingModel
    from esper.growth.slot import Slot

SLOT_KEY = "slot"
"""Key of parameter groups of slots; its value is the slot's name."""

SLOTS_PREFIX = "slots."
"""Prefix of the names of seeds' parameters in a model."""

_SHOWN = 3
"""Number of parameter names listed in a warning."""
_STEPS_UNCHANGED = 10
"""Steps of the optimizer after which parameters that it lacks, and that are as they were, are named."""

NamedParameters = Callable[[], Iterable[tuple[str, nn.Parameter]]]


def unwrap_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer inside a wrapper, such as accelerate's or Lightning's; any other optimizer is returned unchanged.

    A wrapper is recognised by sharing its state with an optimizer in one of its attributes, whatever their names. It
    may lack features of torch's optimizers, such as step hooks or the current groups.
    """
    inner: torch.optim.Optimizer | None = optimizer
    while inner is not None:
        optimizer = inner
        state = getattr(optimizer, "state", None)  # a wrapper may lack it
        held = _list_held_optimizers(optimizer)
        inner = next((part for part in held if state is not None and getattr(part, "state", None) is state), None)
    return optimizer


def _list_held_optimizers(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Optimizers in the attributes of another one, or in lists there."""
    values = [
        part
        for value in vars(optimizer).values()
        for part in (cast("Sequence[Any]", value) if isinstance(value, list | tuple) else [value])
    ]
    return [value for value in values if isinstance(value, torch.optim.Optimizer) and value is not optimizer]


class OptimizerLink:
    """Adds the parameters of seeds to an optimizer made from `GrowingModel.parameter_groups`.

    Every slot has a group from the start, because schedulers do not support groups that are added later. Copies of the
    model start without an optimizer.
    """

    def __init__(self) -> None:
        self.optimizer: torch.optim.Optimizer | None = None
        self._named_parameters: NamedParameters = list
        self._check_due = True
        """Whether there may be new parameters that the optimizer lacks."""
        self._lacking: dict[str, Tensor | None] = {}
        """The host's parameters that the optimizer lacks, with the sum of their values then; None: compared already."""
        self._steps_to_warning = 0
        self.finalized = False
        """Whether a plain model was built, which another optimizer has to train."""
        self._dtype: torch.dtype | None = None
        self._hooks: list[RemovableHandle] = []

    def link(self, optimizer: torch.optim.Optimizer, slots: Iterable[str], named_parameters: NamedParameters) -> None:
        """Add the parameters of all current and future seeds to ``optimizer``.

        Parameters of the host that it lacks, and that do not change in ten steps or until a grower decides, are named
        in a warning. If the model is converted to another dtype, as by ``model.double()``, so is the optimizer's state.
        """
        groups = Counter(group.get(SLOT_KEY) for group in optimizer.param_groups)
        for name in slots:
            if (count := groups[name]) != 1:
                raise SlotError(
                    f"the optimizer has {count or 'no'} parameter group{'s' if count else ''} for slot {name!r}, but "
                    "needs exactly one: make it from model.parameter_groups(lr=...), of which only the host's group "
                    "may be split"
                )
        # The other groups must have parameters of this very model.
        owned = {
            parameter for group in optimizer.param_groups if SLOT_KEY not in group for parameter in group["params"]
        }
        if owned and owned.isdisjoint(parameter for _, parameter in named_parameters()):
            raise SlotError(
                "the optimizer has no parameter of this model: it was made for another model or a copy; "
                "make it from this model's model.parameter_groups(lr=...)"
            )
        for group in optimizer.param_groups:
            if any(parameter.is_meta for parameter in group["params"]):
                raise SlotError(
                    "parameters are on the device meta, offloaded or not loaded: load the whole model on one device"
                )
            # In half precision a small eps is 0, and 0 / 0 is not a number.
            half = any(parameter.dtype is torch.half for parameter in group["params"])
            if half and not torch.tensor(group.get("eps", 1.0), dtype=torch.half):
                raise SlotError(
                    f"eps {group['eps']:g} of {type(optimizer).__name__} is 0 in half precision, so parameters become "
                    "NaN: keep parameters in float32 and use torch.autocast, or give eps=1e-6"
                )
        # Optimizers that divide parameters among processes use other groups, which would not get the seeds' parameters.
        lists = {id(group["params"]) for group in optimizer.param_groups}
        for held in _list_held_optimizers(optimizer):
            others = [group for group in held.param_groups if id(group["params"]) not in lists]
            if any(SLOT_KEY in group or not owned.isdisjoint(group["params"]) for group in others):
                raise SlotError(
                    f"{type(optimizer).__name__} wraps a {type(held).__name__} with its own parameter groups, so seeds "
                    "would never learn: use a torch.optim optimizer made from model.parameter_groups(lr=...)"
                )
        if isinstance(optimizer, torch.optim.Muon):
            raise SlotError(
                "Muon trains matrices only, and seeds also have vectors: give an AdamW from model.parameter_groups("
                "base=...) without the host's matrices, and step a Muon of these beside it"
            )
        # The hooks of a former optimizer are replaced.
        try:
            hooks = [
                optimizer.register_step_pre_hook(self._prepare_step),
                optimizer.register_load_state_dict_pre_hook(_require_same_seeds),
            ]
        except AttributeError as error:  # `torch.optim.Optimizer.__init__` was never called
            raise SlotError(
                f"{type(optimizer).__name__} does not support step hooks, which growth needs: give the torch.optim "
                "optimizer that it steps, or call torch.optim.Optimizer.__init__ in it"
            ) from error
        for hook in self._hooks:
            hook.remove()
        self.optimizer, self._hooks, self._dtype = optimizer, hooks, _find_dtype(optimizer)
        self._named_parameters, self._check_due = named_parameters, True
        self._lacking.clear()
        self.finalized = False

    def check_again(self) -> None:
        """Check at the next step whether the optimizer still has all parameters: some may have been replaced."""
        self._check_due = True

    def warn_of_unchanged(self) -> None:
        """Warn of parameters that the optimizer lacks, and that no other one has trained since that was found."""
        named = dict(self._named_parameters())
        found = {name: total for name, total in self._lacking.items() if total is not None and name in named}
        self._lacking = dict.fromkeys(self._lacking)
        unchanged = [name for name, total in found.items() if torch.equal(total, _sum(named[name]))]
        if unchanged:
            shown = ", ".join(unchanged[:_SHOWN]) + (", ..." if len(unchanged) > _SHOWN else "")
            warnings.warn(
                f"{len(unchanged)} trainable parameters belong to no group of the optimizer and do not learn: {shown}; "
                "make the optimizer from model.parameter_groups(lr=...)",
                stacklevel=4,
            )

    def add_parameters(self, slot: str, parameters: Sequence[nn.Parameter]) -> None:
        """Add parameters of a seed to the slot's group."""
        if self.optimizer is not None:
            self._find_group(self.optimizer, slot).extend(parameters)
            self._check_due = True

    def remove_parameters(self, slot: str, parameters: Sequence[nn.Parameter]) -> None:
        """Remove parameters of a seed from the slot's group, with their optimizer state."""
        if self.optimizer is None:
            return
        removed = set(parameters)
        group = self._find_group(self.optimizer, slot)
        # In place, because the optimizer keeps the list.
        group[:] = [parameter for parameter in group if parameter not in removed]
        for parameter in removed:
            self.optimizer.state.pop(parameter, None)

    @staticmethod
    def _find_group(optimizer: torch.optim.Optimizer, slot: str) -> list[nn.Parameter]:
        return next(group["params"] for group in optimizer.param_groups if group.get(SLOT_KEY) == slot)

    def _prepare_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Before each step: the optimizer has all seeds, and state of the parameters' dtype."""
        dtype = _find_dtype(optimizer)
        if dtype != self._dtype:  # the model was converted: loading converts the moments
            optimizer.load_state_dict(optimizer.state_dict())
            self._dtype = dtype
        if isinstance(optimizer, torch.optim.Adagrad):
            # That of torch 2.9 makes the state of parameters in its constructor, and fails for those added later.
            late = [one for group in optimizer.param_groups for one in group["params"] if one not in optimizer.state]
            if late:
                optimizer.state.update(torch.optim.Adagrad(late, **optimizer.defaults).state)
        self._steps_to_warning -= 1
        if not self._steps_to_warning:
            self.warn_of_unchanged()
        if not (self.finalized or self._check_due):
            return
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        finalized, self.finalized = self.finalized, False
        if finalized and all(parameter.grad is None for parameter in parameters):
            warnings.warn(
                "the optimizer makes a step without any gradient, after finalize() returned a copy: to train that, "
                "make a new optimizer from its parameters()",
                stacklevel=3,
            )
        if not self._check_due:
            return
        self._check_due = False
        # A seed that the optimizer lacks is an error; another optimizer may train parameters of the host.
        owned = set(parameters)
        lacking = [(name, parameter) for name, parameter in self._named_parameters() if parameter not in owned]
        seed_name = next((name for name, _ in lacking if name.startswith(SLOTS_PREFIX)), None)
        if seed_name is not None:
            raise SlotError(
                f"the optimizer lacks {seed_name!r} of a seed, which would never learn: do not change the groups of "
                "slots, or make a new optimizer from model.parameter_groups(lr=...)"
            )
        new = {name: one for name, one in lacking if one.requires_grad and name not in self._lacking}
        if new:
            self._lacking |= {name: _sum(parameter) for name, parameter in new.items()}
            self._steps_to_warning = _STEPS_UNCHANGED

    def __getstate__(self) -> dict[str, Any]:
        return vars(OptimizerLink())


def _require_same_seeds(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Refuse an optimizer's state of a model in which something else has grown."""
    for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=False):
        if SLOT_KEY in group and len(group["params"]) != len(saved["params"]):
            raise SlotError(
                f"the optimizer's state has {len(saved['params'])} parameters for slot {group[SLOT_KEY]!r}, and the "
                f"model {len(group['params'])}: load the model and the optimizer from the same time, the model first"
            )


def _sum(parameter: Tensor) -> Tensor:
    return parameter.detach().sum(dtype=torch.float64)


def _find_dtype(optimizer: torch.optim.Optimizer) -> torch.dtype | None:
    return next((parameter.dtype for group in optimizer.param_groups for parameter in group["params"]), None)


class Copies:
    """The copies of one model, which follow changes of its slots; each copy has its own `Copies`.

    In an average of weights over training (EMA, SWA), the tensors of a copy are averaged with those of the model, one
    by one and in order, so the copy must always have the same seeds. Such a copy is a mirror. A new seed in a mirror
    starts with the model's values. Weight and stage are always the model's; everything else comes from the
    average. References to copies are weak.
    """

    def __init__(self) -> None:
        self.released = False
        """Whether the slots were removed from the model of this object, so that it cannot grow."""
        self._mirrors: WeakSet[GrowingModel] = WeakSet()
        self._undeclared: WeakSet[Copies] = WeakSet()
        """The `Copies` of copies that are not mirrors."""
        self._warned = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Copies:
        made = Copies()
        memo[id(self)] = made
        self._undeclared.add(made)
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return Copies, ()

    def add_mirror(self, mirror: GrowingModel, slots: Iterable[Slot]) -> None:
        """Keep the slots of ``mirror`` equal to the ``slots`` of the model."""
        self._mirrors.add(mirror)
        self._undeclared.discard(mirror.copies)
        for slot in slots:
            self.sync_slot(slot)

    def sync_slot(self, slot: Slot) -> None:
        """Copy the seed of ``slot``, or its absence, with weight and stage to the mirrors."""
        seed = slot.seed
        for mirror in self._mirrors:
            other = mirror.slots[slot.name]
            if seed is None:
                other.remove()
                continue
            # Another seed: a copy of this one, because `germinate` would draw other values.
            present = other.seed
            if present is None or (present.blueprint.name, present.blend) != (seed.blueprint.name, seed.blend):
                other.remove()
                present = other.convert_seed(copy.deepcopy(seed))
                other.occupant = present
                other.depth.set_block(other.name, present.blueprint.find_block())
            # The same seed: its weight and stage.
            with torch.no_grad():
                present.alpha.copy_(seed.alpha)
            present.fossilized = seed.fossilized
            present.contribution = seed.contribution

    def sync_seed_change(self, slot: Slot) -> None:
        """`sync_slot` after a seed was planted or removed; warns once about copies that are not mirrors."""
        self.sync_slot(slot)
        # A copy that is neither declared as a mirror nor released may be an average that falls behind.
        if self._warned or all(copies.released for copies in self._undeclared):
            return
        self._warned = True
        warnings.warn(
            f"the new seed in slot {slot.name!r} is missing in an earlier copy of the model: if the copy is an average "
            "of weights, call model.mirror(average) when you make it; if it is a snapshot, ignore this",
            stacklevel=4,
        )

    @torch.no_grad()
    def reset_mirrors(self, model: nn.Module) -> None:
        """Copy the values of ``model``, which was rolled back, into the mirrors."""
        for mirror in self._mirrors:
            for mirrored, values in zip(mirror.parameters(), model.parameters(), strict=True):
                mirrored.copy_(values)
            for mirrored, values in zip(mirror.buffers(), model.buffers(), strict=True):
                mirrored.copy_(values)
