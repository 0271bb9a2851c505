"""The growing model: a host with its slots, called like the host."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from math import isfinite
from types import MappingProxyType
from typing import Any, Literal, Self, TypeVar, cast

import torch
from torch import Tensor, nn

from esper.config.arguments import AtLeastTwo, Batches, NonNegativeInt, PositiveInt, check_arguments
from esper.errors import CheckpointError, ConfigError, ExportError, LookError, SlotError
from esper.growth.blueprints.registry import get
from esper.growth.depth import CONFIGURATION, DepthTracker
from esper.growth.finalize import build_plain_module, choose_kept, refuse_while_growing
from esper.growth.hooks import (
    GROWING_ADVICE,
    FrozenParts,
    InputHook,
    SourceHook,
    find_attached,
    list_hooks,
    list_named_modules,
    require_no_checkpointing,
    require_unsharded,
    require_untraced,
)
from esper.growth.inputs import (
    Arguments,
    ExampleInput,
    PlainModule,
    find_input_place,
    first_tensor,
    is_mask_or_cache,
    list_argument_names,
)
from esper.growth.links import SLOT_KEY, SLOTS_PREFIX, Copies, OptimizerLink, unwrap_optimizer
from esper.growth.look import Look, look
from esper.growth.probe import probe
from esper.growth.slot import Seed, Slot
from esper.growth.summary import GrowthSummary, Offer, Preview, TriedModule, summarise_slot
from esper.numerics.modules import keep_attributes

M = TypeVar("M", bound=nn.Module)


@cache
def make_subclass(model: type[M], host: type[nn.Module]) -> type[M]:
    """The subclass of ``model`` for hosts of class ``host``, named ``GrowingHOST`` and with the host's signature.

    Libraries inspect the signature of classes, and instances with their own ``forward`` would share it with copies.
    """

    def forward(self: M, *arguments: Any, **keywords: Any) -> Any:
        return model.forward(self, *arguments, **keywords)

    forward.__doc__ = host.forward.__doc__
    vars(forward)["__signature__"] = inspect.signature(host.forward)
    name = f"Growing{host.__name__}"
    members = {"__module__": model.__module__, "__doc__": model.__doc__, "forward": forward}
    return cast("type[M]", type(name, (model,), members))


def make_empty(model: type[M], host: type[nn.Module]) -> M:
    """An instance of the class from `make_subclass` without any state, for copies and pickles."""
    subclass = make_subclass(model, host)
    return subclass.__new__(subclass)


OPTIMIZER_ADVICE = "give a torch.optim optimizer made from model.parameter_groups(lr=...)"
MODEL_ADVICE = (
    "give the model that esper.attach returned: not its host, and not a compiled, averaged or distributed module "
    "around it"
)
Settings = dict[str, tuple[float, ...] | str]


def list_settings(host: nn.Module) -> Settings:
    """What hosts with equal state dicts may differ in, by place, such as numbers of heads and bases of positions.

    Without flags and texts, many of which affect only speed, and ids of tokens, which are often changed.
    """
    settings: Settings = {}
    for path, module in list_named_modules(host):
        prefix = f"{path}." if path else ""
        configuration: dict[str, Any] = getattr(vars(module).get(CONFIGURATION), "__dict__", {})
        for name, value in {**vars(module), **configuration}.items():
            numbers = cast("Sequence[Any]", value if isinstance(value, tuple | list) else (value,))
            is_setting = not name.startswith("_") and not name.endswith("_token_id")
            if is_setting and all(type(number) in (int, float) and isfinite(number) for number in numbers):
                settings[f"{prefix}{name}"] = tuple(map(float, numbers))
        if not [*module.children(), *module.parameters(), *module.buffers()]:  # an activation, for instance
            settings[f"{prefix}class"] = type(module).__name__
    saved = host.state_dict().keys()
    for name, buffer in host.named_buffers():
        if name not in saved and buffer.is_floating_point() and not buffer.is_meta:
            row = buffer.detach().flatten()[: buffer.shape[-1:].numel()]  # a longer input may add rows
            first = row[:8].double().nan_to_num(0.0, 0.0, 0.0)
            settings[name] = tuple(cast("list[float]", first.tolist()))
    return settings


class Slots(nn.Module):
    """Slots of a model by the names of their submodules, in the order of the forward pass."""

    def __init__(self, slots: Mapping[str, Slot]) -> None:
        super().__init__()
        # A dot would mean nesting in state-dict keys; a slash does not occur in names of modules.
        self._keys = {name: name.replace(".", "/") for name in slots}
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
        """Names of the submodules with slots."""
        return list(self._keys)

    def values(self) -> list[Slot]:
        """Slots in the order of the forward pass."""
        return [self[name] for name in self._keys]

    def items(self) -> list[tuple[str, Slot]]:
        """Pairs of a name and a slot."""
        return [(name, self[name]) for name in self._keys]


def _prepare_loading(model: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Load-state-dict pre-hook: reject a state dict with seeds that the model lacks, before anything changes."""
    assert isinstance(model, GrowingModel)
    for plant in model.planters:
        plant(model, state_dict, prefix)
    present, slots = model.slots.state_dict(), f"{prefix}{SLOTS_PREFIX}"
    for key in state_dict:
        if not key.startswith(slots):
            continue
        for slot in model.slots.values():
            slot.require_not_disabled()
        own, saved = present.get(key.removeprefix(slots)), state_dict[key]
        if own is None or (isinstance(own, Tensor) and isinstance(saved, Tensor) and own.shape != saved.shape):
            raise CheckpointError(
                f"the state dict has {key!r} of a seed that this model does not have: save grown models with "
                "esper.save and load them with esper.load; for a Trainer's checkpoint, first make LightningGrower, "
                "TransformersGrower, or esper.growth.persist.GrowthInStateDict(model)"
            )


def require_attached(model: GrowingModel) -> None:
    """Reject what `require_savable` rejects, and a model of which a slot is switched off."""
    for slot in model.slots.values():  # first, as slots may be off one by one
        slot.require_not_disabled()
    require_savable(model)


def require_savable(model: nn.Module, *_: Any) -> None:
    """State-dict pre-hook: reject a sharded model, or one without its growth or whose host does not call its slots."""
    assert isinstance(model, GrowingModel)
    for slot in model.slots.values() if model.growth_off else ():
        slot.require_not_disabled()
    require_unsharded(model)
    modules = dict(list_named_modules(model.host, remove_duplicate=False))
    for name, slot in model.slots.items():
        for place, hook in ((name, slot), *((first, slot.source) for first in slot.chain[:1])):
            if place not in modules or hook not in list_hooks(modules[place]):
                raise SlotError(
                    f"slot {name!r} is no longer called: the model was released, or its submodule {place!r} was "
                    "replaced or lost its hooks after esper.attach; change the host first, then attach"
                )


@cache
def _keep_hooks_uncompiled() -> None:
    """Leave the hooks of growth, which changes, out of compiled graphs; not before a model needs torch's compiler."""
    hooks = [(Slot, "forward"), (InputHook, "forward"), (InputHook, "count_outputs"), (SourceHook, "forward")]
    for kind, method in (*hooks, (FrozenParts, "__call__")):
        setattr(kind, method, torch.compiler.disable(getattr(kind, method)))


class GrowingModel(nn.Module):
    """A host with growth slots, called like the host. Create it with `esper.attach`.

    ``host`` is the original module with its own state-dict keys; keys of seeds are under ``slots``. ``forward`` has the
    host's signature, and other public attributes and methods, such as ``config`` or ``generate``, are the host's. Call
    it from one thread at a time.

    After `release`, or if a submodule with a slot was replaced, `finalize`, `mirror`, ``state_dict``, copies and
    pickles raise SlotError, since growth would be lost.

    Args:
        host: Any module.
        slots: Names of the submodules to hook, with the blueprints that may germinate there; None: all that fit.
        example_input: As for `attach`, like ``causal``.
        causal: Whether tokens must not depend on later ones.
        chains: Names of modules between which hidden units may grow; the slot is after the last one.
        frozen: Names of submodules that never change; ``""`` is the host itself.
        matches: By pattern, the number of submodules that it matches, for `summary`.
    """

    def __init__(
        self,
        host: nn.Module,
        slots: Sequence[str] | Mapping[str, Sequence[str] | None],
        example_input: Arguments,
        *,
        causal: bool | None = None,
        chains: Collection[tuple[str, ...]] = (),
        frozen: Sequence[str] = (),
        matches: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        super().__init__()
        require_unsharded(host)
        attached = find_attached(host)
        if attached is not None:
            raise SlotError(
                f"the model already has growth slots, one behind {attached!r}: use what esper.attach returned then, or "
                "call its release() first"
            )
        require_no_checkpointing(host, frozen)
        # Find the sites before anything is changed.
        offers = slots if isinstance(slots, Mapping) else dict.fromkeys(slots)
        blocks = [name for name, offer in offers.items() if any(get(kind).needs_branch_outputs for kind in offer or ())]
        with keep_attributes(host):
            probed = probe(
                host,
                list(slots),
                example_input,
                causal=causal,
                with_branch_outputs=blocks,
                chains=chains,
                frozen=frozen,
            )
        self.host = host
        self.matches = dict(matches)
        """Number of submodules that each pattern given to `attach` matched."""
        self.host_settings = list_settings(host)
        """What affects the host's output but is not in its state dict."""
        self.example = ExampleInput(example_input)
        self.example_size = first_tensor(example_input)[0].numel()
        """Number of scalars in the input of one example."""
        # Make the slots and hook them to the host.
        _keep_hooks_uncompiled()
        self.input_hook = InputHook(find_input_place(example_input), list_argument_names(host))
        self.optimizer_link = OptimizerLink()
        self.copies = Copies()
        self.depth = DepthTracker(host)
        slots_by_name = {
            name: Slot(
                name,
                site,
                input_hook=self.input_hook,
                optimizer_link=self.optimizer_link,
                copies=self.copies,
                depth=self.depth,
                blueprints=offers[name],
                mask_or_cache=probed.mask_or_cache,
            )
            for name, site in probed.sites.items()
        }
        self._hooks = [host.register_forward_pre_hook(self.input_hook, with_kwargs=True)]
        self._hooks.append(host.register_forward_hook(self.input_hook.count_outputs))
        for name, slot in slots_by_name.items():
            self._hooks.append(host.get_submodule(name).register_forward_hook(slot, with_kwargs=True))
            if slot.source is not None:
                first = host.get_submodule(slot.chain[0])
                self._hooks.append(first.register_forward_pre_hook(slot.source, with_kwargs=True))
        self.slots = Slots(slots_by_name)
        self.training = host.training
        self.slots.train(host.training)
        self.input_hook.train(host.training)
        # Freeze parts of the host. If no part of it learns, the last slot keeps the loss differentiable.
        self.frozen = FrozenParts(host, frozen)
        if frozen:
            self._hooks.append(host.register_forward_pre_hook(self.frozen))
        for last in self.slots.values()[-1:]:
            last.adds_leaf = self.frozen.holds_all(host)
        # Methods that would save the host without its seeds raise an error until `release`.
        self._refused = refuse_while_growing(host, self.slots)
        self.tried: tuple[TriedModule, ...] = ()
        """All modules that a grower has planted, with their outcomes, for `summary`."""
        self._warned_of_compiling = False
        self.growth_off = False
        self.host_parameters = sum(parameter.numel() for parameter in host.parameters())
        """Number of parameters before any growth."""
        self.host_flops = None if probed.uncounted else probed.flops
        """FLOPs of the host's forward pass for one example, before any growth; None if not all could be counted."""
        self.uncounted_flops = probed.uncounted
        """Operations of the host that torch cannot count, and where; empty if there are none."""
        if probed.uncounted:
            warnings.warn(
                f"the FLOPs of this host are unknown, so budgets and rent in FLOPs are refused: torch cannot count "
                f"{probed.uncounted}; register the formula of the operation with "
                "torch.utils.flop_counter.register_flop_formula",
                stacklevel=4,
            )
        self.output_shape = shape = probed.output_shape
        """Shape of the host's output for the example input, ``[B, ...]``; empty if it returns no tensor."""
        self.outputs = shape[1 if len(shape) == 4 else -1] if shape else None
        """Channels of the host's output (the classes of a classifier), in axis 1 of images ``[B, C, H, W]`` and else
        in the last one; None if it returns no tensor."""
        self.planters: list[Callable[[GrowingModel, dict[str, Any], str], None]] = []
        """Called with this model, a state dict that is about to be loaded, and the prefix of its names there."""
        self.register_state_dict_pre_hook(require_savable)
        self.register_load_state_dict_pre_hook(_prepare_loading)
        self.__class__ = make_subclass(type(self), type(host))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            if name.startswith("_"):  # only public names are taken from the host
                raise
            try:
                return getattr(super().__getattr__("host"), name)
            except AttributeError:
                raise error from None

    def __reduce__(self) -> tuple[Any, ...]:
        require_attached(self)
        # `nn.Module.__getstate__` drops the result of `compile`, which in a copy would run this model.
        return make_empty, (type(self).__bases__[0], type(self.host)), self.__getstate__()

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """The host's output, with growth."""
        require_untraced()  # an export would fix the current seeds
        if torch.compiler.is_compiling() and not self._warned_of_compiling:
            self._warned_of_compiling = True
            warnings.warn("a growing model runs uncompiled at its slots: compile what finalize() returns", stacklevel=2)
        return self.host(*arguments, **keywords)

    def __prepare_scriptable__(self) -> Self:
        """Raise an error for `torch.jit.script`, which calls this method first."""
        raise ExportError(GROWING_ADVICE)

    def train(self, mode: bool = True) -> Self:
        """Set the mode of all parts except frozen ones, which stay in evaluation mode."""
        super().train(mode)
        self.frozen.set_eval(self.host)
        return self

    @contextmanager
    def without_growth(self) -> Generator[None]:
        """Context manager in which the host computes without growth.

        A frozen host gives bit for bit the outputs it had before `esper.attach`, except that torch's own encoder layers
        and attention round differently where they have slots. Nothing may be planted, removed or saved within the
        block. With activation checkpointing, run forward and backward on the same side of the block.
        """
        if torch.compiler.is_compiling():  # torch then runs the function uncompiled, unless it is told not to
            raise SlotError("a compiled function cannot switch growth off: call it within model.without_growth()")
        if self.growth_off:
            yield
            return
        with ExitStack() as stack:
            # Configurations do not count grown blocks, and slots return the host's features.
            stack.callback(self.depth.set_blocks, self.depth.blocks)
            self.depth.set_blocks({})
            for slot in self.slots.values():
                stack.enter_context(slot.disabled())
            self.growth_off = True
            try:
                yield
            finally:
                self.growth_off = False

    @property
    def seeds(self) -> dict[str, Seed]:
        """The seeds by slot, live and fossilized."""
        return {slot.name: slot.seed for slot in self.slots.values() if slot.seed is not None}

    @property
    def added_parameters(self) -> int:
        """Number of parameters of all seeds, live and fossilized."""
        return sum(parameter.numel() for seed in self.seeds.values() for parameter in seed.parameters())

    @check_arguments(SlotError, base="give a list of parameter groups, as an optimizer takes them")
    def parameter_groups(self, base: Sequence[Mapping[str, Any]] | None = None, **options: Any) -> list[dict[str, Any]]:
        """Parameter groups for an optimizer: one for the host and one per slot, empty while nothing has grown there.

        Seeds add parameters to the group of their slot and remove them again. Schedulers keep working, since no group
        is added later. ``options`` (``lr``, ``weight_decay``, ...) apply to all groups that do not set them. Parameters
        that do not require a gradient are left out of the host's group.

        Args:
            base: Your own groups of the host's parameters, such as those with and without weight decay, instead of one;
                what they leave out another optimizer may train.
            options: Options of the optimizer.

        Raises:
            SlotError: growth is switched off, as within `without_growth`, or ``base`` has parameters of another model.
        """
        for slot in self.slots.values():
            slot.require_not_disabled()
        require_unsharded(self)
        own = list(self.host.parameters())
        groups = [{**options, **group, "params": list(group["params"])} for group in base or ({"params": own},)]
        if not set(own).issuperset(parameter for group in groups for parameter in group["params"]):
            raise SlotError("base has parameters that are not of the host: make it from the parameters of model.host")
        if base is None:
            groups[0]["params"] = [parameter for parameter in own if parameter.requires_grad]
        for slot in self.slots.values():
            parameters = [] if slot.seed is None else list(slot.seed.parameters())
            groups.append({"params": parameters, SLOT_KEY: slot.name, **options})
        return groups

    @check_arguments(SlotError, optimizer=OPTIMIZER_ADVICE)
    def link(self, optimizer: torch.optim.Optimizer) -> None:
        """Add the parameters of future seeds to ``optimizer``, or to the one inside a wrapper, such as accelerate's.

        `esper.Grower` calls this itself.

        Raises:
            SlotError: the optimizer was not made from this model's `parameter_groups`, does not support step hooks, or
                divides the parameters among processes.
        """
        require_unsharded(self)
        self.optimizer_link.link(unwrap_optimizer(optimizer), self.slots, self.named_parameters)

    @check_arguments(SlotError)
    def mirror(self, average: PlainModule) -> None:
        """Make a copy of this model grow in the same way, for instance an average of its weights.

        ```python
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999))
        model.mirror(average)
        ```

        Seeds that are planted, removed or fossilized in this model are also in the copy; new seeds start with the same
        values. After a rollback of this model, the copy gets the restored values.

        Args:
            average: A copy of this model, or a module that contains one.

        Raises:
            SlotError: ``average`` contains no copy of this model, or a slot is no longer called.
        """
        require_attached(self)
        mirrors = [part for part in average.modules() if isinstance(part, GrowingModel)]
        if not mirrors or any(mirror is self or list(mirror.slots) != list(self.slots) for mirror in mirrors):
            raise SlotError(
                f"the {type(average).__name__} contains no copy of this model: give copy.deepcopy(model), or a "
                "module with one, such as torch.optim.swa_utils.AveragedModel(model)"
            )
        for mirror in mirrors:
            self.copies.add_mirror(mirror, self.slots.values())

    def summary(self) -> GrowthSummary:
        """Printable table of all slots: stage, and the seed's parameters, FLOPs, weight and contribution.

        A second table lists each module that a grower has planted: by what it was kept or pruned, and the measurements
        that decided it.
        """
        slots = tuple(map(summarise_slot, self.slots.values()))
        return GrowthSummary(slots, self.host_parameters, self.tried, self.matches)

    def preview(self) -> Preview:
        """Printable table of the parameters and FLOPs of each blueprint available in each free slot."""
        offers = [
            Offer(slot.name, name, *get(name).cost_at(slot.site))
            for slot in self.slots.values()
            if slot.enabled and slot.occupant is None
            for name in slot.blueprints
        ]
        return Preview(tuple(offers), self.host_parameters)

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
        """Measure the promise of every available blueprint in every slot, before anything is planted.

        ```python
        looked = model.look(lambda model, batch: cross_entropy(model(batch[0]), batch[1], reduction="none"), loader)
        print(looked)
        ```

        The promise is the fraction of a uniform decrease of all examples' losses that one gradient step of such a
        module achieves (`esper.growth.promise` has the formula), on these examples and on held-out ones. One backward
        pass measures all candidates, in free and occupied slots; the model does not change, and runs in evaluation
        mode. If you need autocast, enter it in the loss function. Memory: the features of all slots and their gradients
        for all examples, plus half a gigabyte.

        Args:
            loss: ``loss(model, batch) -> [B]``, the loss of each example; for a sequence, the mean over its tokens.
            batches: Batches for ``loss``; as many are used as ``examples`` requires.
            examples: Number of examples, rounded up to whole batches.
            draws: Number of random initialisations per module.
            layers: Whether to also measure the promise of the host's own layers.
            seed: Random seed of the initial values.

        Raises:
            LookError: the loss is not a tensor ``[B]``, or is not finite; or there are fewer than two examples.
            SlotError: a slot is no longer called.
        """
        require_attached(self)
        return look(self, loss, batches, examples=examples, draws=draws, layers=layers, seed=seed)

    def release(self) -> None:
        """Remove the slots from the host, which then computes and learns as before `esper.attach`."""
        self.frozen.unfreeze(self.host, training=self.training)
        for handle in self._hooks:
            handle.remove()
        while self._refused:
            part, method = self._refused.pop()
            del vars(part)[method]
        self.depth.set_blocks({})
        self.copies.released = True

    @check_arguments(ConfigError)
    def finalize(self, unfinished: Literal["keep", "drop", "raise"] = "keep") -> nn.Module:
        """A copy of the host with the seeds built in: an ordinary module that does not need Esper.

        The copy contains all fossils; to train it, make a new optimizer. ``unfinished`` applies to seeds that a grower
        has neither fossilized nor pruned; call `esper.Grower.finish` first so that there are none.

        The copy keeps the host's state-dict keys. A seed becomes a module ``fossil_BLUEPRINT`` in the submodule it
        follows, run by hooks made of torch operations; if that submodule runs all its children in its own way, the
        tensors become attributes ``fossil_BLUEPRINT_...``. The copy trains, copies, pickles, compiles and exports like
        any module, except by `torch.jit.script`. Fossils that need the network's input raise KeyError if a part of it
        is called alone.

        A copy of a block with a weight of 1 becomes the next module of the `nn.ModuleList` or `nn.Sequential` of its
        block, and the configuration counts it (see `esper.growth.depth`); with another weight it runs after its block,
        with a warning. New hidden units extend the layers between which they grew. ``save_pretrained`` and
        ``push_to_hub``, as of Hugging Face models, raise KeyError unless the configuration can express what grew.

        Args:
            unfinished: ``keep`` builds in seeds that affect the output (alpha above 0, not isolated), at their current
                alpha, except those whose last contribution was below 0; a warning lists kept and dropped seeds.
                ``drop`` drops them all, which may hurt a host that has trained with them. ``raise`` raises an error if
                there are any.

        Raises:
            ConfigError: ``unfinished`` has another value.
            SlotError: there are unfinished seeds and ``unfinished`` is ``raise``; or a slot is no longer called.
            ExportError: `torch.export` cannot trace a seed's blueprint; a copy of a block cannot follow it, because
                their container is not run module by module; a weight that would change is shared, or also read
                elsewhere; or the host's code depends on its original number of hidden units.
        """
        taken = [name for name in list_argument_names(self.host) if is_mask_or_cache(name)]
        mixing = [slot.name for slot in self.slots.values() if slot.mixes_positions]
        if taken and mixing:
            warnings.warn(
                f"positions are mixed at {mixing[0]!r}, and a plain model cannot check its calls: call it without "
                f"{', '.join(taken)} (use_cache=False for a cache), or its outputs are wrong without an error",
                stacklevel=3,
            )
        require_attached(self)
        kept = choose_kept(self.seeds, unfinished)
        with torch.inference_mode(False):
            plain = build_plain_module(self, kept)
        self.optimizer_link.finalized = True
        return plain
