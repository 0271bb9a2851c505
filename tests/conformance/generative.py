"""Networks whose owner has but a loss: regressions, autoencoders, diffusion, flows, contrasts."""

import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from conformance.kind import EXAMPLES, WIDTH, Kind, Minibatch, mapped

FEATURES = 6
STEPS = 20
"""Of diffusion."""


def regressor(outputs: int) -> nn.Module:
    return nn.Sequential(
        OrderedDict(
            one=nn.Linear(FEATURES, WIDTH), act=nn.Tanh(), two=nn.Linear(WIDTH, WIDTH), head=nn.Linear(WIDTH, outputs)
        )
    )


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 2))
        self.decoder = nn.Sequential(nn.Linear(2, WIDTH), nn.ReLU(), nn.Linear(WIDTH, FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x))


@dataclass
class Reconstruction:
    """What a `Vae` returns."""

    mean: Tensor
    log_variance: Tensor
    found: Tensor


class Vae(nn.Module):
    """Kingma and Welling 2014; it draws where it trains, and returns a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.ReLU())
        self.mean, self.log_variance = nn.Linear(WIDTH, 2), nn.Linear(WIDTH, 2)
        self.decoder = nn.Sequential(nn.Linear(2, WIDTH), nn.ReLU(), nn.Linear(WIDTH, FEATURES))

    def forward(self, x: Tensor) -> Reconstruction:
        hidden = self.hidden(x)
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        noise = torch.randn_like(mean) if self.training else torch.zeros_like(mean)
        return Reconstruction(mean, log_variance, self.decoder(mean + noise * (log_variance / 2).exp()))


def evidence_bound(found: Reconstruction, x: Tensor) -> Tensor:
    divergence = (found.mean**2 + found.log_variance.exp() - found.log_variance - 1).sum(1).mean() / 2
    return F.mse_loss(found.found, x) + 0.1 * divergence


class Denoiser(nn.Module):
    """Ho et al. 2020: the noise in ``x`` at step ``t``, ``[B]`` integers, which are embedded as sines."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU())
        self.inner = nn.Conv2d(1, WIDTH, 3, padding=1)
        self.middle = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
        self.outer = nn.Conv2d(WIDTH, 1, 3, padding=1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        angles = t[:, None] / 100 ** (torch.arange(WIDTH // 2) / (WIDTH // 2))
        embedded = self.time(torch.cat((angles.sin(), angles.cos()), 1))
        hidden = (self.inner(x) + embedded[:, :, None, None]).relu()
        return self.outer(self.middle(hidden).relu())


def noised(generator: torch.Generator) -> Minibatch:
    clean = torch.ones(EXAMPLES, 1, 4, 4) * torch.randn(EXAMPLES, 1, 1, 1, generator=generator)
    t = torch.randint(STEPS, (EXAMPLES,), generator=generator)
    noise = torch.randn(clean.shape, generator=generator)
    kept = (torch.cos((t + 1) / (STEPS + 1) * math.pi / 2) ** 2)[:, None, None, None]
    return Minibatch({"x": kept.sqrt() * clean + (1 - kept).sqrt() * noise, "t": t}, noise)


class Flow(nn.Module):
    """Dinh et al. 2017: two affine couplings; the log density of each example, which may be positive."""

    def __init__(self) -> None:
        super().__init__()
        half = FEATURES // 2
        self.nets = nn.ModuleList(
            nn.Sequential(nn.Linear(half, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 2 * half)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, 1)
        log_determinant = x.new_zeros(len(x))
        for net in self.nets:
            shift, scale = net(a).chunk(2, 1)
            a, b = b * scale.tanh().exp() + shift, a
            log_determinant = log_determinant + scale.tanh().sum(1)
        prior = -(a**2 + b**2).sum(1) / 2 - FEATURES / 2 * math.log(2 * math.pi)
        return prior + log_determinant


def narrow(generator: torch.Generator) -> Minibatch:
    """Points so close together that densities exceed 1: the loss is negative."""
    return Minibatch(torch.randn(EXAMPLES, FEATURES, generator=generator) / 100)


class Siamese(nn.Module):
    """One encoder for all views of all examples."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        self.projector = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.projector(self.encoder(x))


class CalledTwice(Siamese):
    """Encodes one view after the other."""

    def forward(self, one: Tensor, other: Tensor) -> tuple[Tensor, ...]:
        return self.projector(self.encoder(one)), self.projector(self.encoder(other))


class Stacked(Siamese):
    """Stacks the views within the forward pass."""

    def forward(self, one: Tensor, other: Tensor) -> tuple[Tensor, ...]:
        return self.projector(self.encoder(torch.cat((one, other)))).chunk(2)


def contrast(found: Tensor, target: Any) -> Tensor:
    """Chen et al. 2020; the views of example i are rows 2 i and 2 i + 1."""
    one, other = F.normalize(found[::2], dim=1), F.normalize(found[1::2], dim=1)
    return F.cross_entropy(one @ other.T / 0.5, torch.arange(len(one)))


def views(generator: torch.Generator) -> Minibatch:
    x = torch.randn(EXAMPLES, FEATURES, generator=generator).repeat_interleave(2, 0)
    return Minibatch(x + 0.1 * torch.randn(x.shape, generator=generator))


def pairs(generator: torch.Generator) -> Minibatch:
    both = views(generator).inputs
    return Minibatch((both[::2], both[1::2]))


def itself(x: Tensor) -> Tensor:
    return x


SLOTS = {"one": ["mlp"], "two": ["lowrank"]}
KINDS = (
    Kind(
        "regression",
        lambda: regressor(1),
        SLOTS,
        mapped(FEATURES, wanted=lambda x: x.prod(1, keepdim=True)),
        F.mse_loss,
        None,
    ),
    Kind(
        "several_outputs",
        lambda: regressor(3),
        SLOTS,
        mapped(FEATURES, wanted=lambda x: x[:, :3] ** 2),
        F.smooth_l1_loss,
        None,
    ),
    Kind(
        "autoencoder",
        Autoencoder,
        {"encoder.0": ["mlp"], "decoder.0": ["mlp"]},
        mapped(FEATURES, wanted=itself),
        F.mse_loss,
        None,
    ),
    Kind(
        "vae", Vae, {"hidden": ["mlp"], "decoder.0": ["lowrank"]}, mapped(FEATURES, wanted=itself), evidence_bound, None
    ),
    Kind("diffusion", Denoiser, {"inner": ["conv3x3"], "middle": ["conv1x1", "gate"]}, noised, F.mse_loss, None),
    Kind("flow", Flow, {"nets.0.0": ["mlp"], "nets.1.0": ["lowrank"]}, narrow, lambda found, _: -found.mean(), None),
    Kind("siamese", Siamese, {"encoder": ["mlp"], "projector": ["lowrank"]}, views, contrast, None),
)
REFUSED = (
    (Kind("siamese_called_twice", CalledTwice, {"encoder": ["mlp"]}, pairs, contrast, None), "runs 2 times"),
    (Kind("siamese_stacked", Stacked, {"encoder": ["mlp"]}, pairs, contrast, None), "keeps the examples apart"),
)
"""What no slot can serve, with a part of the sentence that says why."""
