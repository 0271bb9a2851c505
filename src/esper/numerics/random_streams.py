"""Random generators by key: a random seed, further numbers such as that of an iteration, and a `Stream`.

Equal keys give equal draws, different keys independent ones. So no draw depends on other draws or on their order.
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from typing import Literal

import numpy as np
import torch


class Stream(IntEnum):
    """What is drawn. A number never changes, since recorded results depend on it."""

    TRAINING_INSTANCES = 1
    """Of an iteration: (seed, iteration, stream); where suites are mixed, (seed, iteration, shard, stream)."""
    SHUFFLED_EVALUATION = 1
    """Whose actions are played on which instance of an evaluation: (seed, stream of its instances, stream). It has the
    keys of training instances of iterations 4 and 5; recorded results depend on that."""
    ACTIONS = 2
    """Actions of the policy in training: (seed, iteration, environment, stream)."""
    PROBE_INSTANCES = 3
    """The instances on which a run measures its baselines."""
    HELDOUT_INSTANCES = 4
    TRANSFER_INSTANCES = 5
    """The instances that a run is evaluated on, by split."""
    COMPARED_INSTANCES = 8
    """The instances of `esper compare`, the same for all seeds."""
    SUITE_SEARCH_INSTANCES = 11
    SUITE_SCORE_INSTANCES = 12
    """The instances on which `esper bench suite` chooses schedules, and those on which it scores them."""
    TUNING = 21
    """Candidates and instances in the search for a rule's settings."""
    SEQUENCE_SEARCH = 22
    """Candidates and instances in the search for a fixed sequence of actions."""
    SHUFFLED_ARM = 23
    """Whose actions are played on which instance in an arm of a comparison."""
    SWEPT_INSTANCES = 24
    """The instances of `esper sweep`; others than those of `esper compare`, which tests the trials chosen here."""
    MIXED_SUITES = 25
    """Which suite a shard plays: (seed, iteration, shard, stream)."""
    STATIC_SEARCH = 26
    """Networks that a search of fixed networks tries."""
    HOST_NOISE = 28
    """What a host draws while it trains, as for dropout: (random seed of the network's modules, optimizer steps taken,
    1 in a pass of isolated modules and else 0, stream)."""
    DATA_ORDER = 0x0DDE5
    """The order in which a network sees its instance's examples: (seed of the instance, stream)."""


def numpy_generator(*key: int) -> np.random.Generator:
    """The generator of a key; all its numbers are at least 0."""
    return np.random.default_rng(key)


def child_generator(seed: int, *key: int) -> np.random.Generator:
    """The generator of a child of a random seed. The caller defines what the numbers of ``key`` mean."""
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=key))


def torch_generator(*key: int, bits: Literal[32, 63, 64] = 64) -> torch.Generator:
    """The CPU generator of a key, seeded with all 64 bits of its hash, the lower 32 or the upper 63."""
    hashed = int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0])
    return torch.Generator().manual_seed({32: hashed & 0xFFFFFFFF, 63: hashed >> 1, 64: hashed}[bits])


def module_generator(network_seed: int, slot: int, tries: int) -> torch.Generator:
    """The generator of a new module's weights, from its network's random seed, its slot and how many came before it."""
    return torch_generator(network_seed, slot, tries, bits=63)


@contextmanager
def seed_globally(seed: int, generators: Sequence[torch.Generator]) -> Generator[None]:
    """Within the block torch's global ``generators`` draw from ``seed`` on; afterwards they are as before.

    For code that takes no generator, as torch's dropout.
    """
    states = [generator.get_state() for generator in generators]
    for generator in generators:
        generator.manual_seed(seed)
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
