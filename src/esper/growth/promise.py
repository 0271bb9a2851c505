"""Promise: how much a module that does not exist yet could help, from one backward pass.

Let h be the features at some place of a network and g_i = dL_i/dh_i the *functional gradient* of example i. Put a
newborn module s with parameters theta there. To first order, its output changes by (ds/dtheta) dtheta, so the example's
loss changes by G_i dtheta with the per-example gradient G_i = d<g_i, s(h_i)>/dtheta. With all N examples as rows of
G [N, P] and K = G G^T [N, N]

    promise = 1^T K (K + lambda I)^-1 1 / N, in [0, 1)

is the fraction of a uniform decrease of all losses that one natural-gradient step of the module achieves. It is
g^T F^-1 g with the empirical Fisher F = G^T G / N, the natural expansion score of Mitchell et al. (2023,
"Self-Expanding Neural Networks", arXiv 2307.04526, eq. 5), written with K in place of F (the push-through identity).
Equivalently, it is a ridge regression of the constant target "every example's loss falls by one" on the per-example
gradients. It is zero if no direction of theta helps, and near one if one step could help all examples equally. It does
not depend on scale: the ridge lambda is a fraction of the mean of K's diagonal, so losses and features may be
multiplied by constants.

If P > N, any N generic rows can be fitted, even noise. `compute_held_out_promise` fits dtheta on one half of the
examples and applies it to the other half, where noise cannot raise it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from esper.config.settings import Settings
from esper.growth.blueprints.registry import Context, LayerCall, get
from esper.growth.slot import Slot
from esper.numerics.arrays import Bools, Floats, Ints
from esper.serialization import from_plain, to_plain


class PromiseSettings(Settings):
    """How often promises of all blueprints in all slots are measured, and which values controllers observe."""

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
        """Whether networks are measured after ``decisions`` ``[E]`` decisions: bool ``[E]``."""
        since_first = decisions - self.first
        return (since_first >= 0) & (since_first % self.every == 0)


@dataclass(frozen=True)
class Promises:
    """What blueprints promise; NaN where a blueprint does not fit a slot, or the slot was not measured."""

    fitted: Floats
    """``[E, S, K]``."""
    held_out: Floats
    """``[E, S, K]``: mean over both halves."""
    missing: Bools
    """``[E]``: networks of which too little is known to measure anything; they stay due."""


class PromiseRecord:
    """The newest promises ``[E, S, K]`` of E networks with S slots and K blueprints; NaN where none was measured."""

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
        """Reset the networks ``rows``, bool ``[E]``."""
        self.fitted[rows] = self.held_out[rows] = np.nan
        self.age[rows] = np.inf
        self.change[rows] = 0

    def advance_age(self, rows: Bools) -> None:
        """Count a decision of the networks ``rows``, bool ``[E]``."""
        self.age = self.age + rows

    def record(self, rows: Bools, fitted: Floats, held_out: Floats) -> None:
        """Store the promises just measured, ``[E, S, K]`` each, of the networks ``rows``, bool ``[E]``."""
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
        figures = self.fitted if self.settings.shown == "fitted" else self.held_out
        return find_largest(figures, (1, 2))

    def state_dict(self) -> dict[str, Any]:
        """All attributes but the settings, as plain values."""
        return to_plain(self._arrays)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        vars(self).update(from_plain(self._arrays, state, "promises"))

    @property
    def _arrays(self) -> dict[str, Floats]:
        return {name: value for name, value in vars(self).items() if name != "settings"}


def find_largest(figures: Floats, axes: int | tuple[int, ...]) -> Floats:
    """The largest of the measured figures over ``axes``; 0 where none was measured."""
    maximum = np.where(np.isnan(figures), -np.inf, figures).max(axes)
    return np.where(np.isfinite(maximum), maximum, 0.0)


RIDGE = 0.1
"""Lambda as a fraction of the mean of K's diagonal. Ridges from 0.03 to 1 rank candidates similarly."""
GRAM_BYTES = 2**29
"""Memory for per-example gradients, in bytes. If all gradients together are larger, blocks of them are recomputed."""
_EXAMPLES_AT_ONCE = 32
"""Number of examples that are differentiated side by side."""


def compute_promise(gram: Tensor) -> Tensor:
    """The promise in [0, 1) from a Gram matrix of per-example gradients.

    Args:
        gram: ``[..., N, N]``, K in the formula above.

    Returns:
        ``[...]``; 0 where all gradients are zero, NaN where one is not finite.
    """
    scaled = _scale_gram(gram)
    return _apply_weights(scaled, _fit_weights(scaled))


def compute_held_out_promise(gram: Tensor) -> Tensor:
    """The promise on each half of the examples (first and second in order) of the step fitted on the other half.

    Args:
        gram: ``[..., N, N]``, N at least 2.

    Returns:
        ``[..., 2]``, at most about 1; negative where the step is harmful.
    """
    scaled, half = _scale_gram(gram), gram.shape[-1] // 2
    first, second = slice(None, half), slice(half, None)
    return torch.stack(
        [
            _apply_weights(scaled[..., held_out, fitted], _fit_weights(scaled[..., fitted, fitted]))
            for held_out, fitted in ((first, second), (second, first))
        ],
        dim=-1,
    )


def _scale_gram(gram: Tensor) -> Tensor:
    """Scale a Gram matrix to a mean diagonal of one; zeros stay zeros."""
    mean = gram.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    return torch.where(mean != 0, gram / mean, 0)


def _fit_weights(gram: Tensor) -> Tensor:
    """``(K + lambda I)^-1 1 [..., N, 1]``: the weights of the examples in their common step."""
    # The ridge is a fraction of this block's own diagonal, because gradients of the other half may be larger.
    mean = gram.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    damping = torch.where(mean != 0, RIDGE * mean, 1) * torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    target = gram.new_ones(*gram.shape[:-1], 1)
    # `_ex` does not raise: one network of many may have diverged.
    weights = cast(tuple[Tensor, Tensor], torch.linalg.solve_ex(gram + damping, target))[0]
    return torch.where(gram.isfinite().all(-1).all(-1)[..., None, None], weights, torch.nan)


def _apply_weights(gram: Tensor, weights: Tensor) -> Tensor:
    """``[...]``: the mean decrease of the losses of M examples, from ``[..., M, N]`` and the weights of N examples."""
    return (gram @ weights).squeeze(-1).mean(-1)


class PromiseEstimate(NamedTuple):
    """The promise of one candidate, or of each of many."""

    fitted: Tensor
    """``[...]``, as `compute_promise`."""
    held_out: Tensor
    """``[..., 2]``, as `compute_held_out_promise`."""


def compute_promise_from_gradients(gradients: Tensor) -> PromiseEstimate:
    """Both kinds of promise from the per-example gradients themselves, G ``[..., N, P]``, N at least 2."""
    # Fit a step on all examples, and on each half to be applied to the other.
    half = gradients.shape[-2] // 2
    halves = gradients[..., :half, :], gradients[..., half:, :]
    first, second = map(_fit_step, halves)
    held_out = torch.stack([_apply_step(halves[0], second), _apply_step(halves[1], first)], -1)
    return PromiseEstimate(_apply_step(gradients, _fit_step(gradients)), held_out)


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
    # `_ex` does not raise: one network of many may have diverged.
    factor = cast(tuple[Tensor, Tensor], torch.linalg.cholesky_ex(product))[0]
    solution = torch.cholesky_solve(target.unsqueeze(-1), factor)
    return (gradients * solution).sum(-2) if by_example else solution.squeeze(-1)


def _apply_step(gradients: Tensor, step: Tensor) -> Tensor:
    """``[...]``: the mean decrease of the losses of examples ``[..., n, P]`` by a step ``[..., P]``."""
    return (gradients.mean(-2) * step).sum(-1)


class GradientBatch(NamedTuple):
    """Inputs of a module, and the gradients of the losses with respect to its output."""

    inputs: tuple[Tensor, ...]
    """The module's arguments, each ``[B, ...]``."""
    gradients: Tensor
    """Functional gradients ``[B, ...]``, shaped as the module's output."""


class RecordedCall(NamedTuple):
    """Some examples of a forward pass at one slot, and the gradients of their losses there."""

    features: Tensor
    """Features of the slot, ``[B, ...]``."""
    gradients: Tensor
    """Gradient of each example's own loss with respect to the features, ``[B, ...]``, up to one factor for all; the
    features themselves until the backward pass brings it."""
    contexts: dict[Context, Tensor]
    """Second arguments of blueprints, ``[B, ...]`` each, as far as they are available."""

    def map(self, change: Callable[[Tensor], Tensor]) -> RecordedCall:
        """The recorded call with its tensors changed."""
        contexts = {context: change(tensor) for context, tensor in self.contexts.items()}
        return RecordedCall(change(self.features), change(self.gradients), contexts)


def record_call(slot: Slot, call: LayerCall, features: Tensor, limit: int | None = None) -> RecordedCall:
    """A call of the layer before ``slot``, which gave ``features``; with a ``limit``, copies of so many examples."""

    def keep(tensor: Tensor) -> Tensor:
        return tensor.detach() if limit is None else tensor.detach()[:limit].clone()

    # What blueprints here read, where it is of the same examples: part of the host may be called alone.
    read, values = {get(name).context for name in slot.blueprints}, keep(features)
    contexts: dict[Context, Tensor | None] = {
        Context.NETWORK: slot.input_hook.inputs,
        Context.LAYER: call.first_argument,
        Context.HIDDEN: None if slot.source is None else slot.source.inputs,
    }
    kept = {
        context: keep(tensor)
        for context, tensor in contexts.items()
        if context in read and tensor is not None and len(tensor) == len(features)
    }
    kept[Context.NOTHING] = values
    if call.has_single_argument:
        kept[Context.CALL] = values
    return RecordedCall(values, values, kept)


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
        GradientBatch(
            tuple(argument[start : start + part_size] for argument in inputs), gradients[start : start + part_size]
        )
        for inputs, gradients in batches
        for start in range(0, len(gradients), part_size)
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
    # Differentiated by some parameters only, example by example.
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
    """The gradient of ``<gradient, module(inputs)>`` of one example with respect to ``moving``.

    Args:
        module: The module, used only for its structure and buffers.
        moving: Parameters by name.
        fixed: The other parameters; buffers that are not in it are the module's own.
        inputs: The module's arguments, without a batch axis.
        gradient: The functional gradient, shaped as the output.
    """

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
    for inputs, functional_gradients in batches:
        with torch.enable_grad():
            output = functional_call(module, parameters, inputs)
            gradients = torch.autograd.grad(
                output, list(parameters.values()), functional_gradients, materialize_grads=True
            )
        for name, gradient in zip(parameters, gradients, strict=True):
            totals[name] += gradient.abs()
    return [name for name, total in totals.items() if bool(total.any())]
