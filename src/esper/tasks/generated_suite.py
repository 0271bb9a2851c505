"""Randomly generated suites: each number gives a suite with its own host, blueprints, horizon, optimizer and prices.

A controller that trains on them hardly ever meets the same suite twice. `GeneratedSuite` generates them.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper.numerics.modules import Conv1d, Linear, Stackable, TokenLinear, initialise
from esper.numerics.random_streams import child_generator
from esper.tasks.generated_problems import PROBLEMS, Draw, Shape
from esper.tasks.instance import PARTS, Instance, LabelledArrays, Part, add_label_noise
from esper.tasks.registry import GENERATED, SHORTEST
from esper.tasks.suite import OptimizerSettings, SampledSuite, draw_log_uniform, find_by_name

ACTIVATIONS: Mapping[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "gelu": nn.GELU,
    "none": nn.Identity,
}


@dataclass(frozen=True)
class HostPlan:
    """The architecture of a generated suite's host."""

    kind: str
    shape: Shape
    widths: tuple[int, ...]
    """Number of channels of each block."""
    activation: str
    kernel: int
    """Kernel size of the convolutions on signals."""


class Chain(nn.Module):
    """Blocks in sequence, a mean over the axes ``mean_over`` (None takes the last token), and a head."""

    def __init__(self, blocks: list[nn.Module], mean_over: tuple[int, ...] | None, head: nn.Module) -> None:
        super().__init__()
        self.depth = len(blocks)
        for index, block in enumerate(blocks):
            self.add_module(f"block{index}", block)
        self.mean_over = mean_over
        self.head = head

    def forward(self, inputs: Tensor) -> Tensor:
        """Inputs ``[B, ...]`` to logits ``[B, classes]``."""
        for index in range(self.depth):
            inputs = self.get_submodule(f"block{index}")(inputs)
        if self.mean_over is None:
            inputs = inputs[..., -1, :]
        elif self.mean_over:
            inputs = inputs.mean(self.mean_over)
        return self.head(inputs)


class StackableChain(Chain, Stackable):
    """A chain whose blocks, reduction and head all work on the last axes."""


class Conv2d(nn.Conv2d):
    """A 3 x 3 convolution on images ``[B, C, H, W]``, padded by one pixel."""

    def __init__(self, inputs: int, outputs: int, stride: int, generator: torch.Generator) -> None:
        super().__init__(inputs, outputs, 3, stride=stride, padding=1, device="meta")
        initialise(self, generator)


class CausalBlock(Stackable):
    """A pre-norm transformer block with one causal head: tokens ``[..., B, T, C]`` to tokens of the same shape.

    The first block of a host embeds tokens of ``inputs`` features in C channels, with a learned vector per position.
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
        """Tokens ``[..., B, T, inputs]`` to ``[..., B, T, C]``."""
        tokens = self.embed(tokens)
        if self.position is not None:
            tokens = tokens + self.position.unsqueeze(-3)
        query, key, value = self.project(_normalise(tokens)).chunk(3, -1)
        scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
        # A token attends only to itself and earlier ones.
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        tokens = tokens + self.merge(F.softmax(scores.masked_fill(later, -torch.inf), -1) @ value)
        return tokens + self.own(_normalise(tokens))


def _normalise(tokens: Tensor) -> Tensor:
    """Normalise each token over its channels, without learned parameters."""
    return F.layer_norm(tokens, tokens.shape[-1:])


def build_host(plan: HostPlan, generator: torch.Generator) -> Chain:
    """The host of a plan, initialised from ``generator``."""
    shape, activation = plan.shape, ACTIVATIONS[plan.activation]
    head = Linear(plan.widths[-1], shape.classes, generator)
    inputs = (1 if plan.kind in ("signals", "images") else shape.channels, *plan.widths[:-1])
    blocks: list[nn.Module] = []
    for index, (width_in, width_out) in enumerate(zip(inputs, plan.widths, strict=True)):
        match plan.kind:
            case "mlp":
                layer = Linear(width_in, width_out, generator)
            case "tokens":
                layer = TokenLinear(width_in, width_out, generator)
            case "signals":
                layer = Conv1d(width_in, width_out, plan.kernel, 2 if index < 2 else 1, generator)
            case "images":
                layer = Conv2d(width_in, width_out, 2 if index == 0 else 1, generator)
            case _:
                positions = 0 if index else shape.positions
                blocks.append(CausalBlock(width_in, width_out, positions, plan.activation, generator))
                continue
        blocks.append(nn.Sequential(layer, activation()))
    # Conv2d computes one network at a time; all other layers can compute a stack of networks.
    return (Chain if plan.kind == "images" else StackableChain)(blocks, _MEAN_OVER[plan.kind], head)


_MEAN_OVER: Mapping[str, tuple[int, ...] | None] = {
    "mlp": (),
    "tokens": (-2,),
    "signals": (-1,),
    "images": (-2, -1),
    "language": None,
}
"""Axes of positions, by the kind of host."""
_ON_FEATURES = ("norm", "lowrank", "mlp", "mlp_wide", "gate", "input_skip")
_ON_SIGNALS = ("norm", "conv1x1", "depthwise", "conv3x3", "bottleneck", "squeeze_excite", "gate")
_BLUEPRINTS: Mapping[str, tuple[str, ...]] = {
    "mlp": _ON_FEATURES,
    "tokens": (*_ON_FEATURES, "lowrank_8", "attention", "token_conv", "token_mix"),
    "signals": _ON_SIGNALS,
    "images": _ON_SIGNALS,
    "language": ("norm", "lowrank", "mlp", "mlp_wide", "lowrank_8", "attention", "input_skip"),
}
"""Blueprints that fit the sites of each kind of host."""
_VARIANTS = ("clean", "noisy", "drifting")
_FREE = 0.15
"""Fraction of the instances on which growth costs nothing."""
_CAPPED = 0.25
"""Fraction of the suites with a parameter cap."""
_BY_LOSS = 0.2
"""Fraction of the suites whose objective is the loss."""
_FIXED, _FRESH, _RECIPE, _OBJECTIVE = range(4)
"""Keys of random streams."""


class GeneratedSuite(SampledSuite):
    """The generated suite of a number, which is at least 0. Its families are the problems for one kind of host."""

    validation_size = 128
    test_size = 384
    transfer_families = ()

    def __init__(self, number: int) -> None:
        # Another order of the draws would give another suite for the same number.
        rng = child_generator(number, _RECIPE)
        self.name = f"{GENERATED}:{number}"
        # The host, its problems and its blueprints.
        self.kind = str(rng.choice(list(PROBLEMS)))
        self.families = tuple(PROBLEMS[self.kind])
        blueprints = _BLUEPRINTS[self.kind]
        size = int(rng.integers(3, len(blueprints) + 1))
        self.blueprints = tuple(str(name) for name in rng.choice(blueprints, size, replace=False))
        # The length of episodes.
        self.steps = int(rng.integers(SHORTEST, 61))
        self.batches_per_step = int(rng.integers(4, 11))
        self.batch_size = int(rng.choice([16, 32, 48]))
        self.shape = shape = _draw_shape(self.kind, rng)
        self.classes = shape.classes
        by_kind = {"mlp": (shape.channels,), "signals": (1, shape.positions), "images": (1, *(shape.positions,) * 2)}
        self.input_shape = by_kind.get(self.kind, (shape.positions, shape.channels))
        self._plan = _draw_plan(self.kind, shape, rng)
        self.sites = tuple(f"block{index}" for index in range(len(self._plan.widths)))
        # The optimizer.
        adaptive = bool(rng.random() < 0.6)
        self.optimizer = OptimizerSettings(
            name="adamw" if adaptive else "sgd",
            weight_decay=float(rng.choice([0.0, 0.01])),
            clip_norm=1.0 if rng.random() < 0.3 else None,
        )
        # Budget and objective.
        if rng.random() < _CAPPED:
            self.parameter_cap = int(rng.uniform(0.2, 2.0) * sum(p.numel() for p in self.template().parameters()))
        self.objective = "loss" if child_generator(number, _OBJECTIVE).random() < _BY_LOSS else "accuracy"
        self._learning_rates = (0.002, 0.02) if adaptive else (0.01, 0.1)
        self._train_sizes = tuple(rng.choice([96, 192, 384, 768, 1536], 2, replace=False).tolist())

    def variants(self, family: str) -> tuple[str, ...]:
        """Names of the variants: unchanging data, noisy labels, or data that drift to another draw of the problem."""
        find_by_name(f"family of suite {self.name!r}", family, PROBLEMS[self.kind])
        return _VARIANTS

    def draw(self, family: str, variant: str, seed: int, rng: np.random.Generator) -> Instance:
        find_by_name(f"variant of family {family!r}", variant, dict.fromkeys(self.variants(family)))
        third = self.steps // 3
        return Instance(
            suite=self.name,
            family=family,
            variant=variant,
            seed=seed,
            widths=self._plan.widths,
            learning_rate=draw_log_uniform(*self._learning_rates, rng),
            train_size=int(rng.choice(self._train_sizes)),
            rent=0.0 if rng.random() < _FREE else draw_log_uniform(0.01, 0.2, rng),
            label_noise=rng.uniform(0.1, 0.4) if variant == "noisy" else 0.0,
            drift_step=int(rng.integers(third, 2 * third)) if variant == "drifting" else None,
        )

    def template(self) -> Chain:
        return build_host(self._plan, torch.Generator().manual_seed(0))

    def host(self, instance: Instance) -> Chain:
        self.check(instance)
        return build_host(self._plan, torch.Generator().manual_seed(instance.seed))

    def sample_part(self, instance: Instance, part: Part, phase: int) -> LabelledArrays:
        fixed = child_generator(instance.seed, phase, _FIXED)
        fresh = child_generator(instance.seed, phase, _FRESH, PARTS.index(part))
        draw = Draw(self.count_examples(instance, part), PARTS.index(part), fixed, fresh)
        inputs, labels = PROBLEMS[self.kind][instance.family](self.shape, draw)
        if part == "train" and instance.label_noise:
            labels = add_label_noise(labels, instance.label_noise, self.classes, fresh)
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


def _draw_plan(kind: str, shape: Shape, rng: np.random.Generator) -> HostPlan:
    # All blocks of a transformer have the same width, because they add to the same residual stream.
    deepest = {"mlp": 8, "tokens": 8, "signals": 5, "images": 4, "language": 3}[kind]
    depth = int(rng.integers(2, deepest + 1))
    widths = np.full(depth, rng.integers(6, 13)) if kind == "language" else rng.integers(3, 11, size=depth)
    activation = str(rng.choice(list(ACTIVATIONS), p=[0.5, 0.2, 0.2, 0.1]))
    return HostPlan(kind, shape, tuple(widths.tolist()), activation, int(rng.choice([3, 5])))
