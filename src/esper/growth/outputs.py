"""Which parameters end the branches of a residual block: once they are zero, the block returns what it is given.

That shows when the block is called. Parameters are tried from the last that is used to the first, and one stays zero if
that changes what comes out: so of every branch only its last layer does, and gradients still reach it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from esper.growth.blueprints.registry import LayerCall
from esper.growth.depth import copy_block
from esper.growth.positions import drop_caches, list_argument_names

_NOISE = 0.02
"""Standard deviation of what is added to parameters, lest one be zero before it is tried."""


@torch.no_grad()
def find_outputs(block: nn.Module, call: LayerCall) -> tuple[str, ...]:
    """Names of the block's parameters that end its branches; none where it cannot be made the identity so.

    It takes about as many calls of the block, in eval mode, as it has parameters. Caches are left out of them.

    Args:
        block: Any module; stays as it is.
        call: What it was called with; the first argument is what it is to return.
    """
    first = call.first
    if first is None:
        return ()
    copied = copy_block(block).eval()
    call = LayerCall(*drop_caches(list_argument_names(block), *call)).with_first(first.detach().clone())
    generator = torch.Generator(first.device).manual_seed(0)
    for parameter in copied.parameters():
        noise = torch.randn(parameter.shape, generator=generator, device=parameter.device)
        parameter += _NOISE * noise.to(parameter.dtype)
    called: list[nn.Module] = []

    def note(module: nn.Module, *_: Any) -> None:
        called.append(module)

    hooks = [module.register_forward_hook(note) for module in copied.modules()]
    returned = _run(copied, call)
    for hook in hooks:
        hook.remove()
    zeroed: list[str] = []
    for name, parameter in reversed(_order_by_use(copied, called)):
        if torch.equal(returned, first):
            break
        before = parameter.clone()
        parameter.zero_()
        without = _run(copied, call)
        if torch.equal(without, returned):
            parameter.copy_(before)
        else:
            returned = without
            zeroed.append(name)
    return tuple(zeroed) if torch.equal(returned, first) else ()


def _run(block: nn.Module, call: LayerCall) -> Tensor:
    returned: Tensor = block(*call.arguments, **call.keywords)
    return returned


def _order_by_use(block: nn.Module, called: list[nn.Module]) -> list[tuple[str, nn.Parameter]]:
    """Parameters in the order in which the modules returned that they are in, or the nearest around that was called."""
    turns = {module: turn for turn, module in enumerate(called)}

    def find_turn(name: str) -> int:
        parts = name.split(".")[:-1]
        around = (block.get_submodule(".".join(parts[:length])) for length in range(len(parts), -1, -1))
        return next(turns[module] for module in around if module in turns)

    return sorted(block.named_parameters(), key=lambda named: find_turn(named[0]))
