"""Blueprints that add depth: a copy of the block that the slot follows, run right after it."""

from typing import Any

import torch
from torch import Tensor, nn

from esper.errors import SlotError
from esper.growth.blueprints.registry import Blueprint, BlueprintCost, Context, Family, Folded, LayerCall, register
from esper.growth.depth import copy_block
from esper.growth.inputs import drop_caches
from esper.growth.site import Layout, Site


@register
class BlockCopy(Blueprint):
    """``s(h) = block(h) - h``, where ``block`` is a copy of the block that returned ``h``.

    Stacking (Gong et al. 2019; Du et al. 2024, arXiv 2405.15319), faded in by alpha: at alpha 0 the network computes
    what it computes without the copy, at alpha 1 what the deeper network computes, both bit for bit. The copy starts
    from the block's current values, without the seeds inside the block. It receives ``h`` as its first argument, and
    otherwise the block's own arguments. Trainable in the copy is what is trainable in the block or, if that is frozen
    as a whole, was so before, or else everything. Quantised blocks cannot be copied.

    Unlike other blueprints, the contribution is not zero at birth, and the copy has dropout and running statistics.
    """

    name, family, layouts = "block_copy", Family.ATTENTION, frozenset(Layout)
    mixes_positions = False  # no more than the host itself does
    context = Context.CALL

    def __init__(self, site: Site, generator: torch.Generator) -> None:
        super().__init__(site, generator)
        assert site.layer is not None
        self.block = copy_block(site.layer.module)
        parameters = dict(site.layer.module.named_parameters())
        trainable = {
            name for name, values in parameters.items() if values.requires_grad or name in site.layer.trainable
        }
        for name, parameter in self.block.named_parameters():
            parameter.requires_grad_(name in (trainable or parameters))

    def forward(self, features: Tensor, inputs: LayerCall, /) -> Tensor:
        return self._call_block(features, inputs) - features

    def add_to(self, features: Tensor, inputs: LayerCall, alpha: Tensor) -> Tensor:
        """``(1 - alpha) * h + alpha * block(h)``, which is exactly ``h`` or ``block(h)`` at either end."""
        return torch.lerp(features, self._call_block(features, inputs).to(features.dtype), alpha.to(features.dtype))

    def _call_block(self, features: Tensor, inputs: LayerCall) -> Tensor:
        enabled = any(vars(module).get("gradient_checkpointing") is True for module in self.block.modules())
        checkpointed = enabled and self.training and torch.is_grad_enabled()
        if checkpointed and not features.requires_grad:
            features = features.detach().requires_grad_()  # reentrant checkpointing gives no gradients otherwise
        arguments, keywords = inputs.with_first(features)
        # The backward pass would fill a cache a second time; the block itself drops those passed by keyword.
        kept, _ = drop_caches(self.block, arguments, {})
        if checkpointed and any(value is not given for value, given in zip(kept, arguments, strict=True)):
            raise SlotError(
                f"a {type(self.block).__name__} with gradient checkpointing got a cache: call the model with "
                "use_cache=False and without a cache, or disable its gradient checkpointing"
            )
        returned: Tensor = self.block(*arguments, **keywords)
        return returned

    def find_block(self) -> nn.Module | None:
        return self.block

    def fold(self, host: nn.Module, name: str, weight: float) -> Folded:
        """Insert the copy right after the original block, in the same container; only at alpha 1."""
        # Only a container that runs its modules one after the other can take another one.
        parent, _, place = name.rpartition(".")
        container = host.get_submodule(parent)
        if weight != 1 or not isinstance(container, nn.Sequential | nn.ModuleList) or not place.isdecimal():
            return Folded.NOT
        container.insert(int(place) + 1, self.block)
        return Folded.INSERTED

    @classmethod
    def cost_at(cls, site: Site) -> BlueprintCost:
        assert site.layer is not None, "call supports(site) first"
        return BlueprintCost(sum(parameter.numel() for parameter in site.layer.module.parameters()), site.layer.flops)

    @classmethod
    def supports(cls, site: Site) -> bool:
        layer = site.layer
        return super().supports(site) and layer is not None and layer.keeps_shape and not layer.quantised


@register
class BlockZero(BlockCopy):
    """`BlockCopy` with the last layer of every branch set to zero, so that the copy starts as the identity.

    Zero-initialised residual branches (Goyal et al. 2017, arXiv 1706.02677, section 5.1; LLaMA Pro, Wu et al. 2024,
    arXiv 2401.02415). Only blocks of the form ``h + f(h) + ...`` are supported, without a normalisation of the sum.
    """

    name = "block_zero"
    needs_branch_outputs = True

    def __init__(self, site: Site, generator: torch.Generator) -> None:
        super().__init__(site, generator)
        assert site.layer is not None
        with torch.no_grad():
            for name in site.layer.branch_outputs:
                self.block.get_parameter(name).zero_().requires_grad_(True)  # frozen, it would stay the identity

    @classmethod
    def supports(cls, site: Site) -> bool:
        return super().supports(site) and site.layer is not None and bool(site.layer.branch_outputs)


_NOISE = 0.02
"""Standard deviation of noise on parameters, so that none is zero by chance."""


@torch.no_grad()
def find_branch_outputs(block: nn.Module, call: LayerCall) -> tuple[str, ...]:
    """Names of the block's parameters that end its branches; empty if zeros there do not make it the identity.

    Parameters of a copy are set to zero one by one, from the last used to the first. A parameter stays zero if this
    changes the output. So in every branch only the last layer becomes zero, and gradients still reach it. The number of
    calls with the arguments ``call``, without caches, is about the number of parameters.
    """
    first = call.first_argument
    if first is None:
        return ()
    # Copy the block, with noise on its parameters.
    copied = copy_block(block).eval()
    arguments, keywords = LayerCall(*drop_caches(block, *call)).with_first(first.detach().clone())
    generator = torch.Generator(first.device).manual_seed(0)
    for parameter in copied.parameters():
        noise = torch.randn(parameter.shape, generator=generator, device=parameter.device)
        parameter += _NOISE * noise.to(parameter.dtype)
    # Order the parameters by the end of the call of their module, or of the nearest module around it.
    called: list[nn.Module] = []

    def record_call(module: nn.Module, *_: Any) -> None:
        called.append(module)

    hooks = [module.register_forward_hook(record_call) for module in copied.modules()]
    output: Tensor = copied(*arguments, **keywords)
    for hook in hooks:
        hook.remove()
    turns = {module: turn for turn, module in enumerate(called)}

    def find_turn(name: str) -> int:
        parts = name.split(".")[:-1]
        around = (copied.get_submodule(".".join(parts[:length])) for length in range(len(parts), -1, -1))
        return next(turns[module] for module in around if module in turns)

    ordered = sorted(copied.named_parameters(), key=lambda named: find_turn(named[0]))
    # Set them to zero, from the last to the first, until the block is the identity.
    zeroed: list[str] = []
    for name, parameter in reversed(ordered):
        if torch.equal(output, first):
            break
        before = parameter.clone()
        parameter.zero_()
        without: Tensor = copied(*arguments, **keywords)
        if torch.equal(without, output):
            parameter.copy_(before)
        else:
            output = without
            zeroed.append(name)
    return tuple(zeroed) if torch.equal(output, first) else ()
