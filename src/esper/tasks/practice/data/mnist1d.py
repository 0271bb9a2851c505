"""MNIST-1D: signals of 40 points, computed from their recipe."""

from __future__ import annotations

from esper.tasks.datasets.mnist1d import CLASSES, LENGTH, mnist1d
from esper.tasks.datasets.suites import Mnist1dSuite
from esper.tasks.practice.examples import Splits
from esper.tasks.practice.images import split
from esper.tasks.practice.task import Access

VALIDATION = 500


class Mnist1d:
    """5000 signals ``[1, 40]``."""

    name = "mnist1d"
    hosts = ("conv1d", "mlp")
    reads_text = False

    def load(self, access: Access) -> Splits:
        """The last rows are for test."""
        del access
        found = mnist1d()
        signals = found.inputs.reshape(-1, 1, LENGTH)
        pool = len(found) - Mnist1dSuite.test_size
        return split((signals[:pool], found.labels[:pool]), (signals[pool:], found.labels[pool:]), VALIDATION, CLASSES)
