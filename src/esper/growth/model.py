"""One host with its slots, which is called as the host is."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, Literal, Self, TypeVar, cast

import torch
from pydantic import InstanceOf
from torch import Tensor, nn

from esper.config.arguments import AtLeastTwo, Batches, Name, NonNegativeInt, PositiveInt, check_arguments
from esper.errors import CheckpointError, ConfigError, LookError, SlotError
from esper.growth.blueprints.registry import get
from esper.growth.depth import Depth
from esper.growth.finalize import Unfinished, finalize
from esper.growth.followers import SLOT_KEY, SLOTS_PREFIX, Compilations, Copies, Ownership
from esper.growth.frozen import FrozenParts, Growth, swap_growth
from esper.growth.hooks import hide_growth, require_attachable, require_attached, require_savable
from esper.growth.look import Look, look
from esper.growth.positions import list_argument_names
from esper.growth.pretrained import guard_saving
from esper.growth.probe import Arguments, Example, PlainModule, find_input_place, first_tensor, probe
from esper.growth.seed import Seed
from esper.growth.sharding import check_options, reshard
from esper.growth.slot import Slot
from esper.growth.summary import GrowthSummary, Preview, preview, summarise
from esper.growth.taps import InputTap, OutputTap, require_untraced

M = TypeVar("M", bound=nn.Module)


@cache
def make_subclass(model: type[M], host: type[nn.Module]) -> type[M]:
    """The subclass of ``model`` for hosts of class ``host``: its ``forward`` has the signature of theirs.

    Its name is theirs, too, behind "Growing". A class, not an instance, since libraries ask classes (Hugging Face's
    `find_labels`), and since instances with a ``forward`` of their own would share it with their copies.
    """

    def forward(self: M, *arguments: Any, **keywords: Any) -> Any:
        return model.forward(self, *arguments, **keywords)

    forward.__doc__ = host.forward.__doc__
    vars(forward)["__signature__"] = inspect.signature(host.forward)
    name = f"Growing{host.__name__}"
    members = {"__module__": model.__module__, "__doc__": model.__doc__, "forward": forward}
    return cast("type[M]", type(name, (model,), members))


def make_empty(model: type[M], host: type[nn.Module]) -> M:
    """An instance of `make_subclass`'s class without any state: where copies and pickles begin."""
    made = make_subclass(model, host)
    return made.__new__(made)


OPTIMIZER = "give a torch.optim optimizer that is made from model.parameter_groups(lr=...)"
"""What to give as an optimizer."""
GROWING = (
    "give the very model that esper.attach returned: neither its host, nor a compiled, averaged or distributed module "
    "around it"
)
"""What to give as a growing model."""
_SLOT = "give the name of a slot"


class Slots(nn.Module):
    """The slots of a model by the names of the submodules that they hook, in the order of the forward pass."""

    def __init__(self, slots: Mapping[str, Slot]) -> None:
        super().__init__()
        self._keys = {name: _key(name) for name in slots}
        for name, slot in slots.items():
            self.add_module(self._keys[name], slot)

    def __getitem__(self, name: str) -> Slot:
        if name not in self.keys():
            raise SlotError(f"no slot {name!r}; this model has {', '.join(self._keys)}")
        slot = self.get_submodule(self._keys[name])
        assert isinstance(slot, Slot)
        return slot

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, name: object) -> bool:
        return name in self._keys

    def keys(self) -> list[str]:
        """The names."""
        return list(self._keys)

    def values(self) -> list[Slot]:
        """The slots."""
        return [self[name] for name in self._keys]

    def items(self) -> list[tuple[str, Slot]]:
        """Names and slots."""
        return [(name, self[name]) for name in self._keys]


def _key(name: str) -> str:
    """A dot would mean nesting in state-dict keys; a slash occurs in no module's name."""
    return name.replace(".", "/")


def _require_planted(_: nn.Module, found: Any) -> None:
    """As a hook after a state dict was loaded: refuse one with seeds that are not there."""
    lost = next((key for key in found.unexpected_keys if f".{SLOTS_PREFIX}" in f".{key}"), None)
    if lost is not None:
        raise CheckpointError(
            f"the state dict holds {lost!r} of a seed that this model does not have: a state dict has no structure; "
            "keep grown models with esper.save, and get them back with esper.load"
        )


def _require_called(model: nn.Module, *_: Any) -> None:
    """As a hook before a state dict is made: refuse one with seeds that nobody calls any more."""
    assert isinstance(model, GrowingModel)
    require_savable(model)


class GrowingModel(nn.Module):
    """A host and its growth slots; called as the host is. Make it with `esper.attach`.

    ``host`` is the very module that was given, with its own state-dict keys; what grows lives under ``slots``. The
    object's class is a subclass that is named after the host's and whose ``forward`` has the host's signature. Public
    attributes and methods that only the host has are read from it, such as ``config`` or ``generate``.

    Where a submodule with a slot was replaced, or after `release`, whatever would keep or hand on what grew raises
    SlotError: `finalize`, `mirror`, ``state_dict``, copies and pickles.

    Args:
        host: Any module.
        slots: Names of the submodules to hook, with the blueprints that may germinate there; None: all that fit.
        example_input: What the host takes: a tensor, a tuple of arguments, or a dictionary of keyword arguments.
        causal: As in `esper.growth.probe.probe`.
        apart: As in `esper.growth.probe.probe`.
        frozen: Names of submodules that stay as they are; ``""`` is the host itself.

    Raises:
        SlotError: as `esper.growth.probe.probe` and `Slot`.
    """

    def __init__(
        self,
        host: nn.Module,
        slots: Sequence[str] | Mapping[str, Sequence[str] | None],
        example_input: Arguments,
        *,
        causal: bool | None = None,
        apart: bool | None = None,
        frozen: Sequence[str] = (),
    ) -> None:
        super().__init__()
        require_attachable(host)
        offers = slots if isinstance(slots, Mapping) else dict.fromkeys(slots)
        silenced = [name for name, offer in offers.items() if any(get(one).silences for one in offer or ())]
        probed = probe(host, list(slots), example_input, causal=causal, apart=apart, silenced=silenced)
        self.host = host
        self.example = Example(example_input)
        self.example_size = first_tensor(example_input)[0].numel()
        """Numbers in the input of one example."""
        self.tap = InputTap(find_input_place(example_input), list_argument_names(host))
        self.ownership = Ownership()
        self.copies = Copies()
        self.compilations = Compilations()
        self.depth = Depth(host)
        shared = (self.tap, self.ownership, self.copies, self.compilations, self.depth)
        made = {name: Slot(name, site, *shared, offers[name]) for name, site in probed.sites.items()}
        self._hooks = [host.register_forward_pre_hook(self.tap, with_kwargs=True)]
        self._hooks.append(host.register_forward_hook(OutputTap(self.tap)))
        for name, slot in made.items():
            self._hooks.append(host.get_submodule(name).register_forward_hook(slot, with_kwargs=True))
        self.slots = Slots(made)
        self.training = host.training
        self.slots.train(host.training)
        self.frozen = FrozenParts(host, frozen)
        """What of the host stays as it is."""
        if frozen:
            self._hooks.append(host.register_forward_pre_hook(self.frozen))
        for last in self.slots.values()[-1:]:
            last.begins_graph = self.frozen.holds_all(host)
        self._guards = guard_saving(self)
        self.sharded = False
        """Whether `shard_growth` was called."""
        self.hidden = False
        """Whether what grew is out of sight, as within `without_growth`."""
        self.host_parameters = sum(parameter.numel() for parameter in host.parameters())
        """Parameters before any growth."""
        self.host_flops = probed.flops
        """FLOPs of the host's forward pass for one example, before any growth; None if torch cannot count them."""
        self.outputs = probed.outputs
        """Channels of what the host returns: its classes, if it is a classifier; None if it returns no tensor."""
        self.register_state_dict_pre_hook(_require_called)
        self.register_load_state_dict_post_hook(_require_planted)
        self.__class__ = make_subclass(type(self), type(host))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            if name.startswith("_"):
                raise
            try:
                return getattr(super().__getattr__("host"), name)
            except AttributeError:
                raise error from None

    def __reduce__(self) -> tuple[Any, ...]:
        require_attached(self)
        # A module's own state lacks what `compile` has made of it, which would run this model in place of its copies.
        return make_empty, (type(self).__bases__[0], type(self.host)), self.__getstate__()

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """What the host returns, with what grew in it."""
        require_untraced()
        if torch.compiler.is_compiling():
            self.compilations.record_graph()
        return self.host(*arguments, **keywords)

    def train(self, mode: bool = True) -> Self:
        """As `torch.nn.Module.train`; what is frozen stays in evaluation mode."""
        super().train(mode)
        self.frozen.rest(self.host)
        return self

    def without_growth(self) -> AbstractContextManager[None]:
        """Within the block the host computes what it would without anything that grew: nothing is lost by it.

        Of a frozen host that is to the bit what it was before. Torch's encoder layers round otherwise where a gradient
        is wanted: compare theirs under `torch.no_grad`. They are not compiled within the block.

        In all threads growth is out of sight meanwhile, until the last of several blocks ends; nothing may grow, go or
        be saved.
        """
        return hide_growth(self)

    @check_arguments(SlotError, growth="give what model.swap() returned")
    def swap(self, growth: InstanceOf[Growth] | None) -> Growth:
        """Let ``growth`` live in the slots, and return what lived there: several growths of one frozen host.

        ```python
        first = model.swap(None)  # the bare host again, for another task
        second = model.swap(first)
        ```

        The optimizer that the model is linked to forgets what goes, and trains what comes. A grower knows of one
        growth: make another one after a swap.

        Args:
            growth: What `swap` of this model, or of one with the same slots on an equal host, returned; None: nothing.

        Raises:
            SlotError: the host is not frozen, and so has learned together with what grew; ``growth`` is of other slots;
                or a slot is not called any more.
        """
        require_attached(self)
        return swap_growth(self, growth)

    @property
    def seeds(self) -> dict[str, Seed]:
        """The seeds by slot, live and fossilized."""
        return {slot.name: slot.seed for slot in self.slots.values() if slot.seed is not None}

    @property
    def added_parameters(self) -> int:
        """Parameters of all seeds, live and fossilized."""
        return sum(parameter.numel() for seed in self.seeds.values() for parameter in seed.parameters())

    def parameter_groups(self, **options: Any) -> list[dict[str, Any]]:
        """Parameter groups for an optimizer: the host's, and one per slot, empty where nothing has grown yet.

        Groups that are there from the start are filled and emptied as seeds come and go, so that any scheduler survives
        growth; adding groups later would not do. ``options`` (``lr``, ``weight_decay``, ...) hold for all of them.
        Parameters that do not require a gradient are left out.

        Raises:
            SlotError: a slot is switched off by a block.
        """
        for slot in self.slots.values():
            slot.require_seen()
        reshard(self)  # or those would be groups of what a forward pass has gathered
        learning = [parameter for parameter in self.host.parameters() if parameter.requires_grad]
        groups: list[dict[str, Any]] = [{"params": learning, **options}]
        for slot in self.slots.values():
            own = [] if slot.seed is None else list(slot.seed.parameters())
            groups.append({"params": own, SLOT_KEY: slot.name, **options})
        return groups

    @check_arguments(SlotError, optimizer=OPTIMIZER_ADVICE)
    def link(self, optimizer: torch.optim.Optimizer) -> None:
        """Hand the parameters of all seeds to come to ``optimizer``; `esper.Grower` does so by itself.

        Raises:
            SlotError: the optimizer was not made from `parameter_groups`, or from those of another model.
        """
        reshard(self)
        self.ownership.link(optimizer, self.slots, self.named_parameters)

    @check_arguments(SlotError)
    def mirror(self, average: PlainModule) -> None:
        """Let a copy of this model grow as it does, such as an average of its weights over training.

        ```python
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999))
        model.mirror(average)
        ```

        Whatever comes, goes or stays for good in a slot here does so in the copy, where a fresh seed begins with the
        values that it has here. So the tensors of both correspond at any time, and any average goes on. When a
        governor rolls this model back, the copy begins anew with the values that were restored.

        Args:
            average: A copy of this model, or whatever module holds one.

        Raises:
            SlotError: there is no such copy in ``average``, or a slot is not called any more.
        """
        require_attached(self)
        growing = [part for part in average.modules() if isinstance(part, GrowingModel)]
        if not growing or any(one is self or list(one.slots) != list(self.slots) for one in growing):
            raise SlotError(
                f"the {type(average).__name__} holds no copy of this model: give copy.deepcopy(model), or what holds "
                "one, such as torch.optim.swa_utils.AveragedModel(model)"
            )
        for one in growing:
            self.copies.add_mirror(one, self.slots.values())

    def shard_growth(self, **options: Any) -> None:
        """Let seeds be sharded over processes as the host is to be, by FSDP2; call it before you shard the host.

        ```python
        model = esper.attach(net, slots, example_input)
        model.shard_growth(mesh=mesh)
        for block in net.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(net, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameter_groups(lr=1e-3))
        grower = esper.Grower(model, optimizer, controller="all_at_plateau", evaluate=validate)  # in all processes
        ```

        Shard the host itself, not the growing model, in which seeds that come later would not be looked after. They
        are planted by a grower, or by hand in all processes alike; `esper.branch`, averages, copies and `finalize` need
        whole parameters. For these load a checkpoint of `torch.distributed.checkpoint` into a model that is not
        sharded, in which the same seeds were planted. Copies of blocks have what the blocks have, but attributes that
        were set after this call.

        Args:
            options: Of `torch.distributed.fsdp.fully_shard`, for each seed, such as ``mesh`` and the ``mp_policy`` of
                the host; after a forward pass seeds are always sharded again.

        Raises:
            SlotError: the host is sharded already, linked to an optimizer, or mirrored; an option is unknown; or there
                is no process group.
        """
        if self.sharded:
            raise SlotError("shard_growth was called already")
        require_attached(self)
        if self.ownership.optimizer is not None:
            raise SlotError("an optimizer has the parameters as they are: shard first, and make the optimizer then")
        if self.copies.mirrored:
            raise SlotError("an average of this model grows with it, and torch cannot copy seeds that are sharded")
        check_options(options)
        for slot in self.slots.values():
            slot.shard_growth(options)
        self.sharded = True

    def summary(self) -> GrowthSummary:
        """Every slot with what lives there: stage, parameters, FLOPs, weight and contribution. Print it."""
        return summarise(self.slots.values(), self.host_parameters)

    def preview(self) -> Preview:
        """What each blueprint on offer would cost in each slot that is free, in parameters and FLOPs. Print it."""
        return preview(self.slots.values(), self.host_parameters)

    @check_arguments(LookError, loss="give a function loss(model, batch) that returns the loss of each example")
    def look(
        self,
        loss: Callable[[Self, Any], Tensor],
        batches: Batches,
        *,
        examples: AtLeastTwo = 256,
        draws: PositiveInt = 3,
        layers: bool = False,
        seed: NonNegativeInt = 0,
    ) -> Look:
        """Where would this model grow, and by what? Measured before anything is planted, by one backward pass.

        ```python
        looked = model.look(lambda model, batch: cross_entropy(model(batch[0]), batch[1], reduction="none"), loader)
        print(looked)
        ```

        For every blueprint on offer in every slot, free or taken, it tells what share of that which the examples ask
        for one step of such a module could grant (`esper.growth.promise` has the formula), on these examples and on
        such as the step was not fitted on. The model stays as it is; it is looked at in evaluation mode, so examples
        that went through batch normalisation do not depend on each other. Under autocast let the loss say so.

        Memory: the features of all slots and their gradients for all examples, and half a gigabyte.

        Args:
            loss: ``loss(model, batch) -> [B]``, the loss of each example; a sequence is one example, so the mean over
                its tokens. The mean over examples is taken as well, if every example counts in it alike.
            batches: What the loss takes, batch by batch; no more are taken than ``examples`` need.
            examples: To look at, rounded up to whole batches. More of them tell candidates apart better.
            draws: Of the initial values of modules that are born with random ones.
            layers: Whether to tell of the host's own layers, too, what their parameters could still grant.
            seed: For the initial values.

        Raises:
            LookError: the loss is no tensor ``[B]`` nor a mean, or not finite; or there are fewer than two examples.
            SlotError: a slot is not called any more.
        """
        require_attached(self)
        slots = dict(self.slots.items())
        return look(self, self.host, slots, loss, batches, examples=examples, draws=draws, layers=layers, seed=seed)

    @check_arguments(SlotError, slot=_SLOT)
    def disable(self, slot: Name) -> None:
        """Let nothing germinate in ``slot`` from now on; a seed that lives there stays.

        Raises:
            SlotError: no such slot.
        """
        self.slots[slot].enabled = False

    @check_arguments(SlotError, slot=_SLOT)
    def enable(self, slot: Name) -> None:
        """Undo `disable`."""
        self.slots[slot].enabled = True

    def release(self) -> None:
        """Take the slots off the host, which then computes and learns as it did before it was attached to."""
        self.frozen.thaw(self.host, training=self.training)
        for one in (*self._hooks, *self._guards):
            one.remove()
        self._guards.clear()
        self.depth.restore()
        self.copies.released = True

    @check_arguments(ConfigError)
    def finalize(self, unfinished: Literal["keep", "drop", "raise"] = "keep") -> nn.Module:
        """An ordinary module that needs no Esper: a copy of the host that computes what it does with what grew in it.

        Fossils are folded in. What becomes of unfinished seeds, which their grower has neither fossilized nor pruned,
        is said by ``unfinished``; `esper.Grower.finish` measures and judges them first, so that there are none.

        The copy keeps the host's state-dict keys; a seed appears beside them as a module ``fossil_BLUEPRINT`` in the
        submodule that it follows, where hooks made of torch operations run it. (In a submodule that runs whatever it
        holds, in another way than `nn.Sequential`, the fossil's tensors are attributes ``fossil_BLUEPRINT_...``
        instead.) It trains on, copies, pickles, compiles and exports like any module, and its layers keep what grew
        when they are put together anew. Only fossils that read the network's input need the whole, where they find it
        as in the example input: in the same place, or under the same keyword; in a part alone they raise KeyError.

        A copy of a block (`block_copy`, `block_zero`) with a weight of 1 is the next module of the `nn.ModuleList` or
        `nn.Sequential` that the block is in, and the configuration says so, as `esper.growth.depth` tells: the copy is
        an ordinary deeper model. With another weight it runs behind its block, of which you are warned.

        Where a class has ``save_pretrained`` and ``push_to_hub``, as Hugging Face's have, these raise AssertionError,
        where ``from_pretrained`` would lose what grew, so not in a model that only became deeper. Whoever gives
        ``state_dict``, as their Trainer does for its checkpoints, gets them with a warning: the finalized model itself
        takes them back.

        Args:
            unfinished: ``keep`` folds in the seeds that count (alpha above 0, not isolated), at their present alpha, so
                that the copy computes what this model does; but not those whose contribution was below 0 when it was
                last measured. It warns of what it kept and dropped. ``drop`` drops them all: the host, which has
                learned together with them, may do much worse. ``raise`` refuses a model that has any.

        Raises:
            ConfigError: ``unfinished`` is something else.
            SlotError: there are unfinished seeds, and ``unfinished`` is ``raise``; or a slot is not called any more.
            ExportError: `torch.export` cannot trace the blueprint of a seed; the copy of a block cannot follow it, as
                it is in a container that its owner does not run module by module; or a weight that something was added
                to is read elsewhere, too.
        """
        return finalize(self, Unfinished(unfinished))
