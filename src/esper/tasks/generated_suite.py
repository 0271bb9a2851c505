"""Suites drawn at random: each number is a suite with a host, a menu, a horizon, an optimizer and prices of its own.

A controller that learns on them meets hardly anything twice. What is drawn, and from where, stands in `GeneratedSuite`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper.errors import TaskError
from esper.numerics.random_streams import child_generator
from esper.numerics.stacking import Stackable
from esper.tasks.generated_problems import PROBLEMS, Draw, Shape
from esper.tasks.instance import PARTS, Data, Instance, LabelledArrays, Part, Scale, add_label_noise, standardise
from esper.tasks.layers import Conv1d, Linear, TokenLinear, initialise
from esper.tasks.registry import GENERATED, SHORTEST, lookup
from esper.tasks.suite import OptimizerSettings, Suite, draw_log_uniform

ACTIVATIONS: Mapping[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "gelu": nn.GELU,
    "none": nn.Identity,
}


@dataclass(frozen=True)
class Build:
    """What a host of a generated suite is made of."""

    kind: str
    shape: Shape
    widths: tuple[int, ...]
    """Channels of each block."""
    activation: str
    kernel: int
    """Kernel size of convolutions of signals."""


class Chain(nn.Module):
    """Blocks one after another, what they share of their positions, and a head."""

    def __init__(self, blocks: list[nn.Module], summarise: Callable[[Tensor], Tensor], head: nn.Module) -> None:
        super().__init__()
        self.depth = len(blocks)
        for index, block in enumerate(blocks):
            self.add_module(f"block{index}", block)
        self.summarise = summarise
        self.head = head

    def forward(self, inputs: Tensor) -> Tensor:
        """Inputs ``[B, ...]`` to logits ``[B, classes]``."""
        for index in range(self.depth):
            inputs = self.get_submodule(f"block{index}")(inputs)
        return self.head(self.summarise(inputs))


def _all_of(features: Tensor) -> Tensor:
    return features


def _mean_of_tokens(features: Tensor) -> Tensor:
    return features.mean(-2)


def _mean_of_samples(features: Tensor) -> Tensor:
    return features.mean(-1)


def _mean_of_pixels(features: Tensor) -> Tensor:
    return features.mean((-2, -1))


def _last_token(features: Tensor) -> Tensor:
    return features[..., -1, :]


class StackableChain(Chain, Stackable):
    """One whose blocks, summary and head all work on the last axes."""


class Conv2d(nn.Conv2d):
    """A 3 x 3 convolution of images ``[B, C, H, W]``, padded by one pixel."""

    def __init__(self, inputs: int, outputs: int, stride: int, generator: torch.Generator) -> None:
        super().__init__(inputs, outputs, 3, stride=stride, padding=1, device="meta")
        initialise(self, generator)


class CausalBlock(Stackable):
    """A pre-norm transformer block with one head: tokens ``[..., B, T, C]`` to the same, none of which sees later ones.

    The first block of a host brings ``inputs`` features to C, with a learned vector for every position.
    """

    def __init__(self, inputs: int, width: int, positions: int, activation: str, generator: torch.Generator) -> None:
        super().__init__()
        self.embed = TokenLinear(inputs, width, generator) if inputs != width or positions else nn.Identity()
        self.position = nn.Parameter(torch.zeros(positions, width)) if positions else None
        self.project = TokenLinear(width, 3 * width, generator)
        self.merge = TokenLinear(width, width, generator)
        self.own = nn.Sequential(
            TokenLinear(width, 2 * width, generator),
            ACTIVATIONS[activation](),
            TokenLinear(2 * width, width, generator),
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """See the class."""
        tokens = self.embed(tokens)
        if self.position is not None:
            tokens = tokens + self.position.unsqueeze(-3)
        query, key, value = self.project(_normalise(tokens)).chunk(3, -1)
        scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        tokens = tokens + self.merge(F.softmax(scores.masked_fill(later, -torch.inf), -1) @ value)
        return tokens + self.own(_normalise(tokens))


def _normalise(tokens: Tensor) -> Tensor:
    """Each token with mean 0 and variance 1 over its channels; nothing is learned."""
    return F.layer_norm(tokens, tokens.shape[-1:])


def build(plan: Build, generator: torch.Generator) -> Chain:
    """The host, with first weights from ``generator``."""
    shape, activation = plan.shape, ACTIVATIONS[plan.activation]
    head = Linear(plan.widths[-1], shape.classes, generator)
    ins = (1 if plan.kind in ("signals", "images") else shape.channels, *plan.widths[:-1])
    pairs = list(zip(ins, plan.widths, strict=True))
    if plan.kind == "mlp":
        return StackableChain([nn.Sequential(Linear(*one, generator), activation()) for one in pairs], _all_of, head)
    if plan.kind == "tokens":
        blocks: list[nn.Module] = [nn.Sequential(TokenLinear(*one, generator), activation()) for one in pairs]
        return StackableChain(blocks, _mean_of_tokens, head)
    if plan.kind == "signals":
        blocks = [
            nn.Sequential(Conv1d(*one, plan.kernel, 2 if index < 2 else 1, generator), activation())
            for index, one in enumerate(pairs)
        ]
        return StackableChain(blocks, _mean_of_samples, head)
    if plan.kind == "images":
        blocks = [
            nn.Sequential(Conv2d(*one, 2 if index == 0 else 1, generator), activation())
            for index, one in enumerate(pairs)
        ]
        return Chain(blocks, _mean_of_pixels, head)
    blocks = [
        CausalBlock(*one, 0 if index else shape.positions, plan.activation, generator)
        for index, one in enumerate(pairs)
    ]
    return StackableChain(blocks, _last_token, head)


_SERVING: Mapping[str, tuple[str, ...]] = {
    "mlp": ("norm", "lowrank", "mlp", "mlp_wide", "gate", "input_skip"),
    "tokens": (
        *("norm", "lowrank", "mlp", "mlp_wide", "gate", "input_skip"),
        *("lowrank_8", "attention", "token_conv", "token_mix"),
    ),
    "signals": ("norm", "conv1x1", "depthwise", "conv3x3", "bottleneck", "squeeze_excite", "gate"),
    "images": ("norm", "conv1x1", "depthwise", "conv3x3", "bottleneck", "squeeze_excite", "gate"),
    "language": ("norm", "lowrank", "mlp", "mlp_wide", "lowrank_8", "attention", "input_skip"),
}
"""Blueprints that serve the sites of each kind of host."""
_VARIANTS = ("clean", "noisy", "drifting")
_FREE = 0.15
"""Share of the instances on which growth costs nothing."""
_CAPPED = 0.25
"""Share of the suites in which only so much may grow."""
_BY_LOSS = 0.2
"""Share of the suites that are about the loss alone."""
_FIXED, _FRESH, _RECIPE, _OBJECTIVE = range(4)
"""Keys of random streams."""


class GeneratedSuite(Suite):
    """The suite of a number, from 0. Its families are the problems of one kind of host, which share that host."""

    validation_size = 128
    test_size = 384
    transfer_families = ()

    def __init__(self, number: int) -> None:
        rng = child_generator(number, _RECIPE)
        self.name = f"{GENERATED}:{number}"
        self.kind = str(rng.choice(list(PROBLEMS)))
        self.families = tuple(PROBLEMS[self.kind])
        serving = _SERVING[self.kind]
        size = int(rng.integers(3, len(serving) + 1))
        self.blueprints = tuple(str(name) for name in rng.choice(serving, size, replace=False))
        self.steps = int(rng.integers(SHORTEST, 61))
        self.batches_per_step = int(rng.integers(4, 11))
        self.batch_size = int(rng.choice([16, 32, 48]))
        self._shape = _draw_shape(self.kind, rng)
        self.classes = self._shape.classes
        self.input_shape = _input_shape(self.kind, self._shape)
        self._build = _draw_build(self.kind, self._shape, rng)
        self.sites = tuple(f"block{index}" for index in range(len(self._build.widths)))
        adaptive = bool(rng.random() < 0.6)
        self.optimizer = OptimizerSettings(
            name="adamw" if adaptive else "sgd",
            weight_decay=float(rng.choice([0.0, 0.01])),
            clip_norm=1.0 if rng.random() < 0.3 else None,
        )
        if rng.random() < _CAPPED:
            self.parameter_cap = int(rng.uniform(0.2, 2.0) * sum(one.numel() for one in self.template().parameters()))
        self.objective = "loss" if child_generator(number, _OBJECTIVE).random() < _BY_LOSS else "accuracy"
        self._learning_rates = (0.002, 0.02) if adaptive else (0.01, 0.1)
        self._train_sizes = tuple(rng.choice([96, 192, 384, 768, 1536], 2, replace=False).tolist())

    def variants(self, family: str) -> tuple[str, ...]:
        """The data stay as they are, have wrong labels, or become those of another draw."""
        lookup(f"family of suite {self.name!r}", family, PROBLEMS[self.kind])
        return _VARIANTS

    def draw(self, family: str, variant: str, seed: int, rng: np.random.Generator) -> Instance:
        lookup(f"variant of family {family!r}", variant, dict.fromkeys(self.variants(family)))
        third = self.steps // 3
        return Instance(
            suite=self.name,
            family=family,
            variant=variant,
            seed=seed,
            widths=self._build.widths,
            learning_rate=draw_log_uniform(*self._learning_rates, rng),
            train_size=int(rng.choice(self._train_sizes)),
            rent=0.0 if rng.random() < _FREE else draw_log_uniform(0.01, 0.2, rng),
            label_noise=rng.uniform(0.1, 0.4) if variant == "noisy" else 0.0,
            drift_step=int(rng.integers(third, 2 * third)) if variant == "drifting" else None,
        )

    def template(self) -> Chain:
        return build(self._build, torch.Generator().manual_seed(0))

    def host(self, instance: Instance) -> Chain:
        self.check(instance)
        return build(self._build, torch.Generator().manual_seed(instance.seed))

    def data(self, instance: Instance, part: Part, phase: int = 0) -> Data:
        """Inputs ``[N, *input_shape]``, standardised by the training part of the same phase, and labels."""
        self.check(instance)
        if phase not in ((0,) if instance.drift_step is None else (0, 1)):
            raise TaskError(f"instance {instance.name} has no phase {phase}: only instances that drift have a phase 1")
        training = _examples(self, instance, "train", phase)
        examples = training if part == "train" else _examples(self, instance, part, phase)
        return standardise(*examples, Scale.of(training.inputs))

    def count(self, instance: Instance, part: Part) -> int:
        """Examples of a part."""
        sizes = {"train": instance.train_size, "validation": self.validation_size, "test": self.test_size}
        return sizes[part]

    @property
    def shape(self) -> Shape:
        """How large inputs are."""
        return self._shape


@lru_cache(maxsize=256)
def _examples(suite: GeneratedSuite, instance: Instance, part: Part, phase: int) -> LabelledArrays:
    """Kept because every part is standardised by the first; callers must not write to it."""
    fixed = child_generator(instance.seed, phase, _FIXED)
    fresh = child_generator(instance.seed, phase, _FRESH, PARTS.index(part))
    draw = Draw(suite.count(instance, part), PARTS.index(part), fixed, fresh)
    inputs, labels = PROBLEMS[suite.kind][instance.family](suite.shape, draw)
    if part == "train" and instance.label_noise:
        labels = add_label_noise(labels, instance.label_noise, suite.classes, fresh)
    return LabelledArrays(inputs, labels)


def _draw_shape(kind: str, rng: np.random.Generator) -> Shape:
    classes = int(rng.integers(2, 9))
    match kind:
        case "mlp":
            return Shape(classes, 1, int(rng.integers(6, 25)))
        case "tokens":
            return Shape(classes, int(rng.integers(6, 13)), int(rng.integers(4, 9)))
        case "signals":
            return Shape(classes, 40, 1)
        case "images":
            return Shape(classes, 8, 1)
        case _:
            symbols = int(rng.integers(4, 9))
            return Shape(symbols, int(rng.integers(6, 13)), symbols)


def _input_shape(kind: str, shape: Shape) -> tuple[int, ...]:
    match kind:
        case "mlp":
            return (shape.channels,)
        case "signals":
            return (1, shape.positions)
        case "images":
            return (1, shape.positions, shape.positions)
        case _:
            return (shape.positions, shape.channels)


def _draw_build(kind: str, shape: Shape, rng: np.random.Generator) -> Build:
    deepest = {"mlp": 8, "tokens": 8, "signals": 5, "images": 4, "language": 3}[kind]
    depth = int(rng.integers(2, deepest + 1))
    widths = np.full(depth, rng.integers(6, 13)) if kind == "language" else rng.integers(3, 11, size=depth)
    activation = str(rng.choice(list(ACTIVATIONS), p=[0.5, 0.2, 0.2, 0.1]))
    return Build(kind, shape, tuple(widths.tolist()), activation, int(rng.choice([3, 5])))
