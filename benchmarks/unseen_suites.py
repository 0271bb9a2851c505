"""Suites of hosts and data unlike those of Esper's own suites.

    esper evaluate --controller look --suite benchmarks/unseen_suites.py:recurrent --instances 64

`recurrent` has a recurrent host that reads a series of events, `compass` a residual host on images cut into patches.
With the rings of `examples/own_suite.py` they are test kinds of docs/results.md.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from esper.tasks.instance import PARTS, Data, Instance, Part
from esper.tasks.registry import register
from esper.tasks.suite import OptimizerSettings, Suite, draw_log_uniform

SIZES = {"train": 512, "validation": 128, "test": 512}
RENTS = (0.02, 0.05, 0.1)


def initialised(host: nn.Module, seed: int) -> nn.Module:
    """The host with first weights that follow from the seed."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in host.named_parameters():
        if parameter.dim() > 1:
            nn.init.kaiming_uniform_(parameter, generator=generator)
        elif "norm" not in name:
            nn.init.zeros_(parameter)
    return host


class UnseenSuite(Suite):
    """What both have in common: one variant, one shape of host, equal sizes."""

    steps = 24
    batches_per_step = 8
    batch_size = 32
    validation_size = SIZES["validation"]
    test_size = SIZES["test"]
    optimizer = OptimizerSettings(name="adamw", clip_norm=1.0)
    transfer_families = ()
    widths: tuple[int, ...]

    def variants(self, family: str) -> tuple[str, ...]:
        """The only one."""
        return ("plain",)

    def draw(self, family: str, variant: str, seed: int, rng: np.random.Generator) -> Instance:
        """Learning rates over half a decade, three rents."""
        return Instance(
            suite=self.name,
            family=family,
            variant=variant,
            seed=seed,
            widths=self.widths,
            learning_rate=draw_log_uniform(0.003, 0.01, rng),
            train_size=SIZES["train"],
            rent=float(rng.choice(RENTS)),
        )

    def host(self, instance: Instance) -> nn.Module:
        return initialised(self.template(), instance.seed)


class Recurrent(nn.Module):
    """Series ``[B, T, 3]`` through a projection, an Elman network and a readout of its last state."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.project = nn.Sequential(nn.Linear(3, width), nn.Tanh())
        self.read, self.recur = nn.Linear(width, width), nn.Linear(width, width)
        self.states = nn.Identity()
        self.readout = nn.Sequential(nn.Linear(width, width), nn.Tanh())
        self.head = nn.Linear(width, 4)

    def forward(self, series: torch.Tensor) -> torch.Tensor:
        """Logits ``[B, 4]``."""
        inputs = self.read(self.project(series))
        state, states = torch.zeros_like(inputs[:, 0]), []
        for moment in inputs.unbind(1):
            state = torch.tanh(moment + self.recur(state))
            states.append(state)
        return self.head(self.readout(self.states(torch.stack(states, 1))[:, -1]))


@register
class RecurrentSuite(UnseenSuite):
    """Events of two kinds among noise: which kind came last, and was it often (``last``); who leads (``lead``)."""

    name = "recurrent"
    classes = 4
    input_shape = (14, 3)
    sites = ("project", "states", "readout")
    blueprints = ("mlp", "lowrank", "attention", "token_conv", "token_mix", "norm", "gate", "input_skip")
    families = ("last", "lead")
    widths = (5, 5, 5)

    def template(self) -> nn.Module:
        """Five units everywhere."""
        return Recurrent(5)

    def data(self, instance: Instance, part: Part, phase: int = 0) -> Data:
        """Series ``[N, 14, 3]``: two channels of events, turned by the instance, and a clock."""
        count, length = SIZES[part], self.input_shape[0]
        rng = np.random.default_rng([instance.seed, PARTS.index(part)])
        turn = np.random.default_rng(instance.seed).uniform(0, np.pi)
        events = rng.random((count, length, 2)) < 0.25
        often = events.sum(1)
        if instance.family == "last":
            last = np.where(events.any(1), length - events[:, ::-1].argmax(1), 0)
            labels = 2 * (last[:, 0] > last[:, 1]) + (often.sum(1) > length // 2)
        else:
            lead = np.cumsum(events[..., 0].astype(int) - events[..., 1], 1)
            labels = 2 * (lead[:, -1] > 0) + (lead[:, length // 2] > 0)
        shown = events @ np.array([[np.cos(turn), np.sin(turn)], [-np.sin(turn), np.cos(turn)]])
        clock = np.broadcast_to(np.linspace(-1, 1, length)[:, None], (count, length, 1))
        series = np.concatenate([shown + 0.2 * rng.standard_normal(shown.shape), clock], -1)
        return Data(torch.from_numpy(series.astype(np.float32)), torch.from_numpy(labels.astype(np.int64)))


class ResidualPatches(nn.Module):
    """Images ``[B, 1, 8, 8]`` as 16 patches, each through residual layers of its own, and their mean."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Linear(4, width)
        self.position = nn.Parameter(torch.zeros(16, width))
        self.block0, self.block1 = (
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()) for _ in range(2)
        )
        self.stream0, self.stream1 = nn.Identity(), nn.Identity()
        self.head = nn.Linear(width, 4)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Logits ``[B, 4]``."""
        patches = images.reshape(-1, 4, 2, 4, 2).transpose(2, 3).reshape(-1, 16, 4)
        tokens = self.embed(patches) + self.position
        tokens = self.stream0(tokens + self.block0(tokens))
        tokens = self.stream1(tokens + self.block1(tokens))
        return self.head(tokens.mean(1))


@register
class CompassSuite(UnseenSuite):
    """Two blobs in an image: in which direction the bright one lies from the dim one (``direction``), or how far and
    along which axis (``distance``).
    """

    name = "compass"
    classes = 4
    input_shape = (1, 8, 8)
    sites = ("embed", "stream0", "stream1")
    blueprints = ("mlp_wide", "lowrank_8", "attention", "token_mix", "norm", "gate")
    families = ("direction", "distance")
    widths = (6, 6, 6)

    def template(self) -> nn.Module:
        """Six channels everywhere."""
        return ResidualPatches(6)

    def data(self, instance: Instance, part: Part, phase: int = 0) -> Data:
        """Images ``[N, 1, 8, 8]``."""
        count = SIZES[part]
        rng = np.random.default_rng([instance.seed, PARTS.index(part)])
        size = np.random.default_rng(instance.seed).uniform(0.7, 1.1)
        places = rng.uniform(1, 6, (count, 2, 2))
        offset = places[:, 1] - places[:, 0]
        along = np.abs(offset[:, 0]) > np.abs(offset[:, 1])
        main = np.where(along, offset[:, 0], offset[:, 1])
        far = main > 0 if instance.family == "direction" else np.abs(main) > 2
        labels = 2 * along + far
        pixel = np.stack(np.meshgrid(np.arange(8), np.arange(8), indexing="ij"), -1)
        distance = ((pixel - places[:, :, None, None]) ** 2).sum(-1)
        images = (np.array([1.0, 2.5])[:, None, None] * np.exp(-distance / (2 * size**2))).sum(1)
        images = images + 0.1 * rng.standard_normal(images.shape)
        return Data(torch.from_numpy(images[:, None].astype(np.float32)), torch.from_numpy(labels.astype(np.int64)))
