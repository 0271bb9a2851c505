"""A growth slot: an `nn.Module` instance registered as forward hook of a host's submodule.

A module instance, not a closure: it deep-copies, pickles and compiles with the host. The host itself stays untouched.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import wraps
from typing import Any, Protocol, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from esper.config.arguments import Name, NonNegativeFloat, check_arguments
from esper.errors import SlotError
from esper.growth.blueprints.registry import LAYER_CONTEXTS, Context, LayerCall, for_site, get
from esper.growth.depth import Depth, convert_block
from esper.growth.followers import Compilations, Copies, Ownership
from esper.growth.positions import cut_to_lengths, explain_apart, pad_nested, refuse_to_mix
from esper.growth.seed import Seed
from esper.growth.sharding import blank, require_shared, require_whole, reshard, shard
from esper.growth.site import IN_ORDER, Site
from esper.growth.taps import GrowthHook, InputTap
from esper.lifecycle.actions import Blend

Owner = TypeVar("Owner")

_LOCK = threading.RLock()


def share(change: Callable[[Owner], AbstractContextManager[Any]]) -> Callable[[Owner], AbstractContextManager[None]]:
    """Let what the first block changes of its owner be restored by the last one, whichever ends first.

    Several blocks may want the same change at once: one within another, or in other threads.
    """
    entered: WeakKeyDictionary[Owner, tuple[ExitStack, int]] = WeakKeyDictionary()

    @contextmanager
    @wraps(change)
    def block(owner: Owner) -> Generator[None]:
        with _LOCK:
            stack, blocks = entered.get(owner) or (ExitStack(), 0)
            if not blocks:
                stack.enter_context(change(owner))
            entered[owner] = stack, blocks + 1
        try:
            yield
        finally:
            with _LOCK:
                stack, blocks = entered.pop(owner)
                if blocks > 1:
                    entered[owner] = stack, blocks - 1
                else:
                    stack.close()

    return block


class SlotModule(Protocol):
    """Whatever lives in a slot: it sees the host's features and the network's input and returns new features.

    A seed is given what its blueprint `reads`, and features in place of nothing: parts of a host can then be called
    alone, as encoders are when a language model generates.
    """

    def __call__(self, features: Tensor, inputs: Any) -> Tensor: ...


Listener = Callable[["Slot", LayerCall, Tensor], Tensor]
"""Hears what a slot's layer was called with and what the slot returns in a forward pass, and returns the same, or what
takes its place with equal values."""


_WEIGHT = "give a weight: a finite number from 0 on, usually 1 at most"


class Slot(GrowthHook):
    """One place where a host may grow. Dormant (no occupant) it returns the host's features as they are.

    Args:
        name: Of the submodule that it hooks.
        site: The features that pass there.
        tap: Where the network's input is to be had.
        ownership: Which optimizer gets the parameters of seeds.
        copies: Of the model, that grow as it does.
        compilations: Of the model.
        depth: Of the model's host.
        blueprints: Names of those that may germinate here; None: all that serve the site.

    Raises:
        UnknownBlueprintError: nobody registered a name.
        SlotError: a blueprint does not serve the site, or the list is empty.
    """

    anchor: Tensor

    def __init__(
        self,
        name: str,
        site: Site,
        tap: InputTap,
        ownership: Ownership,
        copies: Copies,
        compilations: Compilations,
        depth: Depth,
        blueprints: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        self.name = name
        self.site = site
        self.tap = tap
        self.ownership = ownership
        self.copies = copies
        self.compilations = compilations
        self.depth = depth
        self.blueprints = _require_offers(name, site, blueprints)
        """Names of the blueprints that may germinate here."""
        self.enabled = True
        """Whether anything may germinate here."""
        # Not persistent: it only tells, after any `.to()`, where new seeds belong.
        anchor = torch.zeros(()) if site.layer is None else torch.zeros_like(site.layer.anchor)
        self.register_buffer("anchor", anchor, persistent=False)
        self.occupant: SlotModule | None = None
        self._hidden: list[SlotModule | None] = []  # a list, or what is not seen would be a submodule
        self.begins_graph = False
        """Whether to give a loss something to be differentiated by where nothing before and behind learns."""
        self.listener: Listener | None = None
        """Hears all forward passes of the loop that trains, but what is compiled and passes on the side."""
        self.sharding: dict[str, Any] | None = None
        """Options of `fully_shard` for seeds; None: they are whole, as is the host."""

    def __getstate__(self) -> dict[str, Any]:
        # Copies are not what the loop trains, and whoever is not seen now does not come back to them.
        return {**self.__dict__, "listener": None, "_hidden": []}

    def forward(
        self, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Tensor
    ) -> Tensor:
        if torch.compiler.is_compiling():
            self.compilations.count_trace()
        else:
            self.compilations.uncompiled += 1
        call = LayerCall(arguments, keywords)
        passed = self._begin_graph(self._pass(module, call, output))
        if torch.compiler.is_compiling() or self.listener is None:  # in this order nothing is compiled anew for it
            return passed
        return self.listener(self, call, passed)

    def _pass(self, module: nn.Module, call: LayerCall, output: Tensor) -> Tensor:
        if self.occupant is None:
            return output
        seed = self.seed
        if seed is not None and seed.blueprint.mixes_positions and self.site.layout in IN_ORDER:
            refuse_to_mix(self.name, seed.blueprint.name, self.tap.given, output)
        if output.dtype != self.anchor.dtype and self.sharding is None:  # there a policy may say otherwise
            self._require_same_type(module, output)
        reads = Context.NETWORK if seed is None else seed.reads
        if output.is_nested:
            return self._pass_nested(self.occupant, reads, call, output)
        match reads:
            case Context.NOTHING:
                return self.occupant(output, output)
            case Context.NETWORK:
                return self.occupant(output, self.tap.inputs)
            case Context.LAYER:
                return self.occupant(output, self._require_first(call))
            case Context.CALL:
                return self.occupant(output, call)

    def _pass_nested(self, occupant: SlotModule, context: Context, call: LayerCall, output: Tensor) -> Tensor:
        """With zeros where an example has ended."""
        padded, inputs = pad_nested(output, self.site.positions), None
        if reads is Context.NETWORK:
            inputs = self.tap.inputs
            padded = pad_nested(output, inputs.shape[1])
        elif reads is Context.LAYER:
            inputs = pad_nested(self._require_first(call), self.site.positions)
        elif reads is Context.CALL:
            raise SlotError(
                f"the seed in slot {self.name!r} calls a copy of its block, which is given nested tensors: build "
                "torch's TransformerEncoder with enable_nested_tensor=False"
            )
        return cut_to_lengths(occupant(padded, padded if inputs is None else inputs), output)

    def _require_first(self, call: LayerCall) -> Tensor:
        if call.first_argument is not None:
            return call.first_argument
        raise SlotError(f"the layer that slot {self.name!r} follows was called without a tensor to begin with")

    def _begin_graph(self, output: Tensor) -> Tensor:
        """In training, features of a frozen host by which a loss can be differentiated, though nothing learns yet."""
        if not (self.begins_graph and self.training and torch.is_grad_enabled()) or output.requires_grad:
            return output
        return output + torch.zeros_like(output, requires_grad=True)

    @property
    def seed(self) -> Seed | None:
        """The seed that lives here, live or fossilized."""
        return self.occupant if isinstance(self.occupant, Seed) else None

    @check_arguments(
        SlotError,
        blueprint="give the name of a blueprint",
        blend="give an esper.lifecycle.actions.Blend",
        alpha=_WEIGHT,
    )
    def germinate(
        self,
        blueprint: Name,
        generator: torch.Generator | None = None,
        *,
        blend: Blend = Blend.ADD,
        alpha: NonNegativeFloat = 0.0,
    ) -> Seed:
        """Plant a fresh seed and hand its parameters to the optimizer; returns the seed.

        Args:
            blueprint: Its name.
            generator: Source of the initial values; None: one that is seeded from torch's global generator, but not
                where processes share what grows.
            blend: How its output joins the features.
            alpha: Its weight. A seed that is planted by hand counts for nothing until `set_alpha` gives it weight.

        Raises:
            UnknownBlueprintError: no such blueprint.
            SlotError: the slot is taken or disabled, the blueprint is not on offer here, or an argument is none.
        """
        kind = get(blueprint)
        if self.occupant is not None:
            raise SlotError(f"slot {self.name!r} is taken; prune its seed first")
        if not self.enabled:
            raise SlotError(f"slot {self.name!r} is disabled; enable it first")
        if not kind.supports(self.site):
            why = explain_apart(self.site) if kind.mixes_positions else ""
            raise SlotError(
                f"blueprint {blueprint!r} does not serve {self.site.layout} features at slot {self.name!r}{why}"
            )
        if blueprint not in self.blueprints:
            offered = ", ".join(self.blueprints)
            raise SlotError(f"blueprint {blueprint!r} is not on offer at slot {self.name!r}, which has {offered}")
        if blend is not Blend.ADD and kind.context in LAYER_CONTEXTS:
            raise SlotError(f"blueprint {blueprint!r} only adds to the features: it takes no blend but 'add'")
        if generator is None and self.sharding is not None:
            raise SlotError("processes share what grows: give a generator, which has the same seed in all of them")
        if generator is None:
            generator = torch.Generator().manual_seed(int(torch.randint(2**62, ())))
        seed = Seed(kind(self.site, generator), self.site, blend)
        seed.alpha.fill_(alpha)
        return self.plant(seed)

    def plant(self, seed: Seed) -> Seed:
        """Let a seed that was made for the site live here, and hand its parameters to the optimizer.

        Raises:
            SlotError: the slot is taken, or switched off by a block; the host is sharded and seeds are not to be, or
                the other way round; or its configuration cannot be told of another block.
        """
        self.require_seen()
        if self.occupant is not None:
            raise SlotError(f"slot {self.name!r} is taken; prune its seed first")
        if self.sharding is None:
            require_whole(self.depth.host.named_parameters())
            self.fit(seed)
        else:
            reshard(self.depth.host)
            require_shared(self.depth.host.parameters())
            shard(self.fit(seed), self.sharding)
        self.depth.follow(self.name, seed.blueprint.find_block())
        self.ownership.add_parameters(self.name, list(seed.parameters()))
        self._settle(seed)
        self.copies.follow_change(self)
        return seed

    def fit(self, seed: Seed) -> Seed:
        """Give a seed the device, type and mode of the features here; a copy of a block has those of the block."""
        block, layer = seed.blueprint.find_block(), self.site.layer
        if block is None or layer is None:
            return seed.to(self.anchor.device, self.anchor.dtype).train(self.training)
        seed.to(self.anchor.device)
        seed.alpha = seed.alpha.to(self.anchor)
        convert_block(block, layer.module)
        return seed.train(self.training)

    def prune(self) -> None:
        """Remove the seed, if there is one, and all that the optimizer knew of it; a fossil stays.

        Raises:
            SlotError: the seed is fossilized, or the slot is switched off by a block.
        """
        self.require_seen()
        seed = self.seed
        if seed is None:
            return
        if seed.fossilized:
            raise SlotError(f"the seed in slot {self.name!r} is fossilized: it is part of the model for good")
        self.remove()

    def remove(self) -> None:
        """Remove the seed, if there is one, fossil or not: for rollbacks.

        Raises:
            SlotError: the slot is switched off by a block.
        """
        self.require_seen()
        if self.seed is not None:
            self.ownership.withdraw(self.name, list(self.seed.parameters()))
            self._settle(None)
            self.depth.follow(self.name, None)
            self.copies.follow_change(self)

    def fossilize(self) -> None:
        """Make the seed part of the model for good; its parameters go on learning.

        Raises:
            SlotError: there is no seed.
        """
        self._require_seed().fossilized = True
        self.copies.sync_slot(self)

    @check_arguments(SlotError, alpha=_WEIGHT)
    def set_alpha(self, alpha: NonNegativeFloat) -> None:
        """Give the seed another weight.

        Raises:
            SlotError: there is no seed, it is fossilized, or the weight is none.
        """
        seed = self._require_seed()
        if seed.fossilized:
            raise SlotError(f"the seed in slot {self.name!r} is fossilized: its alpha is fixed")
        seed.alpha.fill_(alpha)
        self.copies.sync_slot(self)

    def shard_growth(self, options: dict[str, Any]) -> None:
        """Let what grows here be sharded by ``options`` of `fully_shard`, what grew already at once."""
        self.sharding = options
        if self.site.layer is not None and any(get(name).reads is Context.CALL for name in self.blueprints):
            self.site = replace(self.site, layer=blank(self.site.layer))
        if self.seed is not None:
            shard(self.seed, options)

    @share
    @contextmanager
    def vacate(self) -> Generator[None]:
        """Within the block the slot is dormant, whoever lives here; parameters stay with the optimizer.

        So it is in all threads, until the last of several blocks ends. A seed follows what became of the model's type,
        device and mode meanwhile.
        """
        occupant, before = self.occupant, self._describe_place()
        self._hidden.append(occupant)
        self._settle(None)
        try:
            yield
        finally:
            self._hidden.clear()
            self._settle(occupant)
            if self.seed is not None and self._describe_place() != before:
                self.fit(self.seed)

    def _describe_place(self) -> tuple[Any, ...]:
        """What a seed here follows."""
        return self.training, self.anchor.dtype, self.anchor.device

    def require_seen(self) -> None:
        """Refuse to change what is not seen: it comes back when the block ends, in place of what came meanwhile.

        Raises:
            SlotError: the slot is switched off by a block.
        """
        if self._hidden:
            raise SlotError(
                f"slot {self.name!r} is switched off for the moment, as within model.without_growth(): leave that "
                "block before anything grows, goes or is saved"
            )

    @contextmanager
    def try_on(self, seed: Seed) -> Generator[None]:
        """Within the block ``seed`` lives in this slot, which is free, and nobody is told: for a rehearsal."""
        assert self.occupant is None
        self.depth.follow(self.name, self.fit(seed).blueprint.find_block())
        self._settle(seed)
        try:
            yield
        finally:
            self._settle(None)
            self.depth.follow(self.name, None)

    def _settle(self, occupant: SlotModule | None) -> None:
        """Let ``occupant`` live here; what was compiled for the same before is good for it again."""
        del self.occupant  # or a module that left would leave another trace than one that never came
        self.occupant = occupant

    def _require_same_type(self, module: nn.Module, output: Tensor) -> None:
        """Refuse a host that was converted without its slots; other types are autocast's, or the host's own affair."""
        own = next(module.parameters(), None)
        if self.seed is not None and own is not None and own.dtype == output.dtype:
            raise SlotError(
                f"the seed in slot {self.name!r} is {self.anchor.dtype}, but its host became {output.dtype}: convert "
                "the whole growing model, as by model.double(), and not its host alone"
            )

    def _require_seed(self) -> Seed:
        seed = self.seed
        if seed is None:
            raise SlotError(f"slot {self.name!r} holds no seed; germinate one first")
        return seed


def _require_offers(name: str, site: Site, blueprints: Sequence[str] | None) -> tuple[str, ...]:
    fit = tuple(kind.name for kind in for_site(site))
    if blueprints is None and (usual := tuple(name for name in fit if get(name).reads not in LAYER_CONTEXTS)):
        return usual
    asked = () if blueprints is None else tuple(dict.fromkeys(blueprints))
    unfit = [blueprint for blueprint in asked if not get(blueprint).supports(site)]
    if asked and not unfit:
        return asked
    order = "causal " if site.causal else ""
    wrong = f"blueprint {unfit[0]!r} does not serve" if unfit else "no blueprint was named for"
    if blueprints is None:
        wrong = "no blueprint serves"
    able = f"those that do are {', '.join(fit)}" if fit else "register one of your own that does"
    why = explain_apart(site) if unfit and get(unfit[0]).mixes_positions else ""
    raise SlotError(f"{wrong} the {order}{site.layout} {site.shape} at slot {name!r}{why}; {able}")
