"""Hear of gradients as they arrive."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from weakref import WeakSet

from torch import Tensor, nn


def on_gradients(modules: Iterable[nn.Module], told: Callable[[Tensor], None], known: WeakSet[nn.Module]) -> None:
    """Call ``told`` with every parameter in ``modules`` whenever a backward pass has added to its gradient.

    Those of ``known`` modules are left out; the others become known. What is told first hears first.
    """
    for module in modules:
        if module in known:
            continue
        known.add(module)
        for parameter in module.parameters():
            learns = parameter.requires_grad
            parameter.requires_grad_(True)  # only then torch takes a hook
            parameter.register_post_accumulate_grad_hook(told)
            parameter.requires_grad_(learns)
