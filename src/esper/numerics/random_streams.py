"""Random streams: what each number that splits a seed's randomness is for, and the generators that follow from a key.

A key is a seed, further numbers such as that of an iteration, and a `Stream`. Equal keys give equal draws, different
ones independent draws, so nothing that is drawn depends on what else is drawn, nor on the order.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Literal

import numpy as np
import torch


class Stream(IntEnum):
    """What is drawn. A number never changes: recorded results follow from it."""

    TRAINING_INSTANCES = 1
    """The instances of an iteration: (seed, iteration, stream); where suites are mixed, (seed, iteration, shard,
    stream)."""
    SHUFFLED_EVALUATION = 1
    """Whose actions are played on which instance of an evaluation: (seed, stream of its instances, stream). It has the
    number of `TRAINING_INSTANCES`, so its keys are those of iterations 4 and 5; recorded results keep it so."""
    ACTIONS = 2
    """What the acting policy draws: (seed, iteration, environment, stream)."""
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
    """The instances of `esper sweep`: what chose a trial must not judge it in `esper compare`, too."""
    MIXED_SUITES = 25
    """Which suite a shard plays: (seed, iteration, shard, stream)."""
    STATIC_SEARCH = 26
    """Networks that a search of fixed networks tries."""
    SWEPT_SETTINGS = 27
    """What the sampler of `esper sweep` draws for a trial: (seed, number of trials before it, stream)."""
    DATA_ORDER = 0x0DDE5
    """The order in which a network sees its instance's examples: (seed of the instance, stream)."""


def numpy_generator(*key: int) -> np.random.Generator:
    """The generator of a key, whose numbers are at least 0."""
    return np.random.default_rng(key)


def child_generator(seed: int, *key: int) -> np.random.Generator:
    """The generator of the seed's child that ``key`` names, by numbers that whoever draws from the children defines."""
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=key))


def torch_generator(*key: int, bits: Literal[32, 63, 64] = 64) -> torch.Generator:
    """The generator, on the CPU, of a key, seeded with all 64 bits of its hash, the lower 32 or the upper 63."""
    hashed = int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0])
    return torch.Generator().manual_seed({32: hashed & 0xFFFFFFFF, 63: hashed >> 1, 64: hashed}[bits])


def module_generator(network_seed: int, slot: int, tries: int) -> torch.Generator:
    """The generator of a seed's first weights: a function of its network, slot and number of earlier seeds there."""
    return torch_generator(network_seed, slot, tries, bits=63)
