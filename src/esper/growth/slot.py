"""A growth slot: an `nn.Module` instance registered as forward hook of a host's submodule.

A module instance, not a closure: it deep-copies, pickles and compiles with the host. The host itself stays untouched.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Annotated, Any, Protocol, cast

import torch
from pydantic import Field
from torch import Tensor, nn

from esper.config.arguments import Name, NonNegativeFloat, check_arguments
from esper.errors import SlotError
from esper.growth.blueprints.registry import LAYER_CONTEXTS, Context, LayerCall, for_site, get
from esper.growth.data_parallel import synchronize_seed
from esper.growth.depth import DepthTracker, convert_block
from esper.growth.followers import Compilations, Copies, Ownership
from esper.growth.positions import cut_to_lengths, explain_apart, pad_nested, refuse_to_mix
from esper.growth.seed import Seed
from esper.growth.sharding import add_blank_copy, require_sharded_host, require_whole, reshard, shard
from esper.growth.site import IN_ORDER, Site
from esper.growth.taps import GrowthHook, InputTap, SourceTap, find_features, replace_features
from esper.lifecycle.actions import Blend


class SlotModule(Protocol):
    """A callable in a slot, such as a seed: returns new features from the host's features and a context.

    A seed gets the context that its blueprint needs, and the features where it needs none: parts of a host can then be
    called alone, as encoders are when a language model generates. Other callables get the network's input.
    """

    def __call__(self, features: Tensor, inputs: Any) -> Tensor: ...


FeatureHook = Callable[["Slot", LayerCall, Tensor], Tensor]
"""Called with a slot, the call of its layer and the slot's output; returns the output, or a tensor of equal values."""


Weight = Annotated[NonNegativeFloat, Field(le=1)]
"""Weight of a seed in a slot."""
_WEIGHT_ADVICE = "give a weight: a number from 0 to 1"


class Slot(GrowthHook):
    """One place where a host may grow. Dormant (no occupant) it returns the host's features as they are.

    Args:
        name: Of the submodule that it hooks.
        site: Layout and size of the features there.
        tap: Holds the network's input.
        ownership: Hands the parameters of seeds to an optimizer.
        copies: Of the model, that grow as it does.
        compilations: Counts graphs of the model.
        depth: Counts the host's blocks.
        blueprints: Names of those that may germinate here; None: all that support the site.

    Raises:
        UnknownBlueprintError: no blueprint of a name is registered.
        SlotError: a blueprint does not support the site, or the list is empty.
    """

    anchor: Tensor

    def __init__(
        self,
        name: str,
        site: Site,
        *,
        tap: InputTap,
        ownership: Ownership,
        copies: Copies,
        compilations: Compilations,
        depth: DepthTracker,
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
        self.source = None if site.hidden is None else SourceTap(tap.gate)
        """Keeps the input of the layers that make the hidden units which the slot's layer reads, if units may grow."""
        self.makers: tuple[str, ...] = () if site.hidden is None else site.hidden.names
        """Names of these layers."""
        self.blueprints = _choose_blueprints(name, site, blueprints)
        """Names of the blueprints that may germinate here."""
        self.enabled = True
        """Whether anything may germinate here."""
        # Follows the model's device and type, which new seeds get. Not persistent, as it has no values.
        anchor = torch.zeros(()) if site.layer is None else torch.zeros_like(site.layer.anchor)
        self.register_buffer("anchor", anchor, persistent=False)
        self.occupant: SlotModule | None = None
        self._disabled: list[SlotModule | None] = []  # a list, or the disabled module would be a submodule
        self.adds_leaf = False
        """Whether to add zeros that require a gradient, so that a loss can be differentiated before anything grew."""
        self.feature_hook: FeatureHook | None = None
        """Called after every uncompiled forward pass of training; passes on the side leave it out."""
        self.sharding: dict[str, Any] | None = None
        """Options of `fully_shard` for seeds; None: seeds are whole, as is the host."""

    def __getstate__(self) -> dict[str, Any]:
        # The hook belongs to the training loop of this model, and a disabled module is not restored in a copy.
        return {**self.__dict__, "feature_hook": None, "_disabled": []}

    def forward(self, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> Any:
        call = LayerCall(arguments, keywords)
        if torch.compiler.is_compiling():
            self.compilations.count_trace()
            return self._compute(module, call, output)
        self.compilations.uncompiled += 1
        with self.tap.gate.passing():  # also where a part of the host is called alone
            return self._compute(module, call, output)

    def _compute(self, module: nn.Module, call: LayerCall, output: Any) -> Any:
        """The slot's output after this call of its layer."""
        occupant, features = self.occupant, cast("Tensor", find_features(output))
        if occupant is not None:
            features = self._run(occupant, module, call, features)
        if self.adds_leaf and self.training and torch.is_grad_enabled() and not features.requires_grad:
            features = features + torch.zeros_like(features, requires_grad=True)
        # In this order, setting the hook recompiles nothing.
        if not torch.compiler.is_compiling() and self.feature_hook is not None:
            features = self.feature_hook(self, call, features)
        if self.source is not None:
            self.source.clear()
        return replace_features(output, features)

    def _run(self, occupant: SlotModule, module: nn.Module, call: LayerCall, output: Tensor) -> Tensor:
        """The output of the module in the slot, with the context that it needs, from features ``output``."""
        seed = self.seed
        # Refuse what would compute something else than in training.
        if seed is not None and seed.blueprint.mixes_positions and self.site.layout in IN_ORDER:
            refuse_to_mix(self.name, seed.blueprint.name, self.tap.hints, output)
        if output.dtype != self.anchor.dtype and self.sharding is None:  # with sharding a policy sets the type
            # A host that was converted without its slots; other types are autocast's, or the host's own choice.
            parameter = next(module.parameters(), None)
            if seed is not None and parameter is not None and parameter.dtype == output.dtype:
                raise SlotError(
                    f"the seed in slot {self.name!r} is {self.anchor.dtype}, but its host became {output.dtype}: "
                    "convert the whole growing model, for instance by model.double(), not only its host"
                )
        # Find the second argument.
        context = Context.NETWORK if seed is None else seed.context
        inputs: Any
        match context:
            case Context.NOTHING:
                inputs = output
            case Context.NETWORK:
                inputs = self.tap.get_inputs()
            case Context.LAYER:
                inputs = call.first_argument
                if inputs is None:
                    raise SlotError(f"the layer that slot {self.name!r} follows was called without a first tensor")
            case Context.CALL:
                inputs = call
            case Context.HIDDEN:
                inputs = None if self.source is None else self.source.get()
                if inputs is None:
                    raise SlotError(
                        f"the layer that slot {self.name!r} follows was called without those that make its hidden units"
                    )
        if not output.is_nested:
            return occupant(output, inputs)
        # Nested tensors are padded by zeros where an example has ended, and cut again.
        if context is Context.CALL:
            raise SlotError(
                f"the seed in slot {self.name!r} calls a copy of its block, which is given nested tensors: build "
                "torch's TransformerEncoder with enable_nested_tensor=False"
            )
        features = pad_nested(output, inputs.shape[1] if context is Context.NETWORK else self.site.positions)
        if context is Context.NOTHING:
            inputs = features
        elif context in (Context.LAYER, Context.HIDDEN):
            inputs = pad_nested(inputs, self.site.positions)
        return cut_to_lengths(occupant(features, inputs), output)

    @property
    def seed(self) -> Seed | None:
        """The seed in this slot, live or fossilized."""
        return self.occupant if isinstance(self.occupant, Seed) else None

    @check_arguments(
        SlotError,
        blueprint="give the name of a blueprint",
        blend="give an esper.lifecycle.actions.Blend",
        alpha=_WEIGHT_ADVICE,
    )
    def germinate(
        self,
        blueprint: Name,
        generator: torch.Generator | None = None,
        *,
        blend: Blend = Blend.ADD,
        alpha: Weight = 0.0,
    ) -> Seed:
        """Plant a fresh seed and hand its parameters to the optimizer; returns the seed.

        Under `torch.nn.parallel.DistributedDataParallel` plant the same in all processes: the seed has the same values
        in all of them, and its gradients are averaged.

        Args:
            blueprint: Its name.
            generator: Source of the initial values; None: one that is seeded from torch's global generator, but not
                where processes share what grows.
            blend: How its output joins the features.
            alpha: Its weight. A seed that is planted by hand has no effect until `set_alpha` gives it weight.

        Raises:
            UnknownBlueprintError: no such blueprint.
            SlotError: the slot is taken or disabled, the blueprint is not on offer here, or an argument is invalid.
            DistributedError: under DistributedDataParallel, another process plants something else.
        """
        get(blueprint)
        if self.occupant is not None:
            raise SlotError(f"slot {self.name!r} is taken; prune its seed first")
        if not self.enabled:
            raise SlotError(f"slot {self.name!r} is disabled; enable it first")
        seed = self.make_seed(blueprint, generator, blend)
        seed.alpha.fill_(alpha)
        return self.plant(seed)

    def make_seed(self, blueprint: str, generator: torch.Generator | None, blend: Blend) -> Seed:
        """A fresh seed for this slot, with weight 0, which is not planted; the arguments are those of `germinate`.

        Raises:
            UnknownBlueprintError: no such blueprint.
            SlotError: the blueprint is not on offer here, or an argument is invalid.
        """
        # Refuse what does not fit here.
        kind = get(blueprint)
        if not kind.supports(self.site):
            reason = explain_apart(self.site) if kind.mixes_positions else ""
            raise SlotError(
                f"blueprint {blueprint!r} does not support {self.site.layout} features at slot {self.name!r}{reason}"
            )
        if blueprint not in self.blueprints:
            offered = ", ".join(self.blueprints)
            raise SlotError(f"blueprint {blueprint!r} is not available in slot {self.name!r}, which has {offered}")
        if blend is not Blend.ADD and kind.context in LAYER_CONTEXTS:
            raise SlotError(f"blueprint {blueprint!r} only adds to the features: use blend 'add'")
        # Make the seed.
        if generator is None and self.sharding is not None:
            raise SlotError("seeds are shared by processes: give a generator with the same random seed in all of them")
        if generator is None:
            generator = torch.Generator().manual_seed(int(torch.randint(2**62, ())))
        return Seed(kind(self.site, generator), self.site, blend)

    def plant(self, seed: Seed) -> Seed:
        """Put a seed that was made for the site into this slot, and hand its parameters to the optimizer.

        Raises:
            SlotError: the slot is taken, or switched off by a block; the host is sharded and seeds are not to be, or
                the other way round; or its configuration cannot count another block.
            DistributedError: under DistributedDataParallel, another process plants something else.
        """
        self.require_not_disabled()
        if self.occupant is not None:
            raise SlotError(f"slot {self.name!r} is taken; prune its seed first")
        # Give the seed the placement of the features, whole or sharded.
        if self.sharding is None:
            require_whole(self.depth.host.named_parameters())
            self.convert_seed(seed)
            synchronize_seed(seed, self.name, self.depth.host.get_submodule(self.name))
        else:
            reshard(self.depth.host)
            require_sharded_host(self.depth.host.parameters())
            shard(self.convert_seed(seed), self.sharding)
        # Update all that follow growth: configurations, the optimizer, and copies.
        with self.tap.gate.switching():
            self.depth.set_block(self.name, seed.blueprint.find_block())
            self.ownership.add_parameters(self.name, list(seed.parameters()))
            self._set_module(seed)
        self.copies.sync_seed_change(self)
        return seed

    def convert_seed(self, seed: Seed) -> Seed:
        """Give a seed the device, type and mode of the features here; a copy of a block has those of the block."""
        block, layer = seed.blueprint.find_block(), self.site.layer
        if block is None or layer is None:
            return seed.to(self.anchor.device, self.anchor.dtype).train(self.training)
        seed.to(self.anchor.device)
        seed.alpha = seed.alpha.to(self.anchor)
        convert_block(block, layer.module)
        return seed.train(self.training)

    def prune(self) -> None:
        """Remove the seed, if there is one, and its optimizer state; a fossil stays.

        Raises:
            SlotError: the seed is fossilized, or the slot is switched off by a block.
        """
        self.require_not_disabled()
        if self.seed is not None and self.seed.fossilized:
            raise SlotError(f"the seed in slot {self.name!r} is fossilized: it is a permanent part of the model")
        self.remove()

    def remove(self) -> None:
        """Remove the seed, if there is one, fossil or not: for rollbacks.

        Raises:
            SlotError: the slot is switched off by a block.
        """
        self.require_not_disabled()
        if self.seed is not None:
            with self.tap.gate.switching():
                self.ownership.remove_parameters(self.name, list(self.seed.parameters()))
                self._set_module(None)
                self.depth.set_block(self.name, None)
            self.copies.sync_seed_change(self)

    def fossilize(self) -> None:
        """Make the seed part of the model for good; its parameters go on learning.

        Raises:
            SlotError: there is no seed.
        """
        self._require_seed().fossilized = True
        self.copies.sync_slot(self)

    @check_arguments(SlotError, alpha=_WEIGHT_ADVICE)
    def set_alpha(self, alpha: Weight) -> None:
        """Give the seed another weight.

        Raises:
            SlotError: there is no seed, it is fossilized, or the weight is invalid.
        """
        seed = self._require_seed()
        if seed.fossilized:
            raise SlotError(f"the seed in slot {self.name!r} is fossilized: its alpha is fixed")
        with self.tap.gate.switching():
            seed.alpha.fill_(alpha)
        self.copies.sync_slot(self)

    def shard_growth(self, options: dict[str, Any]) -> None:
        """Shard seeds by ``options`` of `fully_shard` from now on, and the present one at once."""
        self.sharding = options
        # Torch cannot copy sharded blocks, so a copy is made in time, for blueprints that copy them.
        if self.site.layer is not None and any(get(name).context is Context.CALL for name in self.blueprints):
            self.site = replace(self.site, layer=add_blank_copy(self.site.layer))
        if self.seed is not None:
            shard(self.seed, options)

    def disabled(self) -> AbstractContextManager[None]:
        """Within the block the slot returns the host's features unchanged; parameters stay with the optimizer.

        This holds in all threads, until the last of several blocks ends, for every forward pass as a whole: one that is
        under way in another thread ends first. Changes of the model's type, device and mode within the block are
        applied to the seed afterwards.
        """
        return self.tap.gate.share(self, self._disable)

    @contextmanager
    def _disable(self) -> Generator[None]:
        occupant, placement = self.occupant, self._placement
        self._disabled.append(occupant)
        self._set_module(None)
        try:
            yield
        finally:
            self._disabled.clear()
            self._set_module(occupant)
            if self.seed is not None and self._placement != placement:
                self.convert_seed(self.seed)

    @property
    def _placement(self) -> tuple[bool, torch.dtype, torch.device]:
        """Mode, type and device of seeds here."""
        return self.training, self.anchor.dtype, self.anchor.device

    def require_not_disabled(self) -> None:
        """Refuse to change the slot while it is `disabled`: the end of the block would undo the change.

        Raises:
            SlotError: the slot is switched off by a block.
        """
        if self._disabled:
            raise SlotError(
                f"slot {self.name!r} is switched off, as within model.without_growth(): leave that block before you "
                "plant, remove or save anything"
            )

    def temporary_alpha(self, alpha: float) -> AbstractContextManager[None]:
        """Within the block the seed counts with ``alpha``, in isolation or not, in the passes of all threads.

        Raises:
            SlotError: there is no seed.
        """
        return self.tap.gate.between_passes(self._require_seed().temporary_alpha(alpha))

    def temporary_seed(self, seed: Seed) -> AbstractContextManager[None]:
        """Within the block ``seed`` is in this slot, which is free; the optimizer and copies do not get it."""
        return self.tap.gate.between_passes(self._hold_seed(seed))

    @contextmanager
    def _hold_seed(self, seed: Seed) -> Generator[None]:
        assert self.occupant is None
        self.depth.set_block(self.name, self.convert_seed(seed).blueprint.find_block())
        self._set_module(seed)
        try:
            yield
        finally:
            self._set_module(None)
            self.depth.set_block(self.name, None)

    def _set_module(self, occupant: SlotModule | None) -> None:
        """Set the module so that graphs that were compiled with the same module are valid again."""
        del self.occupant  # or a module that was removed would leave another trace than one that never was here
        self.occupant = occupant

    def _require_seed(self) -> Seed:
        seed = self.seed
        if seed is None:
            raise SlotError(f"slot {self.name!r} has no seed; germinate one first")
        return seed


def _choose_blueprints(name: str, site: Site, blueprints: Sequence[str] | None) -> tuple[str, ...]:
    """The blueprints on offer at a slot: ``blueprints``, or all that support the site."""
    supported = tuple(kind.name for kind in for_site(site))
    if blueprints is None:
        default = tuple(kind for kind in supported if get(kind).context not in LAYER_CONTEXTS)
        if default:
            return default
    requested = () if blueprints is None else tuple(dict.fromkeys(blueprints))
    unsupported = [blueprint for blueprint in requested if not get(blueprint).supports(site)]
    if requested and not unsupported:
        return requested
    # What is wrong, why, and what would do.
    if blueprints is None:
        problem = "no blueprint supports"
    elif unsupported:
        problem = f"blueprint {unsupported[0]!r} does not support"
    else:
        problem = "no blueprint was named for"
    order = "causal " if site.causal else ""
    reason = explain_apart(site) if unsupported and get(unsupported[0]).mixes_positions else ""
    hint = f"those that do are {', '.join(supported)}" if supported else "register one of your own that does"
    raise SlotError(f"{problem} the {order}{site.layout} {site.shape} at slot {name!r}{reason}; {hint}")
