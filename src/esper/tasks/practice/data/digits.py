"""Handwritten digits of 8 x 8 pixels; the test part comes from other writers."""

from __future__ import annotations

from esper.tasks.datasets.digits import digits
from esper.tasks.datasets.suites import DigitsSuite
from esper.tasks.practice.examples import Splits
from esper.tasks.practice.images import split
from esper.tasks.practice.task import Access

CLASSES = 10
SIDE = 8
VALIDATION = 300


class Digits:
    """1797 images ``[1, 8, 8]``, shipped with scikit-learn."""

    name = "digits"
    hosts = ("conv", "mlp", "resnet", "vit")
    reads_text = False

    def load(self, access: Access) -> Splits:
        """The last rows are for test."""
        del access
        found = digits()
        images = found.inputs.reshape(-1, 1, SIDE, SIDE)
        pool = len(found) - DigitsSuite.test_size
        return split((images[:pool], found.labels[:pool]), (images[pool:], found.labels[pool:]), VALIDATION, CLASSES)
