"""Keys of random streams: equal ones give equal draws, and every stream is told apart from all others but one."""

from typing import Literal

import numpy as np
import pytest
import torch

from esper.numerics.random_streams import Stream, child_generator, module_generator, numpy_generator, torch_generator


def test_no_number_ever_changes() -> None:
    assert {name: member.value for name, member in Stream.__members__.items()} == {
        "TRAINING_INSTANCES": 1,
        "SHUFFLED_EVALUATION": 1,
        "ACTIONS": 2,
        "PROBE_INSTANCES": 3,
        "HELDOUT_INSTANCES": 4,
        "TRANSFER_INSTANCES": 5,
        "COMPARED_INSTANCES": 8,
        "SUITE_SEARCH_INSTANCES": 11,
        "SUITE_SCORE_INSTANCES": 12,
        "TUNING": 21,
        "SEQUENCE_SEARCH": 22,
        "SHUFFLED_ARM": 23,
        "SWEPT_INSTANCES": 24,
        "MIXED_SUITES": 25,
        "STATIC_SEARCH": 26,
        "HOST_NOISE": 28,
        "DATA_ORDER": 0x0DDE5,
    }


def test_equal_keys_give_equal_draws_and_different_ones_do_not() -> None:
    keys = [(0, stream) for stream in Stream] + [(1, stream) for stream in Stream]

    assert [numpy_generator(*key).random() for key in keys] == [numpy_generator(*key).random() for key in keys]
    assert len({numpy_generator(*key).random() for key in keys}) == len(keys)


def test_a_key_is_what_numpy_makes_of_its_numbers() -> None:
    assert numpy_generator(3, Stream.ACTIONS).random() == np.random.default_rng((3, 2)).random()
    assert child_generator(3, 1).random() == np.random.default_rng(np.random.SeedSequence(3).spawn(2)[1]).random()


@pytest.mark.parametrize("bits", [32, 63, 64])
def test_torch_generators_are_seeded_with_bits_of_the_hash(bits: Literal[32, 63, 64]) -> None:
    words = np.random.SeedSequence((3, 5)).generate_state(2)
    low, high = int(words[0]), int(words[1])
    expected = {32: low, 63: (high << 32 | low) >> 1, 64: high << 32 | low}[bits]

    assert torch_generator(3, 5, bits=bits).initial_seed() == expected


def test_a_seeds_weights_follow_from_network_slot_and_tries() -> None:
    drawn = {
        float(torch.rand(1, generator=module_generator(*key))) for key in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1))
    }

    assert len(drawn) == 4
