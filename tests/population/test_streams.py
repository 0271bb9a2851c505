"""Training streams: each network sees its own data in its own order, in whole epochs."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from esper.population.learning import TrainingStream, draw_shuffled_order, stack_data
from esper.tasks.instance import Data

CPU = torch.device("cpu")
BATCH = 4
COUNT = 40


def data(network: int, examples: int) -> Data:
    """Examples that tell whose they are and which."""
    labels = torch.arange(examples) + 1000 * network
    return Data(labels.float().unsqueeze(1).repeat(1, 2), labels)


def order(network: int, examples: int) -> np.ndarray:
    return draw_shuffled_order(examples, COUNT, np.random.default_rng(network))


def stream(networks: Sequence[int], sizes: Sequence[int], capacity: int | None = None) -> TrainingStream:
    parts = [data(network, size) for network, size in zip(networks, sizes, strict=True)]
    orders = [order(network, size) for network, size in zip(networks, sizes, strict=True)]
    return TrainingStream(parts, orders, BATCH, capacity or max(sizes), CPU)


def labels(source: TrainingStream, first: Sequence[int], count: int) -> torch.Tensor:
    """``[E, count * B]``."""
    batches = list(source.draw_batches(np.array(first), count))
    for batch in batches:
        assert torch.equal(batch.inputs[..., 0], batch.labels.float()), "inputs and labels belong together"
    return torch.cat([batch.labels for batch in batches], dim=1)


@given(examples=st.integers(1, 30), count=st.integers(1, 100), seed=st.integers(0, 99))
def test_orders_are_whole_epochs(examples: int, count: int, seed: int) -> None:
    drawn = draw_shuffled_order(examples, count, np.random.default_rng(seed))
    assert len(drawn) == count
    for start in range(0, count, examples):
        epoch = drawn[start : start + examples]
        assert len(set(epoch.tolist())) == len(epoch)
        assert set(epoch.tolist()) <= set(range(examples))


def test_epochs_are_shuffled_anew() -> None:
    drawn = draw_shuffled_order(20, 40, np.random.default_rng(0))
    assert drawn[:20].tolist() != drawn[20:].tolist() != sorted(drawn[20:].tolist())


def test_minibatches_follow_each_network_s_order() -> None:
    source = stream((0, 1), (7, 12))
    seen = labels(source, (0, 0), COUNT // BATCH)
    assert seen[0].tolist() == order(0, 7).tolist()
    assert seen[1].tolist() == (1000 + order(1, 12)).tolist()


def test_each_network_begins_where_it_is_told() -> None:
    source = stream((0, 1), (7, 12))
    whole = labels(source, (0, 0), COUNT // BATCH)
    assert torch.equal(labels(source, (3, 3), 2), whole[:, 12:20])
    parts = labels(source, (3, 5), 2)
    assert torch.equal(parts[0], whole[0, 12:20])
    assert torch.equal(parts[1], whole[1, 20:28])


def test_batches_do_not_depend_on_who_else_is_there() -> None:
    together, alone = stream((0, 1, 2), (7, 12, 5)), stream((1,), (12,))
    assert torch.equal(labels(together, (2, 2, 2), 4)[1], labels(alone, (2,), 4)[0])


@pytest.mark.parametrize("examples", [3, 7, 12, 30])
def test_a_network_may_get_other_data_of_any_size(examples: int) -> None:
    source = stream((0, 1, 2), (7, 12, 5))
    before = labels(source, (0, 0, 0), 6)
    source.replace(1, data(8, examples), order(8, examples))
    after = labels(source, (0, 0, 0), 6)
    assert torch.equal(after[[0, 2]], before[[0, 2]])
    assert after[1].tolist() == (8000 + order(8, examples)[:24]).tolist()


def test_new_data_in_the_old_order() -> None:
    source = stream((0, 1), (7, 12))
    source.replace(1, data(8, 12))
    seen = labels(source, (0, 0), 6)
    assert seen[0].tolist() == order(0, 7)[:24].tolist()
    assert seen[1].tolist() == (8000 + order(1, 12)[:24]).tolist()


def test_stacked_data_keeps_its_order() -> None:
    batch = stack_data([data(0, 6), data(1, 6)], CPU)
    assert batch.inputs.shape == (2, 6, 2)
    assert batch.labels.tolist() == [list(range(6)), list(range(1000, 1006))]
