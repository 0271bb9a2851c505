"""Digits and MNIST-1D, each with hosts too narrow for it."""

from __future__ import annotations

import torch

from esper.tasks.datasets.dataset import Dataset
from esper.tasks.datasets.digits import SOURCE, digits
from esper.tasks.datasets.hosts import ConvHost, MlpHost
from esper.tasks.datasets.mnist1d import LENGTH, mnist1d
from esper.tasks.datasets.suite import DatasetSuite
from esper.tasks.instance import Instance
from esper.tasks.source import COMPUTED, Source

PIXELS = 64


class MlpSuite(DatasetSuite):
    """Flat features and MLP hosts."""

    sites = ("layer0", "layer1")
    blueprints = ("norm", "lowrank", "mlp", "mlp_wide", "gate", "input_skip")
    host_widths = ((12, 12), (12, 3), (3, 12), (4, 4))

    def template(self) -> MlpHost:
        """The widest host."""
        return self._build(self.host_widths[0], 0)

    def host(self, instance: Instance) -> MlpHost:
        """The instance's narrow host."""
        self.check(instance)
        return self._build(instance.widths, instance.seed)

    def _build(self, widths: tuple[int, ...], seed: int) -> MlpHost:
        return MlpHost(self.input_shape[0], widths, self.classes, torch.Generator().manual_seed(seed))


class DigitsSuite(MlpSuite):
    """8 x 8 handwritten digits as 64 features."""

    name = "digits"
    input_shape = (PIXELS,)
    test_size = 360
    train_sizes = (384, 768, 1152)
    scarce_train_size = 128

    def dataset(self) -> Dataset:
        """1797 examples."""
        return digits()

    def source(self) -> Source:
        """A file of scikit-learn's."""
        return SOURCE


class Mnist1dSuite(MlpSuite):
    """MNIST-1D as 40 features."""

    name = "mnist1d"
    input_shape = (LENGTH,)
    test_size = 1000
    train_sizes = (1024, 2048, 3584)
    scarce_train_size = 384

    def dataset(self) -> Dataset:
        """5000 examples."""
        return mnist1d()

    def source(self) -> Source:
        """Nothing is read."""
        return COMPUTED


class Mnist1dConvSuite(DatasetSuite):
    """MNIST-1D as signals of one channel."""

    name = "mnist1d_conv"
    input_shape = (1, LENGTH)
    sites = ("layer0", "layer1", "layer2")
    blueprints = ("norm", "conv1x1", "depthwise", "conv3x3", "gate")
    test_size = Mnist1dSuite.test_size
    train_sizes = Mnist1dSuite.train_sizes
    scarce_train_size = Mnist1dSuite.scarce_train_size
    host_widths = ((8, 8, 8), (8, 3, 8), (3, 8, 8), (4, 4, 4))

    def dataset(self) -> Dataset:
        """5000 examples."""
        return mnist1d()

    def source(self) -> Source:
        """Nothing is read."""
        return COMPUTED

    def template(self) -> ConvHost:
        """The widest host."""
        return self._build(self.host_widths[0], 0)

    def host(self, instance: Instance) -> ConvHost:
        """The instance's narrow host."""
        self.check(instance)
        return self._build(instance.widths, instance.seed)

    def _build(self, widths: tuple[int, ...], seed: int) -> ConvHost:
        return ConvHost(widths, self.classes, torch.Generator().manual_seed(seed))
