"""Forward passes on the side, of which nothing remains: buffers, random numbers and modes are as before."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from esper.growth.seed import Seed
from esper.growth.slot import Slot


@contextmanager
def side_pass(network: nn.Module, seeds: Iterable[Seed]) -> Generator[None]:
    """Within the block ``seeds`` of ``network`` count fully, in isolation or not.

    What forward passes there do to buffers is lost, and the random numbers that they draw are drawn again afterwards.
    The buffers are other tensors meanwhile, so a pass from before the block can still be differentiated after it.
    Nobody listens to the slots.
    """
    listeners = [(module, module.listener) for module in network.modules() if isinstance(module, Slot)]
    buffers = [(module, *named) for module in network.modules() for named in module.named_buffers(recurse=False)]
    for module, name, buffer in buffers:
        setattr(module, name, buffer.clone())
    for slot, _ in listeners:
        slot.listener = None
    try:
        with ExitStack() as weights:
            weights.enter_context(keep_generators(network))
            for seed in seeds:
                weights.enter_context(seed.weigh(1.0))
            yield
    finally:
        for module, name, buffer in buffers:
            setattr(module, name, buffer)
        for slot, listener in listeners:
            slot.listener = listener


@contextmanager
def keep_generators(network: nn.Module) -> Generator[None]:
    """Afterwards torch's random numbers go on as if nothing had drawn any within the block."""
    states = [(generator, generator.get_state()) for generator in global_generators(network)]
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)


def global_generators(network: nn.Module) -> list[torch.Generator]:
    """Torch's own sources of randomness: of the CPU, and of all CUDA devices in use by ``network``."""
    devices = {parameter.device.index for parameter in network.parameters() if parameter.is_cuda}
    return [torch.default_generator, *(torch.cuda.default_generators[device] for device in sorted(devices))]


@contextmanager
def keep_modes(network: nn.Module) -> Generator[None]:
    """Afterwards every module of ``network`` is in the mode in which it was before, also where modes are mixed."""
    modes = [(module, module.training) for module in network.modules()]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
