"""Random observations and legality for tests of policies."""

import numpy as np
import torch
from torch import Tensor

from esper.control.policy import OpPrior, Policy, PolicySettings
from esper.engine.observation import MaskTensors, Observation, ObservationSpec
from esper.lifecycle.actions import Head, Op, count_choices

SPEC = ObservationSpec(globals=7, slots=9, blueprints=5)
NO_PRIOR = OpPrior(wait=0, germinate=0, advance=0, set_alpha=0, fossilize=0, prune=0)
SMALL = PolicySettings(advice=None, hidden=24, width=16, op_prior=NO_PRIOR)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def policy(settings: PolicySettings = SMALL, spec: ObservationSpec = SPEC, seed: int = 0) -> Policy:
    return Policy(spec, settings, generator(seed))


def uniforms(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    return torch.rand(*shape, len(Head), generator=generator(seed))


def observations(leading: tuple[int, ...], slots: int = 3, blueprints: int = 4, seed: int = 0) -> Observation:
    random = generator(seed)
    return Observation(
        torch.randn(*leading, SPEC.globals, generator=random),
        torch.randn(*leading, slots, SPEC.slots, generator=random),
        torch.randn(*leading, slots, blueprints, SPEC.blueprints, generator=random),
    )


def masks(leading: tuple[int, ...], slots: int = 3, blueprints: int = 4, seed: int = 0) -> MaskTensors:
    """Random legality in which WAIT is always legal and every legal choice leaves a legal next choice."""
    random = np.random.default_rng(seed)

    def some(*shape: int) -> np.ndarray:
        legal = random.random((*leading, *shape)) < 0.6
        picks = random.integers(shape[-1], size=(*leading, *shape[:-1]))
        np.put_along_axis(legal, picks[..., None], True, axis=-1)
        return legal

    _, _, _, blend, tempo, target, speed, curve = count_choices(slots, blueprints)
    op = some(len(Op))
    op[..., Op.WAIT] = True
    slot = some(len(Op), slots)
    slot[..., Op.WAIT, :] = np.arange(slots) == 0
    parts = (op, slot, some(slots, blueprints), some(blend), some(tempo), some(slots, target), some(speed), some(curve))
    return MaskTensors(*(torch.from_numpy(part) for part in parts))
