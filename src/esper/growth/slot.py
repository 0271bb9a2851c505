"""Slots, the forward hooks of a host's submodules, the seeds in them, and passes that change nothing.

A slot is an `nn.Module`, so that it is copied, pickled and compiled with the host, which itself stays untouched.
"""

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import ExitStack, contextmanager
from typing import Annotated, Any, Self, cast

import torch
from pydantic import Field
from torch import Tensor, distributed, nn

from esper.config.arguments import Name, NonNegativeFloat, check_arguments
from esper.errors import ConfigError, DistributedError, SlotError
from esper.growth.blueprints.registry import LAYER_CONTEXTS, Blueprint, Context, LayerCall, for_site, get
from esper.growth.depth import DepthTracker, convert_block
from esper.growth.hooks import GrowthHook, InputHook, SourceHook, find_features, replace_features, require_unsharded
from esper.growth.inputs import NESTED_ADVICE, find_mask_or_cache, list_argument_names, refuse_to_mix
from esper.growth.links import Copies, OptimizerLink
from esper.growth.site import CHANNELS_LAST, IN_ORDER, Layout, Site
from esper.lifecycle.actions import Blend
from esper.numerics.modules import Stackable, keep_buffers, keep_generators, keep_modes


class BlendGate(nn.Module):
    """``sigmoid(weight * h + bias)``, channel by channel; half open at birth. It works as a `Stackable` does."""

    def __init__(self, site: Site) -> None:
        super().__init__()
        # One value per channel, with an axis of size 1 for each axis after the channels.
        trailing_axes = 0 if site.layout in CHANNELS_LAST else len(site.extent)
        shape = (site.width, *[1] * trailing_axes)
        self._leading_axes = 1 + len(site.shape) - len(shape)  # the batch, and tokens
        self._first_axis = -len(shape)
        self.weight = nn.Parameter(torch.zeros(shape))
        self.bias = nn.Parameter(torch.zeros(shape))

    def forward(self, features: Tensor) -> Tensor:
        return torch.sigmoid(self._spread(self.weight) * features + self._spread(self.bias))

    def _spread(self, parameter: Tensor) -> Tensor:
        """``[..., *shape]`` -> ``[..., 1, *shape]``, with as many axes as the features."""
        for _ in range(self._leading_axes):
            parameter = parameter.unsqueeze(self._first_axis - 1)
        return parameter


class BlendedBlueprint(nn.Module):
    """A blueprint and its blend, which compute a seed's change of the features ``h`` at full weight.

    With ``s`` as the blueprint's output, which is zero at birth as is every change, the change is:

    - `Blend.ADD`: ``s(h)``;
    - `Blend.GATE`: ``g * s(h)`` with a learned gate ``g = sigmoid(w * h + b)`` per channel; ``w = b = 0`` at birth;
    - `Blend.MULTIPLY`: ``h * tanh s(h)``.
    """

    def __init__(self, blueprint: Blueprint, site: Site, blend: Blend) -> None:
        super().__init__()
        self.blueprint = blueprint
        self.blend = blend
        self.gate = BlendGate(site) if blend is Blend.GATE else None

    @property
    def context(self) -> Context:
        """What the blueprint gets in addition to the features."""
        return self.blueprint.context

    def flops_at(self, site: Site) -> int:
        """FLOPs of one forward pass for one example: of matrix products and convolutions, so blends cost none."""
        return self.blueprint.cost_at(site).flops

    def forward(self, features: Tensor, inputs: Any) -> Tensor:
        return self.change(features, inputs)

    def change(self, features: Tensor, inputs: Any) -> Tensor:
        """The change at full weight, in the shape and dtype of ``features``."""
        # Under autocast some blueprints compute in float32; the host expects its own dtype.
        contribution: Tensor = self.blueprint(features, inputs).to(features.dtype)
        if self.gate is not None:
            return self.gate(features).to(features.dtype) * contribution
        if self.blend is Blend.MULTIPLY:
            return features * contribution.tanh()
        return contribution


class StackableBlendedBlueprint(BlendedBlueprint, Stackable):
    """A blended blueprint that is `Stackable`."""


def blend_blueprint(blueprint: Blueprint, site: Site, blend: Blend) -> Blueprint | BlendedBlueprint:
    """A module that computes a seed's change; with `Blend.ADD` it is the blueprint itself."""
    if blend is Blend.ADD:
        return blueprint
    return (StackableBlendedBlueprint if isinstance(blueprint, Stackable) else BlendedBlueprint)(blueprint, site, blend)


def require_blends(blends: Sequence[Blend], kinds: Iterable[type[Blueprint]]) -> None:
    """Reject blends that one of the blueprints does not support."""
    only_adding = next((kind.name for kind in kinds if kind.context in LAYER_CONTEXTS), None)
    if only_adding is not None and tuple(blends) != (Blend.ADD,):
        raise ConfigError(f"rules.blends: blueprint {only_adding!r} only adds to the features: allow only 'add'")


def count_blend_parameters(blend: Blend, site: Site) -> int:
    """Number of parameters of the blend at ``site``, without those of the blueprint."""
    return 2 * site.width if blend is Blend.GATE else 0


class Seed(BlendedBlueprint):
    """``h + alpha * change(h)``, where ``h`` is the host's features and ``alpha`` the seed's weight."""

    alpha: Tensor

    def __init__(self, blueprint: Blueprint, site: Site, blend: Blend = Blend.ADD) -> None:
        super().__init__(blueprint, site, blend)
        self.fossilized = False
        self.contribution: float | None = None
        """Accuracy with the seed minus accuracy without it, as last measured by a grower."""
        self.register_buffer("alpha", torch.zeros(()))
        self.fixed = tuple(name for name, parameter in self.named_parameters() if not parameter.requires_grad)
        """Names of parameters that the blueprint has fixed."""

    @property
    def parameter_count(self) -> int:
        """Number of scalars in the seed's parameters."""
        return sum(parameter.numel() for parameter in self.parameters())

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Set whether parameters learn, for all but the `fixed` ones."""
        super().requires_grad_(requires_grad)
        for name in self.fixed:
            self.get_parameter(name).requires_grad_(False)
        return self

    def fix_parameters(self, names: Sequence[str]) -> None:
        """Fix these parameters and no others."""
        self.fixed = tuple(names)
        self.requires_grad_(True)

    def forward(self, features: Tensor, inputs: Any) -> Tensor:
        # With ADD, the blueprint computes the sum, which for a block is exact at alpha 1.
        if self.blend is Blend.ADD:
            return self.blueprint.add_to(features, inputs, self.alpha)
        return features + self.alpha * self.change(features, inputs)

    @contextmanager
    def temporary_alpha(self, alpha: float) -> Generator[None]:
        """Context manager in which the seed has weight ``alpha``."""
        # In place, because compiled code and averages keep references to the buffer.
        alpha_before = self.alpha.clone()
        self.alpha.fill_(alpha)
        try:
            yield
        finally:
            self.alpha.copy_(alpha_before)


SlotModule = Callable[[Tensor, Any], Tensor]
"""Returns new features from the host's and a context: for a seed the one that its blueprint needs, or the features
again if it needs none, so that parts of a host can be called alone; for others the network's input."""
FeatureHook = Callable[["Slot", LayerCall, Tensor], Tensor]
"""Called with a slot, the call of its layer and the slot's output; returns the output or a tensor of equal values."""
Weight = Annotated[NonNegativeFloat, Field(le=1)]
_WEIGHT_ADVICE = "give a weight: a number from 0 to 1"


class Slot(GrowthHook):
    """A place where a host may grow. A dormant slot, without a module, returns the host's features unchanged.

    ``blueprints`` may germinate here; None: all that support the site, for tokens only those that treat each position
    separately. Where the host uses a mask, lengths or a cache, named ``mask_or_cache``, nothing mixes positions.
    """

    like: Tensor

    def __init__(
        self,
        name: str,
        site: Site,
        *,
        input_hook: InputHook,
        optimizer_link: OptimizerLink,
        copies: Copies,
        depth: DepthTracker,
        blueprints: Sequence[str] | None = None,
        mask_or_cache: str = "",
    ) -> None:
        super().__init__()
        self.name = name
        self.site = site
        self.input_hook = input_hook
        self.optimizer_link = optimizer_link
        self.copies = copies
        self.depth = depth
        # Where hidden units may grow: the input of the layer that computes them, and the names of all layers there.
        self.source = None if site.hidden is None else SourceHook()
        self.chain: tuple[str, ...] = () if site.hidden is None else site.hidden.names
        self.argument_names = () if site.layer is None else list_argument_names(site.layer.module)
        self.blueprints = _choose_blueprints(name, site, blueprints, mask_or_cache)
        """Names of the blueprints that may germinate here."""
        self.enabled = True
        """Whether anything may germinate here."""
        # Follows the model's device and dtype, which new seeds get.
        like = torch.zeros(()) if site.layer is None else torch.zeros_like(site.layer.like)
        self.register_buffer("like", like, persistent=False)
        self.occupant: SlotModule | None = None
        self._disabled: list[SlotModule | None] = []  # a list, or the disabled module would be a submodule
        self.adds_leaf = False
        """Whether to add zeros that require a gradient, so that a loss can be differentiated before anything grew."""
        self.feature_hook: FeatureHook | None = None
        """Called after every forward pass in training, except in side passes."""

    def __getstate__(self) -> dict[str, Any]:
        # The hook belongs to the training loop of this model, and a disabled module is not restored in a copy.
        return {**self.__dict__, "feature_hook": None, "_disabled": []}

    def forward(self, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> Any:
        call = LayerCall(arguments, keywords)
        occupant, features = self.occupant, cast("Tensor", find_features(output))
        if occupant is not None:
            features = self._run(occupant, module, call, features)
        if self.adds_leaf and self.training and torch.is_grad_enabled() and not features.requires_grad:
            features = features + torch.zeros_like(features, requires_grad=True)
        if self.feature_hook is not None:
            features = self.feature_hook(self, call, features)
        if self.source is not None:
            self.source.inputs = None
        return replace_features(output, features)

    def _run(self, occupant: SlotModule, module: nn.Module, call: LayerCall, output: Tensor) -> Tensor:
        """The output of the module in the slot, from the features ``output`` and the context that it needs."""
        seed = self.seed
        # Reject passes that would compute something other than in training.
        if output.is_nested:
            raise SlotError(f"the layer that slot {self.name!r} follows returns nested tensors: {NESTED_ADVICE}")
        if seed is not None and self.mixes_positions:
            found = self.input_hook.mask_or_cache
            found = found or find_mask_or_cache(self.argument_names, *call, batch=output.size(0))
            if found:
                refuse_to_mix(self.name, seed.blueprint.name, found)
        if output.dtype != self.like.dtype:
            # The host was converted without its slots; otherwise the dtype is autocast's or the host's own choice.
            parameter = next(module.parameters(), None)
            if seed is not None and parameter is not None and parameter.dtype == output.dtype:
                raise SlotError(
                    f"the seed in slot {self.name!r} is {self.like.dtype}, but its host became {output.dtype}: "
                    "convert the whole growing model, for instance by model.double(), not only its host"
                )
        context = Context.NETWORK if seed is None else seed.context
        inputs = self.find_inputs(context, call, output)
        if inputs is None:
            raise SlotError(
                f"what grew in slot {self.name!r} reads the input of the network or of a layer, which has not been "
                "called: call the whole host"
            )
        return occupant(output, inputs)

    def find_inputs(self, context: Context, call: LayerCall, features: Tensor) -> Any:
        """The second argument of blueprints with ``context``, for a call of the layer here; None if it is missing."""
        match context:
            case Context.NOTHING:
                return features
            case Context.NETWORK:
                return self.input_hook.inputs
            case Context.LAYER:
                return call.first_argument
            case Context.CALL:
                return call
            case Context.HIDDEN:
                return None if self.source is None else self.source.inputs

    @property
    def mixes_positions(self) -> bool:
        """Whether a seed here mixes positions of examples that may differ in length."""
        return self.seed is not None and _mixes(self.seed.blueprint, self.site)

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
        """Plant a new seed and add its parameters to the optimizer; returns the seed.

        With several processes, only an `esper.Grower` plants.

        Args:
            blueprint: Name of the blueprint.
            generator: Source of the initial values; None: a generator seeded from torch's global one.
            blend: How the seed's output is combined with the features.
            alpha: Weight of the seed. A seed planted by hand has no effect until `set_alpha` gives it weight.
        """
        if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
            raise DistributedError(
                "several processes (DistributedDataParallel) would train different seeds if planted by hand: let an "
                "esper.Grower in each process plant, or plant before torch.distributed.init_process_group"
            )
        if not self.enabled:
            raise SlotError(f"slot {self.name!r} is disabled: set model.slots[{self.name!r}].enabled = True")
        seed = self.make_seed(blueprint, generator, blend)
        seed.alpha.fill_(alpha)
        return self.plant(seed)

    def make_seed(self, blueprint: str, generator: torch.Generator | None, blend: Blend) -> Seed:
        """Make a new seed for this slot, with weight 0, without planting it; arguments are as for `germinate`."""
        kind = get(blueprint)
        if not kind.supports(self.site):
            raise SlotError(
                f"blueprint {blueprint!r} does not support {self.site.layout} features at slot {self.name!r}"
            )
        if blueprint not in self.blueprints:
            offered = ", ".join(self.blueprints)
            raise SlotError(f"blueprint {blueprint!r} is not available in slot {self.name!r}, which has {offered}")
        if blend is not Blend.ADD and kind.context in LAYER_CONTEXTS:
            raise SlotError(f"blueprint {blueprint!r} only adds to the features: use blend 'add'")
        if generator is None:
            generator = torch.Generator().manual_seed(int(torch.randint(2**62, ())))
        return Seed(kind(self.site, generator), self.site, blend)

    def plant(self, seed: Seed) -> Seed:
        """Put a seed that was made for the site into this slot, and add its parameters to the optimizer."""
        self.require_not_disabled()
        if self.occupant is not None:
            raise SlotError(f"slot {self.name!r} is taken; prune its seed first")
        require_unsharded(self.depth.host)
        self.convert_seed(seed)
        # What follows growth: configurations, the optimizer, and copies.
        self.depth.set_block(self.name, seed.blueprint.find_block())
        self.optimizer_link.add_parameters(self.name, list(seed.parameters()))
        self.occupant = seed
        self.copies.sync_seed_change(self)
        return seed

    def convert_seed(self, seed: Seed) -> Seed:
        """Give a seed the device, dtype and mode of the features here, or a copy of a block those of the block."""
        block, layer = seed.blueprint.find_block(), self.site.layer
        if block is None or layer is None:
            return seed.to(self.like.device, self.like.dtype).train(self.training)
        seed.to(self.like.device)
        seed.alpha = seed.alpha.to(self.like)
        convert_block(block, layer.module)
        return seed.train(self.training)

    def prune(self) -> None:
        """Remove the seed, if there is one, and its optimizer state; a fossil stays."""
        self.require_not_disabled()
        if self.seed is not None and self.seed.fossilized:
            raise SlotError(f"the seed in slot {self.name!r} is fossilized: it is a permanent part of the model")
        self.remove()

    def remove(self) -> None:
        """Remove the seed, if there is one, even a fossil; for rollbacks."""
        self.require_not_disabled()
        if self.seed is not None:
            self.optimizer_link.remove_parameters(self.name, list(self.seed.parameters()))
            self.occupant = None
            self.depth.set_block(self.name, None)
            self.copies.sync_seed_change(self)

    def fossilize(self) -> None:
        """Make the seed a permanent part of the model; its parameters continue to learn."""
        self._require_seed().fossilized = True
        self.copies.sync_slot(self)

    @check_arguments(SlotError, alpha=_WEIGHT_ADVICE)
    def set_alpha(self, alpha: Weight) -> None:
        """Set the seed's weight."""
        seed = self._require_seed()
        if seed.fossilized:
            raise SlotError(f"the seed in slot {self.name!r} is fossilized: its alpha is fixed")
        seed.alpha.fill_(alpha)
        self.copies.sync_slot(self)

    @contextmanager
    def disabled(self) -> Generator[None]:
        """Context manager in which the slot returns the host's features unchanged; parameters stay in the optimizer.

        The seed follows later changes of the model's dtype, device and mode.
        """
        occupant, placement = self.occupant, self._placement
        self._disabled.append(occupant)
        self.occupant = None
        try:
            yield
        finally:
            self._disabled.pop()
            self.occupant = occupant
            if self.seed is not None and self._placement != placement:
                self.convert_seed(self.seed)

    @property
    def _placement(self) -> tuple[bool, torch.dtype, torch.device]:
        """Mode, dtype and device of seeds here."""
        return self.training, self.like.dtype, self.like.device

    def require_not_disabled(self) -> None:
        """Reject changes of the slot that the end of `disabled` would undo."""
        if self._disabled:
            raise SlotError(
                f"slot {self.name!r} is switched off, as within model.without_growth(): leave that block before you "
                "plant, remove or save anything"
            )

    def _require_seed(self) -> Seed:
        if self.seed is None:
            raise SlotError(f"slot {self.name!r} has no seed; germinate one first")
        return self.seed


def _mixes(kind: Blueprint | type[Blueprint], site: Site) -> bool:
    """Whether a blueprint mixes positions of examples that may differ in length."""
    return kind.mixes_positions and site.layout in IN_ORDER


def _choose_blueprints(name: str, site: Site, blueprints: Sequence[str] | None, mask_or_cache: str) -> tuple[str, ...]:
    """The blueprints available at a slot: ``blueprints``, or those that ``"auto"`` offers."""
    supported = list(for_site(site))
    if blueprints is None:
        # Tokens may be padded or cached later on, so blueprints that mix them must be named.
        separate = bool(mask_or_cache) or site.layout is Layout.TOKENS
        fitting = [kind for kind in supported if kind.context not in LAYER_CONTEXTS]
        chosen = tuple(kind.name for kind in fitting if not (separate and _mixes(kind, site)))
        problem = "" if chosen else "no blueprint supports"
    else:
        chosen = tuple(dict.fromkeys(blueprints))
        problem = "" if chosen else "no blueprint was named for"
        for blueprint in chosen:
            if mask_or_cache and _mixes(get(blueprint), site):
                refuse_to_mix(name, blueprint, mask_or_cache)
            if not get(blueprint).supports(site):
                problem = problem or f"blueprint {blueprint!r} does not support"
    if not problem:
        return chosen
    order = "causal " if site.causal else ""
    names = ", ".join(kind.name for kind in supported)
    hint = f"those that do are {names}" if names else "register one of your own that does"
    raise SlotError(f"{problem} the {order}{site.layout} {site.shape} at slot {name!r}; {hint}")


@contextmanager
def side_pass(network: nn.Module) -> Generator[None]:
    """Context manager in which passes through ``network`` call no feature hooks, and change no buffers or generators.

    The buffers are other tensors within the context, so a pass from before it can still be differentiated after it.
    """
    with ExitStack() as stack:
        for slot in [module for module in network.modules() if isinstance(module, Slot)]:
            stack.callback(setattr, slot, "feature_hook", slot.feature_hook)
            slot.feature_hook = None
        stack.enter_context(keep_buffers(network))
        stack.enter_context(keep_generators(network))
        yield


@contextmanager
def eval_without_side_effects(model: nn.Module) -> Generator[None]:
    """Context manager of a `side_pass` in which ``model`` is in evaluation mode, differentiable and uncompiled."""
    with ExitStack() as stack:
        # Gradients are needed even if the caller has disabled them, and hooks do not run in compiled code.
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        if any(isinstance(module, nn.RNNBase) for module in model.modules()):
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))  # its RNNs learn in training mode only
        stack.enter_context(side_pass(model))
        stack.enter_context(keep_modes(model))
        model.eval()
        yield
