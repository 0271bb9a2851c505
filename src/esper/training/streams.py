"""Each network's own data in its own order: fixed by its seed, whoever else is in the population."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.tasks.data import Data
from esper.training.learning import Batch


def shuffled_order(examples: int, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """``count`` indices into ``examples``: as many whole shuffled epochs as needed, the last one cut."""
    epochs = -(-count // examples)
    return np.concatenate([rng.permutation(examples) for _ in range(epochs)])[:count]


class TrainingStream:
    """Minibatches ``[E, B, ...]`` for E networks, one after the other.

    Networks may have different numbers of examples; each passes through its own set in its own shuffled epochs. Room is
    kept for ``capacity`` examples per network, and more when it is needed.
    """

    def __init__(
        self,
        data: Sequence[Data],
        orders: Sequence[NDArray[np.int64]],
        batch_size: int,
        capacity: int,
        device: torch.device,
    ) -> None:
        longest = capacity
        self._inputs: Tensor = torch.stack([_filled(part.inputs, longest) for part in data]).to(device)
        self._labels: Tensor = torch.stack([_filled(part.labels, longest) for part in data]).to(device)
        offsets = np.arange(len(data))[:, None] * longest
        self._order = torch.from_numpy(np.stack(orders) + offsets).to(device)
        self._batch_size = batch_size

    def replace(self, network: int, data: Data, order: NDArray[np.int64] | None = None) -> None:
        """From now on ``network`` draws from other data, in the same order as before or in a new one of its length."""
        self._make_room(len(data))
        longest = self._inputs.shape[1]
        self._inputs[network] = _filled(data.inputs, longest).to(self._inputs, non_blocking=True)
        self._labels[network] = _filled(data.labels, longest).to(self._labels, non_blocking=True)
        if order is not None:
            self._order[network] = torch.from_numpy(order + network * longest).to(self._order, non_blocking=True)

    def _make_room(self, examples: int) -> None:
        """Let every network have that many examples."""
        networks, longest = self._labels.shape
        extra = examples - longest
        if extra <= 0:
            return
        self._inputs = torch.cat([self._inputs, self._inputs.new_zeros(networks, extra, *self._inputs.shape[2:])], 1)
        self._labels = torch.cat([self._labels, self._labels.new_zeros(networks, extra)], 1)
        self._order += torch.arange(networks, device=self._order.device).unsqueeze(1) * extra

    def take(self, first: NDArray[np.int64], count: int) -> Iterator[Batch]:
        """``count`` minibatches; network e begins with its minibatch number ``first[e]``."""
        start = torch.from_numpy(first * self._batch_size).to(self._order, non_blocking=True)
        places = start.unsqueeze(1) + torch.arange(self._batch_size, device=start.device)
        for number in range(count):
            yield self._gather(self._order.gather(1, places + number * self._batch_size))

    def _gather(self, index: Tensor) -> Batch:
        flat = index.flatten()
        inputs = self._inputs.flatten(0, 1).index_select(0, flat).view(*index.shape, *self._inputs.shape[2:])
        return Batch(inputs, self._labels.flatten().index_select(0, flat).view_as(index))


def stacked(data: Sequence[Data], device: torch.device) -> Batch:
    """All examples of E data sets of one size, ``[E, N, ...]``."""
    return Batch(
        torch.stack([part.inputs for part in data]).to(device), torch.stack([part.labels for part in data]).to(device)
    )


def _filled(tensor: Tensor, length: int) -> Tensor:
    filler = tensor.new_zeros(length - len(tensor), *tensor.shape[1:])
    return torch.cat([tensor, filler])
