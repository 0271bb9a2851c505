"""A fixed data set as arrays, and its division into a pool and a test part."""

from __future__ import annotations

from dataclasses import dataclass

from esper.tasks.data import Floats, Labels


@dataclass(frozen=True)
class Dataset:
    """N examples ``[N, D]`` with labels ``[N]``, read-only: every instance in the process shares them."""

    inputs: Floats
    labels: Labels

    def __post_init__(self) -> None:
        self.inputs.flags.writeable = False
        self.labels.flags.writeable = False

    def __len__(self) -> int:
        return len(self.labels)
