"""Convolutional models of images and sequences."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foreign_models.problem import Problem, Recipe, Splits, floats, split
from foreign_models.sources import SHAPES, cut_patches, draw_shapes, split_digits, split_shapes


def make_convnet() -> nn.Sequential:
    """Images ``[B, 1, 8, 8]`` to logits ``[B, 10]``."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 12, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(12, 10),
    )


class ResidualBlock(nn.Module):
    """Two normalised convolutions and a skip."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs)
        self.conv2, self.bn2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs)
        self.downsample = nn.Identity() if stride == 1 else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))
        return (inner + self.downsample(x)).relu()


class SmallResNet(nn.Module):
    """Images ``[B, 1, 20, 20]`` to logits ``[B, 5]``."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.layer1, self.layer2 = ResidualBlock(8, 8, 1), ResidualBlock(8, 16, 2)
        self.fc = nn.Linear(16, len(SHAPES))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.layer2(self.layer1(self.stem(x))).mean((2, 3)))


class ConvNeXtBlock(nn.Module):
    """Depthwise convolution, LayerNorm over channels, and an inverted bottleneck, beside a skip."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.dwconv = nn.Conv2d(width, width, 5, padding=2, groups=width)
        self.norm = nn.LayerNorm(width)
        self.pwconv1, self.pwconv2 = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.gamma = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm(self.dwconv(x).movedim(1, -1))
        return x + (self.gamma * self.pwconv2(F.gelu(self.pwconv1(inner)))).movedim(-1, 1)


class SmallConvNeXt(nn.Module):
    """Images ``[B, 1, 8, 8]`` to logits ``[B, 10]``."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 12, 2, stride=2)
        self.stages = nn.Sequential(ConvNeXtBlock(12), ConvNeXtBlock(12))
        self.norm, self.head = nn.LayerNorm(12), nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.stages(self.stem(x)).mean((2, 3))))


class InvertedResidual(nn.Module):
    """Widen, convolve each channel by itself, narrow; beside a skip where the shape stays."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        wide = 3 * inputs
        self.use_skip = stride == 1 and inputs == outputs
        self.conv = nn.Sequential(
            nn.Conv2d(inputs, wide, 1, bias=False),
            nn.BatchNorm2d(wide),
            nn.ReLU6(),
            nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False),
            nn.BatchNorm2d(wide),
            nn.ReLU6(),
            nn.Conv2d(wide, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x) if self.use_skip else self.conv(x)


class SmallMobileNet(nn.Module):
    """Images ``[B, 1, 20, 20]`` to logits ``[B, 5]``."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Sequential(nn.Conv2d(1, 6, 3, 2, 1, bias=False), nn.BatchNorm2d(6), nn.ReLU6()),
            InvertedResidual(6, 6, 1),
            InvertedResidual(6, 10, 2),
            InvertedResidual(10, 10, 1),
        )
        self.classifier = nn.Linear(10, len(SHAPES))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).mean((2, 3)))


def convolve_twice(inputs: int, outputs: int) -> nn.Sequential:
    """The block of a U-Net."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(), nn.Conv2d(outputs, outputs, 3, padding=1), nn.ReLU()
    )


class SmallUNet(nn.Module):
    """Images ``[B, 1, H, W]`` to maps ``[B, outputs, H, W]`` through half of their height and width."""

    def __init__(self, width: int, outputs: int) -> None:
        super().__init__()
        self.down, self.middle = convolve_twice(1, width), convolve_twice(width, 2 * width)
        self.upsample = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.up = convolve_twice(2 * width, width)
        self.out = nn.Conv2d(width, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        fine = self.down(x)
        coarse = self.middle(F.max_pool2d(fine, 2))
        return self.out(self.up(torch.cat([fine, self.upsample(coarse)], dim=1)))


def split_segmentation(seed: int) -> Splits:
    images, _, classes = draw_shapes(1000, 0.5, seed)
    return split(images, classes, seed, 150, 250)


def split_noisy_patches(seed: int) -> Splits:
    clean = cut_patches(1000, 16, seed)
    noise = torch.randn(clean.shape, generator=torch.Generator().manual_seed(seed))
    return split(clean + 0.15 * noise, clean, seed, 150, 250)


class TemporalBlock(nn.Module):
    """Two causal dilated convolutions and a skip, on ``[B, C, L]``."""

    def __init__(self, inputs: int, outputs: int, dilation: int) -> None:
        super().__init__()
        self.pad = 2 * dilation
        self.conv1 = nn.Conv1d(inputs, outputs, 3, dilation=dilation)
        self.conv2 = nn.Conv1d(outputs, outputs, 3, dilation=dilation)
        self.skip = nn.Identity() if inputs == outputs else nn.Conv1d(inputs, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.conv1(F.pad(x, (self.pad, 0))).relu()
        return (self.conv2(F.pad(inner, (self.pad, 0))).relu() + self.skip(x)).relu()


class TemporalNet(nn.Module):
    """Sequences ``[B, 2, L]`` to one number each, ``[B, 1]``, read at their end."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(TemporalBlock(2, 8, 1), TemporalBlock(8, 8, 4), TemporalBlock(8, 8, 16))
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x)[:, :, -1])


def split_adding(seed: int) -> Splits:
    """The adding problem (Hochreiter and Schmidhuber, 1997): the sum of the two marked ones of 48 numbers."""
    rng = np.random.default_rng(seed)
    count, length = 2400, 48
    numbers, marks = rng.uniform(-1, 1, (count, length)), np.zeros((count, length))
    places = np.argsort(rng.random((count, length)), axis=1)[:, :2]
    np.put_along_axis(marks, places, 1.0, axis=1)
    targets = np.take_along_axis(numbers, places, axis=1).sum(1, keepdims=True)
    return split(floats(np.stack([numbers, marks], axis=1)), floats(targets), seed, 300, 600)


PROBLEMS = (
    Problem(
        name="convnet",
        build=make_convnet,
        data=split_digits,
        task="classification",
        loss=F.cross_entropy,
        recipe=Recipe(epochs=25, batch_size=50, learning_rate=3e-3),
        slots={"2": ["conv3x3", "conv1x1", "squeeze_excite"], "4": ["conv3x3", "conv1x1", "squeeze_excite"]},
    ),
    Problem(
        name="resnet",
        build=SmallResNet,
        data=split_shapes,
        task="classification",
        loss=F.cross_entropy,
        recipe=Recipe(epochs=20, batch_size=50, learning_rate=0.05, optimizer="sgd", weight_decay=5e-4, cosine=True),
        slots={"layer1": ["conv3x3", "squeeze_excite"], "layer2": ["conv3x3", "squeeze_excite"]},
    ),
    Problem(
        name="convnext",
        build=SmallConvNeXt,
        data=split_digits,
        task="classification",
        loss=F.cross_entropy,
        recipe=Recipe(epochs=25, batch_size=50, learning_rate=3e-3, optimizer="adamw", weight_decay=0.05),
        slots={r"re:stages\.\d": ["conv3x3", "depthwise", "squeeze_excite"]},
    ),
    Problem(
        name="mobilenet",
        build=SmallMobileNet,
        data=split_shapes,
        task="classification",
        loss=F.cross_entropy,
        recipe=Recipe(epochs=20, batch_size=50, learning_rate=5e-3, optimizer="adamw", cosine=True),
        slots={r"re:features\.[123]": ["conv1x1", "depthwise", "bottleneck", "squeeze_excite"]},
    ),
    Problem(
        name="unet_segmentation",
        build=lambda: SmallUNet(4, len(SHAPES) + 1),
        data=split_segmentation,
        task="classification",
        loss=F.cross_entropy,
        recipe=Recipe(epochs=20, batch_size=25, learning_rate=3e-3),
        slots={"down": "auto", "middle": "auto", "up": "auto"},
    ),
    Problem(
        name="unet_denoiser",
        build=lambda: SmallUNet(6, 1),
        data=split_noisy_patches,
        task="regression",
        loss=F.mse_loss,
        recipe=Recipe(epochs=25, batch_size=25, learning_rate=2e-3),
        slots={name: ["conv3x3", "depthwise", "conv1x1"] for name in ("down", "middle", "up")},
    ),
    Problem(
        name="tcn",
        build=TemporalNet,
        data=split_adding,
        task="regression",
        loss=F.mse_loss,
        recipe=Recipe(epochs=25, batch_size=50, learning_rate=3e-3),
        slots={r"re:blocks\.\d": ["conv1x1", "depthwise", "bottleneck"]},
    ),
)
