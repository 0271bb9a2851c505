"""Networks of images and of fixed vectors."""

from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from conformance.kind import CLASSES, EXAMPLES, WIDTH, Kind, Minibatch, classified
from factories import UNet, VisionTransformer

IMAGE = (3, 8, 8)


def mlp() -> nn.Module:
    return nn.Sequential(
        OrderedDict(
            one=nn.Linear(12, WIDTH), act=nn.ReLU(), two=nn.Linear(WIDTH, WIDTH), relu=nn.ReLU(), head=nn.Linear(8, 4)
        )
    )


def cnn() -> nn.Module:
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(3, WIDTH, 3, padding=1),
            relu1=nn.ReLU(),
            pool=nn.MaxPool2d(2),
            conv2=nn.Conv2d(WIDTH, WIDTH, 3, padding=1),
            relu2=nn.ReLU(),
            mean=nn.AdaptiveAvgPool2d(1),
            flat=nn.Flatten(),
            head=nn.Linear(WIDTH, CLASSES),
        )
    )


class BasicBlock(nn.Module):
    """As timm writes it: names, order and the in-place activation."""

    def __init__(self, inner: int, outer: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inner, outer, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outer)
        self.drop_block = nn.Identity()
        self.act1 = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outer, outer, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outer)
        self.act2 = nn.ReLU(inplace=True)
        self.downsample = None
        if stride > 1 or inner != outer:
            self.downsample = nn.Sequential(
                nn.Conv2d(inner, outer, 1, stride=stride, bias=False), nn.BatchNorm2d(outer)
            )

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x
        x = self.act1(self.drop_block(self.bn1(self.conv1(x))))
        x = self.bn2(self.conv2(x))
        if self.downsample is not None:
            shortcut = self.downsample(shortcut)
        x += shortcut
        return self.act2(x)


class ResNet(nn.Module):
    """Two stages."""

    def __init__(self, momentum: float = 0.1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, WIDTH, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(WIDTH)
        self.act1 = nn.ReLU(inplace=True)
        self.layer1 = nn.Sequential(BasicBlock(WIDTH, WIDTH))
        self.layer2 = nn.Sequential(BasicBlock(WIDTH, 12, 2), BasicBlock(12, 12))
        self.global_pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(12, CLASSES)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.momentum = momentum

    def forward(self, x: Tensor) -> Tensor:
        x = self.act1(self.bn1(self.conv1(x)))
        return self.fc(self.global_pool(self.layer2(self.layer1(x))).flatten(1))


class ConvNeXtBlock(nn.Module):
    """Depthwise convolution, then channels last, with a layer scale."""

    def __init__(self) -> None:
        super().__init__()
        self.conv_dw = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH))
        self.gamma = nn.Parameter(torch.full((WIDTH,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.mlp(self.norm(self.conv_dw(x).permute(0, 2, 3, 1))) * self.gamma
        return x + hidden.permute(0, 3, 1, 2)


def convnext() -> nn.Module:
    return nn.Sequential(
        OrderedDict(
            stem=nn.Conv2d(3, WIDTH, 2, 2),
            block1=ConvNeXtBlock(),
            block2=ConvNeXtBlock(),
            pool=nn.AdaptiveAvgPool2d(1),
            flat=nn.Flatten(),
            head=nn.Linear(WIDTH, CLASSES),
        )
    )


class MixerBlock(nn.Module):
    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mlp_tokens = nn.Sequential(nn.Linear(tokens, 8), nn.GELU(), nn.Linear(8, tokens))
        self.mlp_channels = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mlp_tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.mlp_channels(self.norm2(x))


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 4, 4)
        self.blocks = nn.Sequential(MixerBlock(4), MixerBlock(4))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x).flatten(2).transpose(1, 2)).mean(1))


def pixels(generator: torch.Generator) -> Minibatch:
    images = torch.randn(EXAMPLES, *IMAGE, generator=generator)
    return Minibatch(images, (images[:, 0] > 0).long() + (images[:, 1] > 0).long())


def masks(logits: Tensor, target: Tensor) -> float:
    return float((logits.argmax(1) == target).float().mean())


CONV = ["conv3x3", "squeeze_excite"]
KINDS = (
    Kind("mlp", mlp, {"one": ["mlp"], "two": ["lowrank"]}, classified(12), onnx=True),
    Kind("cnn", cnn, {"conv1": CONV, "conv2": CONV}, classified(*IMAGE), onnx=True),
    Kind("resnet", ResNet, {"layer1": CONV, "layer2.1": ["conv1x1"]}, classified(*IMAGE)),
    Kind(
        "batch_norm_momentum", lambda: ResNet(momentum=0.9), {"bn1": ["norm"], "layer2.0.bn2": CONV}, classified(*IMAGE)
    ),
    Kind("vit", VisionTransformer, {"blocks.0": ["attention", "mlp"], "blocks.1": ["mlp"]}, classified(*IMAGE)),
    Kind("convnext", convnext, {"block1": CONV, "block2": ["gate"]}, classified(*IMAGE)),
    Kind("mixer", Mixer, {"blocks.0": ["token_mix"], "blocks.1": ["mlp"]}, classified(*IMAGE)),
    Kind("unet", UNet, {"down": CONV, "bottom": ["depthwise"]}, pixels, F.cross_entropy, masks),
)
