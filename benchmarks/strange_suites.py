"""Suites for reporting alone: hosts and data of kinds that no rule of Esper's has seen.

    esper evaluate --controller look --suite benchmarks/strange_suites.py:relations --instances 64
    esper bench search --controller look --suite benchmarks/strange_suites.py:orbits --instances 24

`relations` has a host that multiplies matrices of ties between nodes, `orbits` one of damped oscillators that reads
trajectories and is judged by its loss. They were written before the search for the rule that is reported on them, and
how hard they are was set by bare hosts, by `all_at_start` and by single plantings drawn at random. Nothing is chosen on
them: no rule, and no setting of one.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import nn

from esper.errors import TaskError
from esper.numerics.arrays import Floats, Ints
from esper.tasks.instance import PARTS, Data, Instance, Part
from esper.tasks.registry import register
from esper.tasks.suite import OptimizerSettings, Suite, draw_log_uniform, find_by_name

CLASSES = 4
RENTS = (0.02, 0.05, 0.1)

Sampler = Callable[[int, np.random.Generator], tuple[Floats, Ints]]
"""Draws so many examples: pairs of numbers ``[N, *positions, 2]``, and labels ``[N]``."""


class StrangeSuite(Suite):
    """What both have in common: one variant, one shape of host, equal sizes, one recipe."""

    classes = CLASSES
    steps = 24
    batches_per_step = 12
    batch_size = 32
    train_size = 512
    validation_size = 128
    test_size = 512
    optimizer = OptimizerSettings(name="adamw", clip_norm=1.0)
    transfer_families = ()
    width: int
    """Channels at every site."""
    samplers: Mapping[str, Sampler]
    """By family."""

    def variants(self, family: str) -> tuple[str, ...]:
        """The only one."""
        find_by_name(f"{self.name} family", family, self.samplers)
        return ("plain",)

    def draw(self, family: str, variant: str, seed: int, rng: np.random.Generator) -> Instance:
        """Learning rates over half a decade, three rents."""
        return Instance(
            suite=self.name,
            family=family,
            variant=variant,
            seed=seed,
            widths=(self.width,) * len(self.sites),
            learning_rate=draw_log_uniform(0.006, 0.02, rng),
            train_size=self.train_size,
            rent=float(rng.choice(RENTS)),
        )

    def host(self, instance: Instance) -> nn.Module:
        """Weights of layers begin He-uniform, biases at zero; oscillators begin alike in all instances."""
        self.check(instance)
        host, generator = self.template(), torch.Generator().manual_seed(instance.seed)
        for name, parameter in host.named_parameters():
            if name.endswith("weight"):
                nn.init.kaiming_uniform_(parameter, generator=generator)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
        return host

    def data(self, instance: Instance, part: Part, phase: int = 0) -> Data:
        """Examples that are turned in the plane of their pairs, by the same angle in all parts of an instance."""
        self.check(instance)
        if phase:
            raise TaskError(f"instance {instance.name} has no phase {phase}: none of this suite drifts")
        sizes = {"train": self.train_size, "validation": self.validation_size, "test": self.test_size}
        angle = np.random.default_rng(instance.seed).uniform(0, 2 * np.pi)
        rng = np.random.default_rng([instance.seed, PARTS.index(part)])
        pairs, labels = self.samplers[instance.family](sizes[part], rng)
        inputs = self.arrange(turn(pairs, angle))
        return Data(torch.from_numpy(inputs.astype(np.float32)), torch.from_numpy(labels.astype(np.int64)))

    @abstractmethod
    def arrange(self, pairs: Floats) -> Floats:
        """Inputs of hosts from pairs of numbers ``[N, *positions, 2]``."""


def turn(pairs: Floats, angle: Floats | float) -> Floats:
    """Pairs of numbers ``[..., 2]``, turned in their plane by angles ``[...]``."""
    first, second, cos, sin = pairs[..., 0], pairs[..., 1], np.cos(angle), np.sin(angle)
    return np.stack([cos * first - sin * second, sin * first + cos * second], -1)


def blur(pairs: Floats, deviation: float, rng: np.random.Generator) -> Floats:
    """Pairs with normal noise."""
    return pairs + deviation * rng.standard_normal(pairs.shape)


# Relations: every pair of nodes shows two signs, [N, NODES, NODES, 2]. ------------------------------------------------

NODES = 8


def draw_signs(shares: Floats, rng: np.random.Generator) -> Floats:
    """Symmetric signs ``[N, NODES, NODES, K]``, of which shares ``[N, K]`` are positive; zero on the diagonal."""
    upper = np.triu(np.ones((NODES, NODES)), 1)[..., None]
    positive = rng.random((len(shares), NODES, NODES, shares.shape[1])) < shares[:, None, None]
    signs = np.where(positive, upper, -upper)
    return signs + signs.swapaxes(1, 2)


def sample_tally(count: int, rng: np.random.Generator) -> tuple[Floats, Ints]:
    """Whether most of the first signs are positive, and most of the second: linear in the sum of what is shown."""
    signs = draw_signs(rng.uniform(0.3, 0.7, (count, 2)), rng)
    mostly = signs.sum((1, 2)) > 0
    return blur(signs, 0.8, rng), 2 * mostly[:, 0] + mostly[:, 1]


def sample_hops(count: int, rng: np.random.Generator) -> tuple[Floats, Ints]:
    """Length of the shortest path between the first two nodes: 1, 2, 3 or more.

    Nodes are tied if their first sign is positive; the second is a distraction. Signs are shown in different strengths,
    so that paths are found more easily once strengths are levelled.
    """
    # Of many graphs as many of each length: drawn at random, most paths are short.
    graphs = draw_signs(np.full((20 * count, 1), 0.22), rng)
    tied = graphs[..., 0] > 0
    walks = (tied, tied @ tied, tied @ tied @ tied)
    lengths = np.select([walk[:, 0, 1] for walk in walks], range(len(walks)), len(walks))
    labels = rng.integers(CLASSES, size=count)
    chosen = np.empty(count, np.int64)
    for label in range(CLASSES):
        wanted = labels == label
        chosen[wanted] = rng.choice(np.flatnonzero(lengths == label), wanted.sum(), replace=False)
    signs = np.concatenate([graphs[chosen], draw_signs(np.full((count, 1), 0.5), rng)], -1)
    exponent = rng.uniform(-2.5, 0, (count, NODES, NODES, 1))
    return blur(signs * np.exp((exponent + exponent.swapaxes(1, 2)) / 2), 0.1, rng), labels


def sample_agreement(count: int, rng: np.random.Generator) -> tuple[Floats, Ints]:
    """Whether the two signs of the first two nodes agree, and whether those of most pairs of nodes do.

    No linear map finds that in each pair: without a nonlinear module before the sum, only the first is to be seen.
    """
    agreeing = draw_signs(rng.uniform(0.2, 0.8, (count, 1)), rng)
    first = draw_signs(np.full((count, 1), 0.5), rng)
    labels = 2 * (agreeing[:, 0, 1, 0] > 0) + (agreeing.sum((1, 2, 3)) > 0)
    return blur(np.concatenate([first, first * agreeing], -1), 0.2, rng), labels


class ComposedTies(nn.Module):
    """Matrices of ties ``[B, 2, NODES, NODES]``, composed once with themselves; all is linear in each pair of nodes.

    What the first node is to the second, and the sum over all pairs, reach the readout. Products of matrices as layers
    are those of provably powerful graph networks (Maron et al. 2019, arXiv:1905.11136).
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.ties = nn.Conv2d(2, width, 1)
        self.left, self.right, self.mix = (nn.Conv2d(width, width, 1) for _ in range(3))
        self.paths = nn.Identity()
        self.readout = nn.Sequential(nn.Linear(2 * width, width), nn.Tanh())
        self.head = nn.Linear(width, CLASSES)

    def forward(self, shown: torch.Tensor) -> torch.Tensor:
        """Logits ``[B, 4]``."""
        ties = self.ties(shown)
        composed = self.left(ties) @ self.right(ties) / NODES
        paths = self.paths(ties + self.mix(composed))
        seen = torch.cat([paths[:, :, 0, 1], paths.sum((-2, -1)) / NODES], -1)
        return self.head(self.readout(seen))


@register
class RelationsSuite(StrangeSuite):
    """Ties between nodes: nothing is to be gained in *tally*, something in *hops*, much in *agreement*."""

    name = "relations"
    input_shape = (2, NODES, NODES)
    sites = ("ties", "paths", "readout")
    blueprints = ("conv1x1", "squeeze_excite", "mlp", "conv3x3", "norm", "gate", "lowrank")
    families = ("tally", "hops", "agreement")
    samplers = dict(zip(families, (sample_tally, sample_hops, sample_agreement), strict=True))
    width = 5

    def template(self) -> nn.Module:
        return ComposedTies(self.width)

    def arrange(self, pairs: Floats) -> Floats:
        """Inputs ``[N, 2, NODES, NODES]``."""
        return np.moveaxis(pairs, -1, 1)


# Orbits: positions of a moving body, [N, MOMENTS, 2]. -----------------------------------------------------------------

MOMENTS = 16
SUBSTEPS = 32
"""Steps of the simulation from one moment to the next."""


def draw_swing(count: int, slimness: float, rng: np.random.Generator) -> Floats:
    """Positions ``[N, MOMENTS, 2]`` on ellipses of any heading, frequency and phase: those of a spring."""
    frequency, begin = rng.uniform(0.6, 1.0, (count, 1)), rng.uniform(0, 2 * np.pi, (count, 1))
    phase = frequency * np.arange(MOMENTS) + begin
    ellipse = np.stack([np.cos(phase), slimness * np.sin(phase)], -1)
    return turn(ellipse, rng.uniform(0, 2 * np.pi, (count, 1)))


def sample_drift(count: int, rng: np.random.Generator) -> tuple[Floats, Ints]:
    """The quarter of directions in which a swinging body drifts: linear in its positions."""
    labels = rng.integers(CLASSES, size=count)
    towards = (labels + rng.uniform(0, 1, count)) * 2 * np.pi / CLASSES
    velocity = 0.06 * np.stack([np.cos(towards), np.sin(towards)], -1)
    times = np.arange(MOMENTS) - (MOMENTS - 1) / 2
    return blur(draw_swing(count, 0.5, rng) + times[:, None] * velocity[:, None], 0.5, rng), labels


def sample_damping(count: int, rng: np.random.Generator) -> tuple[Floats, Ints]:
    """At which of four rates a swing fades, whatever its size: a ratio of energies, quadratic in positions."""
    labels = rng.integers(CLASSES, size=count)
    rates = np.array([0.0, 0.05, 0.12, 0.25])[labels]
    fading = np.exp(-rates[:, None] * np.arange(MOMENTS)) * rng.uniform(0.8, 1.6, (count, 1))
    return blur(fading[..., None] * draw_swing(count, 0.4, rng), 0.1, rng), labels


def sample_law(count: int, rng: np.random.Generator) -> tuple[Floats, Ints]:
    """How the force that holds an orbit goes with distance: inverse square, inverse, constant or proportional."""
    labels = rng.integers(CLASSES, size=count)
    exponent = np.arange(-2.0, 2.0)[labels]
    positions = follow_orbits(exponent, rng.uniform(0.6, 0.85, count), rng.uniform(0.6, 1.0, count) / SUBSTEPS)
    return blur(turn(positions, rng.uniform(0, 2 * np.pi, (count, 1))), 0.02, rng), labels


def follow_orbits(exponent: Floats, speed: Floats, interval: Floats) -> Floats:
    """Positions ``[N, MOMENTS, 2]`` under a force of ``distance ** exponent`` towards the centre, by leapfrog steps.

    Bodies begin at distance 1 and move across, with a ``speed`` of 1 on a circle; ``interval`` is that of a step. All
    arguments are ``[N]``.
    """
    position = np.stack([np.ones_like(speed), np.zeros_like(speed)], -1)
    velocity = np.stack([np.zeros_like(speed), speed], -1)
    shown: list[Floats] = []
    for step in range(MOMENTS * SUBSTEPS):
        if step % SUBSTEPS == 0:
            shown.append(position)
        halfway = position + 0.5 * interval[:, None] * velocity
        distance = np.sqrt((halfway**2).sum(-1))
        velocity = velocity - (interval * distance ** (exponent - 1))[:, None] * halfway
        position = halfway + 0.5 * interval[:, None] * velocity
    return np.stack(shown, 1)


class DampedModes(nn.Module):
    """Trajectories ``[B, MOMENTS, 2]`` through linear oscillators with learned rates of decay and frequencies.

    Each channel drives one, as in diagonal state-space models (Gupta et al. 2022, arXiv:2203.14343). All is linear up
    to the readout of the mean over time and the last moment.
    """

    lags: torch.Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.encode = nn.Linear(2, width)
        self.log_decay = nn.Parameter(torch.linspace(-3.0, -1.0, width))
        self.frequency = nn.Parameter(torch.linspace(0.1, 1.5, width))
        self.mix = nn.Linear(2 * width, width)
        self.modes = nn.Identity()
        self.readout = nn.Sequential(nn.Linear(2 * width, width), nn.Tanh())
        self.head = nn.Linear(width, CLASSES)
        moments = torch.arange(float(MOMENTS))
        self.register_buffer("lags", moments[:, None] - moments)

    def forward(self, trajectory: torch.Tensor) -> torch.Tensor:
        """Logits ``[B, 4]``."""
        driven = self.encode(trajectory)
        # Each oscillator answers to earlier moments [C, T, T] with a fading cosine and a fading sine.
        lags = self.lags.clamp_min(0)
        fading = torch.exp(-self.log_decay.exp()[:, None, None] * lags) * (self.lags >= 0)
        phase = self.frequency[:, None, None] * lags
        drives = driven.permute(2, 1, 0)  # [C, T, B]
        answers = torch.cat([(fading * wave) @ drives for wave in (phase.cos(), phase.sin())])
        states = self.modes(driven + self.mix(answers.permute(2, 1, 0)))
        return self.head(self.readout(torch.cat([states.mean(1), states[:, -1]], -1)))


@register
class OrbitsSuite(StrangeSuite):
    """Bodies in motion, judged by the loss: nothing is to be gained in *drift*, much in *damping* and in *law*."""

    name = "orbits"
    objective = "loss"
    input_shape = (MOMENTS, 2)
    sites = ("encode", "modes", "readout")
    blueprints = ("mlp", "token_conv", "lowrank", "attention", "token_mix", "norm", "gate", "input_skip")
    families = ("drift", "damping", "law")
    samplers = dict(zip(families, (sample_drift, sample_damping, sample_law), strict=True))
    width = 5

    def template(self) -> nn.Module:
        return DampedModes(self.width)

    def arrange(self, pairs: Floats) -> Floats:
        """Inputs ``[N, MOMENTS, 2]``."""
        return pairs
