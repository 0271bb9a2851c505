"""Promise: how much a module that does not exist yet could help, from one backward pass.

Let h be the features at some place of a network and g_i = dL_i/dh_i the *functional gradient* of example i. Put a
newborn module s with parameters theta there. To first order, example i's loss then changes by G_i dtheta, with the
per-example gradient G_i = d<g_i, s(h_i)>/dtheta. With all N examples as rows of G [N, P] and K = G G^T [N, N]

    promise = 1^T K (K + lambda I)^-1 1 / N, in [0, 1)

is the fraction of a uniform decrease of all losses that one natural-gradient step of the module achieves: g^T F^-1 g
with the empirical Fisher F = G^T G / N, the natural expansion score of Mitchell et al. (2023, "Self-Expanding Neural
Networks", arXiv 2307.04526, eq. 5), with K in place of F (the push-through identity): a ridge regression of the
constant target "every example's loss falls by one" on the per-example gradients. It is zero if no direction of theta
helps, and near one if one step could help all examples equally. The ridge lambda is a fraction of the mean of K's
diagonal, so losses and features may be multiplied by constants.

If P > N, any N generic rows can be fitted, even noise. So the *held-out* promise fits dtheta on one half of the
examples and applies it to the other half, where noise cannot raise it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from esper.config.settings import Settings
from esper.errors import LookError
from esper.growth.blueprints.registry import Blueprint, Context, LayerCall, get
from esper.growth.slot import Slot
from esper.numerics.arrays import Bools, Floats, Ints
from esper.numerics.random_streams import module_generator
from esper.serialization import from_plain, to_plain

RIDGE = 0.1
"""Lambda as a fraction of the mean of K's diagonal. Ridges from 0.03 to 1 rank candidates similarly."""
GRAM_BYTES = 2**29
"""Memory for per-example gradients. If all gradients together are larger, blocks of them are recomputed."""
_EXAMPLES_AT_ONCE = 32
"""Number of examples that are differentiated side by side."""


class PromiseEstimate(NamedTuple):
    """The promise of one candidate, or of each of many."""

    fitted: Tensor
    """``[...]``, in [0, 1): 0 where all gradients are zero, NaN where one is not finite."""
    held_out: Tensor
    """``[..., 2]``: on each half of the examples (first and second in order), of the step fitted on the other half. At
    most about 1; negative where the step is harmful."""


def compute_promise(gram: Tensor) -> PromiseEstimate:
    """The promise from Gram matrices K ``[..., N, N]``, N at least 2."""
    # Scaled to a mean diagonal of one; zeros stay zeros.
    mean = gram.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    scaled = torch.where(mean != 0, gram / mean, 0)
    half = gram.shape[-1] // 2
    every, first, second = slice(None), slice(None, half), slice(half, None)
    fitted, *held_out = (
        (scaled[..., measured, used] @ _fit_weights(scaled[..., used, used])).squeeze(-1).mean(-1)
        for measured, used in ((every, every), (first, second), (second, first))
    )
    return PromiseEstimate(fitted, torch.stack(held_out, -1))


def _fit_weights(gram: Tensor) -> Tensor:
    """``(K + lambda I)^-1 1 [..., N, 1]``: the weights of the examples in their common step."""
    # The ridge is a fraction of this block's own diagonal, because gradients of the other half may be larger.
    mean = gram.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    damping = torch.where(mean != 0, RIDGE * mean, 1) * torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    target = gram.new_ones(*gram.shape[:-1], 1)
    # `_ex` does not raise: one network of many may have diverged.
    weights = cast(tuple[Tensor, Tensor], torch.linalg.solve_ex(gram + damping, target))[0]
    return torch.where(gram.isfinite().all(-1).all(-1)[..., None, None], weights, torch.nan)


def compute_promise_from_gradients(gradients: Tensor) -> PromiseEstimate:
    """`compute_promise` from the gradients G ``[..., N, P]``, which is faster for many modules of few parameters."""
    half = gradients.shape[-2] // 2
    first, second = gradients[..., :half, :], gradients[..., half:, :]
    fitted, *held_out = (
        (measured.mean(-2) * _fit_step(used)).sum(-1)
        for measured, used in ((gradients, gradients), (first, second), (second, first))
    )
    return PromiseEstimate(fitted, torch.stack(held_out, -1))


def _fit_step(gradients: Tensor) -> Tensor:
    """The step ``[..., P]`` that fits the examples ``[..., n, P]``; NaN where their squares are not finite.

    ``G^T (G G^T + lambda I)^-1 1 = (G^T G + lambda I)^-1 G^T 1``: the smaller of both systems is solved.
    """
    examples, parameters = gradients.shape[-2:]
    by_example = parameters >= examples
    product = gradients @ gradients.mT if by_example else gradients.mT @ gradients
    target = gradients.new_ones(gradients.shape[:-1]) if by_example else gradients.sum(-2)
    diagonal = product.diagonal(dim1=-2, dim2=-1)
    mean = diagonal.sum(-1, keepdim=True) / examples  # both products have the same trace
    diagonal.add_(torch.where(mean != 0, RIDGE * mean, 1))
    factor = cast(tuple[Tensor, Tensor], torch.linalg.cholesky_ex(product))[0]
    solution = torch.cholesky_solve(target.unsqueeze(-1), factor)
    return (gradients * solution).sum(-2) if by_example else solution.squeeze(-1)


# Gradients example by example ----------------------------------------------------------------------------------------


class GradientBatch(NamedTuple):
    """Some examples of a call of a module or slot, ``[B, ...]`` each."""

    inputs: tuple[Tensor, ...]
    """Arguments of the module, or the features of the slot."""
    gradients: Tensor
    """Functional gradients, up to one factor for all; the module's output until the backward pass brings them."""
    contexts: Mapping[Context, Tensor] = {}
    """Of a slot, the second arguments of blueprints, ``[B, ...]`` each, as far as they are available."""

    def map(self, change: Callable[[Tensor], Tensor]) -> GradientBatch:
        contexts = {context: change(tensor) for context, tensor in self.contexts.items()}
        return GradientBatch(tuple(change(tensor) for tensor in self.inputs), change(self.gradients), contexts)


def record_call(slot: Slot, call: LayerCall, features: Tensor, limit: int | None = None) -> GradientBatch:
    """A call of the layer before ``slot``, which gave ``features``; with a ``limit``, copies of so many examples."""

    def keep(tensor: Tensor) -> Tensor:
        return tensor.detach() if limit is None else tensor.detach()[:limit].clone()

    # What blueprints here read, where it is of the same examples: part of the host may be called alone.
    values = keep(features)
    kept = {Context.NOTHING: values}
    if call.has_single_argument:
        kept[Context.CALL] = values
    for context in {get(name).context for name in slot.blueprints} - {Context.NOTHING, Context.CALL}:
        inputs = slot.find_inputs(context, call, features)
        if inputs is not None and len(inputs) == len(features):
            kept[context] = keep(inputs)
    return GradientBatch((values,), values, kept)


class _FeaturesOnlyCall(nn.Module):
    """A blueprint with `Context.CALL`, for a layer that is called with only its features."""

    def __init__(self, newborn: nn.Module) -> None:
        super().__init__()
        self.newborn = newborn

    def forward(self, features: Tensor, _: Tensor) -> Tensor:
        contribution: Tensor = self.newborn(features, LayerCall((features,), {}))
        return contribution


def measure_promise(
    slot: Slot, kind: type[Blueprint], batches: Sequence[GradientBatch], draws: Sequence[tuple[int, int, int]]
) -> tuple[float, float, float]:
    """Promise, held-out promise and its standard error of a blueprint in a slot, without autocast.

    They are means over initial values that are drawn from the random streams ``draws``.
    """
    if any(kind.context not in batch.contexts for batch in batches):
        reason = "the layer there takes more arguments than its features"
        if kind.context is Context.NETWORK:
            reason = "the network's input was not recorded"
        raise LookError(
            f"the promise of blueprint {kind.name!r} in slot {slot.name!r} cannot be measured, because {reason}: "
            "remove the blueprint, or use a controller without promises"
        )
    batches = [GradientBatch((*inputs, contexts[kind.context]), gradients) for inputs, gradients, contexts in batches]
    # One Gram matrix per draw of the initial values.
    like = raise_precision(batches[0].gradients)
    grams: list[Tensor] = []
    first_values: list[Tensor] = []
    for draw in draws:
        newborn: nn.Module = kind(slot.site, module_generator(*draw)).to(like.device, like.dtype).eval()
        newborn = _FeaturesOnlyCall(newborn) if kind.context is Context.CALL else newborn
        values = [parameter.detach() for parameter in newborn.parameters()]
        if grams and all(map(torch.equal, values, first_values)):
            break  # the initial values are not random
        first_values = first_values or values
        grams.append(measure_gram(f"blueprint {kind.name!r}", newborn, batches, "offer others"))
    return summarise_grams(grams)


def measure_gram(what: str, module: nn.Module, batches: Sequence[GradientBatch], remedy: str) -> Tensor:
    """`compute_gram_matrix` in at least single precision; a LookError if ``module`` does not work under ``vmap``."""
    try:
        return compute_gram_matrix(module, [batch.map(raise_precision) for batch in batches])
    except RuntimeError as error:
        reason = str(error).strip().partition("\n")[0]
        raise LookError(f"{what} cannot be differentiated example by example ({reason}): {remedy}") from error


def summarise_grams(grams: Sequence[Tensor]) -> tuple[float, float, float]:
    """Promise, held-out promise and its standard error, from a Gram matrix per draw of the initial values."""
    promise = compute_promise(torch.stack([*grams]).detach())
    # Each half of each draw is a sample of the held-out promise.
    samples = promise.held_out.flatten()
    return float(promise.fitted.mean()), float(samples.mean()), float(samples.std() / samples.numel() ** 0.5)


def raise_precision(values: Tensor) -> Tensor:
    """Half precision as float32, which a Gram matrix needs; other types as they are."""
    return values.float() if values.is_floating_point() and values.dtype.itemsize < torch.float32.itemsize else values


def compute_gram_matrix(module: nn.Module, batches: Sequence[GradientBatch]) -> Tensor:
    """K ``[N, N]`` of all examples of ``batches``, whose shapes may differ, for a module that works under ``vmap``.

    At most `GRAM_BYTES` of gradients are in memory at a time, but at least those of two examples.
    """
    like = batches[0].gradients
    count = sum(len(batch.gradients) for batch in batches)
    names = find_parameters_with_gradient(module, batches)
    if not names:
        return like.new_zeros(count, count)
    # Cut the batches so that the gradients of two parts, or of all of them, fit into memory.
    size = sum(parameter.numel() for name, parameter in module.named_parameters() if name in names)
    limit = max(1, GRAM_BYTES // (size * like.element_size()))
    part_size = limit if limit >= count else max(1, limit // 2)
    parts = [
        batch.map(itemgetter(slice(start, start + part_size)))
        for batch in batches
        for start in range(0, len(batch.gradients), part_size)
    ]
    if limit >= count:
        rows = torch.cat([compute_example_gradients(module, names, part) for part in parts])
        return rows @ rows.mT
    # Fill the matrix block by block.
    ends = list(itertools.accumulate(len(part.gradients) for part in parts))
    blocks = [slice(end - len(part.gradients), end) for end, part in zip(ends, parts, strict=True)]
    gram = like.new_empty(count, count)
    for number, block in enumerate(blocks):
        rows = compute_example_gradients(module, names, parts[number])
        gram[block, block] = rows @ rows.mT
        for earlier, other in enumerate(blocks[:number]):
            product = rows @ compute_example_gradients(module, names, parts[earlier]).mT
            gram[block, other], gram[other, block] = product, product.mT
    return gram


def compute_example_gradients(module: nn.Module, names: Sequence[str], batch: GradientBatch) -> Tensor:
    """G ``[B, P]``: gradients of ``<g_i, module(input_i)>`` by the parameters ``names``, side by side."""
    fixed = {name: parameter.detach() for name, parameter in module.named_parameters()}
    moving = {name: fixed.pop(name) for name in names}
    with sdpa_kernel(SDPBackend.MATH):  # vmap would go through fused attention example by example
        gradients = vmap(
            partial(differentiate_output, module), in_dims=(None, None, 0, 0), chunk_size=_EXAMPLES_AT_ONCE
        )(moving, fixed, batch.inputs, batch.gradients)
    return torch.cat([gradient.flatten(1) for gradient in gradients.values()], dim=1)


def differentiate_output(
    module: nn.Module,
    moving: Mapping[str, Tensor],
    fixed: Mapping[str, Tensor],
    inputs: tuple[Tensor, ...],
    gradient: Tensor,
) -> dict[str, Tensor]:
    """The gradient of ``<gradient, module(inputs)>`` of one example, without a batch axis, by parameters ``moving``."""

    def compute_output(moving: Mapping[str, Tensor]) -> Tensor:
        output: Tensor = functional_call(
            module, {**fixed, **moving}, tuple(argument.unsqueeze(0) for argument in inputs)
        )
        return output.squeeze(0)

    # Not the gradient of a product, which would need three more passes over all outputs.
    _, pull_back = cast(
        "tuple[Tensor, Callable[[Tensor], tuple[dict[str, Tensor]]]]", vjp(compute_output, dict(moving))
    )
    return pull_back(gradient)[0]


def find_parameters_with_gradient(module: nn.Module, batches: Iterable[GradientBatch]) -> list[str]:
    """Names of the parameters that get a gradient: at birth, those before a last layer of zeros have none."""
    # Sum of absolute gradients over all batches; only zero stays zero.
    parameters = {name: parameter.detach().requires_grad_() for name, parameter in module.named_parameters()}
    totals = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
    for batch in batches:
        with torch.enable_grad():
            output = functional_call(module, parameters, batch.inputs)
            gradients = torch.autograd.grad(output, [*parameters.values()], batch.gradients, materialize_grads=True)
        for name, gradient in zip(parameters, gradients, strict=True):
            totals[name] += gradient.abs()
    return [name for name, total in totals.items() if bool(total.any())]


# What controllers observe --------------------------------------------------------------------------------------------


class PromiseSettings(Settings):
    """How often promises of all blueprints in all slots are measured, and which of them controllers observe."""

    every: int = Field(default=8, ge=1, le=1000)
    """Decisions between measurements. In between the last one is used, and controllers observe its age."""
    first: int = Field(default=2, ge=1, le=1000)
    """Decisions before the first measurement, since for an untrained network every blueprint looks promising."""
    examples: int = Field(default=128, ge=2, le=100_000)
    """Maximum number of training examples per measurement: the newest since the last decision. The held-out promise is
    fitted on half of them."""
    shown: Literal["both", "fitted", "held_out"] = "both"
    """Which of the two promises controllers observe; the other one reads 0."""

    def is_due(self, decisions: Ints) -> Bools:
        """Whether networks are measured after ``decisions [E]``."""
        since_first = decisions - self.first
        return (since_first >= 0) & (since_first % self.every == 0)


@dataclass(frozen=True)
class Promises:
    """What K blueprints promise in S slots of E networks; NaN where one does not fit, or was not measured."""

    fitted: Floats
    """``[E, S, K]``."""
    held_out: Floats
    """``[E, S, K]``: mean over both halves."""
    missing: Bools
    """``[E]``: networks of which too little is known to measure anything; they stay due."""


class PromiseRecord:
    """The newest promises ``[E, S, K]`` of E networks; NaN where none was measured."""

    def __init__(self, environments: int, slots: int, blueprints: int, settings: PromiseSettings) -> None:
        self.settings = settings
        shape = environments, slots, blueprints
        self.fitted: Floats = np.full(shape, np.nan)
        self.held_out: Floats = np.full(shape, np.nan)
        self.age: Floats = np.full(environments, np.inf)
        """Decisions since the last measurement, ``[E]``."""
        self.change: Floats = np.zeros(environments)
        """Change of `best` from the measurement before to the last one, ``[E]``."""

    def restart(self, rows: Bools) -> None:
        """Reset the networks ``rows [E]``."""
        self.fitted[rows] = self.held_out[rows] = np.nan
        self.age[rows] = np.inf
        self.change[rows] = 0

    def advance_age(self, rows: Bools) -> None:
        """Count a decision of the networks ``rows [E]``."""
        self.age = self.age + rows

    def record(self, rows: Bools, fitted: Floats, held_out: Floats) -> None:
        """Store the promises ``[E, S, K]`` just measured of the networks ``rows [E]``."""
        # The change of the best promise is only defined from the second measurement on.
        measured_before = np.isfinite(self.age) & rows
        before = self.best
        # A figure that controllers must not see is stored as 0.
        shown = self.settings.shown
        self.fitted[rows] = np.where(np.isnan(fitted[rows]) | (shown != "held_out"), fitted[rows], 0.0)
        self.held_out[rows] = np.where(np.isnan(held_out[rows]) | (shown != "fitted"), held_out[rows], 0.0)
        self.age = np.where(rows, 0.0, self.age)
        self.change = np.where(measured_before, self.best - before, np.where(rows, 0.0, self.change))

    @property
    def best(self) -> Floats:
        """The largest promise of each network, ``[E]``: held out, unless that is hidden."""
        return find_largest(self.fitted if self.settings.shown == "fitted" else self.held_out, (1, 2))

    def state_dict(self) -> dict[str, Any]:
        return to_plain(self._arrays)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(from_plain(self._arrays, state, "promises"))

    @property
    def _arrays(self) -> dict[str, Floats]:
        return {name: value for name, value in vars(self).items() if name != "settings"}


def find_largest(figures: Floats, axes: int | tuple[int, ...]) -> Floats:
    """The largest of the measured figures over ``axes``; 0 where none was measured."""
    maximum = np.where(np.isnan(figures), -np.inf, figures).max(axes)
    return np.where(np.isfinite(maximum), maximum, 0.0)
