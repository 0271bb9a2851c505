"""Promise: how much a module that does not exist yet could help, from one backward pass.

Let example i ask for a change of the features h at some place by its *functional gradient* g_i = dL_i/dh_i, and let a
newborn module s be put there, with parameters theta. To first order its output moves by (ds/dtheta) dtheta, so the
example's loss moves by G_i dtheta with the per-example gradient G_i = d<g_i, s(h_i)>/dtheta. With all N examples as
rows of G [N, P] and K = G G^T [N, N]

    promise = 1^T K (K + lambda I)^-1 1 / N, in [0, 1)

is the share of what the examples ask for that one natural-gradient step of the module can grant: g^T F^-1 g with the
empirical Fisher F = G^T G / N, the natural expansion score of Mitchell et al. (2023, "Self-Expanding Neural Networks",
arXiv 2307.04526, eq. 5), written with K in place of F (the push-through identity) as a ridge regression of the
constant wish "every example's loss falls by one" on what the module can do. It is zero where no direction of theta
helps, and near one where one step could help every example alike. It is free of scale: the ridge lambda is a share of
the mean of K's diagonal, so losses and features may be multiplied by constants.

Any N generic rows can be fitted if P > N, noise too. `compute_held_out_promise` fits dtheta on one half of the examples and
applies it to the other: what is granted there was learned, and noise cannot raise it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

RIDGE = 0.1
"""Lambda as a share of the mean of K's diagonal. Ridges from .03 to 1 rank candidates much alike."""
GRAM_BYTES = 2**29
"""Per-example gradients held at a time; where all examples' are larger, those of halves are computed anew."""
_EXAMPLES_AT_ONCE = 32
"""Examples that are differentiated side by side."""


def promise(gram: Tensor) -> Tensor:
    """The share of the examples' wish that one step grants, in [0, 1).

    Args:
        gram: ``[..., N, N]``, the inner products of per-example gradients.

    Returns:
        ``[...]``; 0 where all gradients are zero, NaN where one is not finite.
    """
    scaled = _scale(gram)
    return _apply(scaled, _fit(scaled))


def compute_held_out_promise(gram: Tensor) -> Tensor:
    """The same for each half of the examples (first and second in order), with the step that the other half asks for.

    Args:
        gram: ``[..., N, N]``, N at least 2.

    Returns:
        ``[..., 2]``, at most about 1; negative where the step does harm.
    """
    scaled, half = _scale(gram), gram.shape[-1] // 2
    first, second = slice(None, half), slice(half, None)
    return torch.stack(
        [
            _apply(scaled[..., judged, fitted], _fit(scaled[..., fitted, fitted]))
            for judged, fitted in ((first, second), (second, first))
        ],
        dim=-1,
    )


def _scale(gram: Tensor) -> Tensor:
    """Scale a Gram matrix to a mean diagonal of one; zeros stay zeros."""
    mean = gram.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    return torch.where(mean != 0, gram / mean, 0)


def _fit(gram: Tensor) -> Tensor:
    """``(K + lambda I)^-1 1 [..., N, 1]``: the weights of examples in the step that they ask for together."""
    # As a share of this part's own diagonal: the other half may be asked for by larger gradients.
    mean = gram.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    damping = torch.where(mean != 0, RIDGE * mean, 1) * torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    wish = gram.new_ones(*gram.shape[:-1], 1)
    # `_ex` does not raise: one network of many may have diverged.
    weights = cast(tuple[Tensor, Tensor], torch.linalg.solve_ex(gram + damping, wish))[0]
    return torch.where(gram.isfinite().all(-1).all(-1)[..., None, None], weights, torch.nan)


def _apply(gram: Tensor, weights: Tensor) -> Tensor:
    """Mean over the examples ``M`` of ``[..., M, N]`` of what the step grants them."""
    return (gram @ weights).squeeze(-1).mean(-1)


class Promised(NamedTuple):
    """What one candidate, or each of many, promises."""

    fitted: Tensor
    """``[...]``, as `promise`."""
    held_out: Tensor
    """``[..., 2]``, as `compute_held_out_promise`."""


def compute_promise_from_gradients(rows: Tensor) -> Promised:
    """Both figures from the per-example gradients themselves, G ``[..., N, P]``, N at least 2."""
    half = rows.shape[-2] // 2
    halves = rows[..., :half, :], rows[..., half:, :]
    first, second = map(_fit_step, halves)
    held_out = torch.stack([_apply_step(halves[0], second), _apply_step(halves[1], first)], -1)
    return Promised(_grant(rows, _fit_step(rows)), held_out)


def _fit_step(rows: Tensor) -> Tensor:
    """The step ``[..., P]`` that the examples ``[..., n, P]`` ask for together; NaN where their squares are not finite.

    ``G^T (G G^T + lambda I)^-1 1 = (G^T G + lambda I)^-1 G^T 1``: whichever has fewer dimensions is solved.
    """
    examples, parameters = rows.shape[-2:]
    by_example = parameters >= examples
    product = rows @ rows.mT if by_example else rows.mT @ rows
    target = rows.new_ones(rows.shape[:-1]) if by_example else rows.sum(-2)
    diagonal = product.diagonal(dim1=-2, dim2=-1)
    mean = diagonal.sum(-1, keepdim=True) / examples  # both products have one trace
    diagonal.add_(torch.where(mean != 0, RIDGE * mean, 1))
    # `_ex` does not raise: one network of many may have diverged.
    factor = cast(tuple[Tensor, Tensor], torch.linalg.cholesky_ex(product))[0]
    solved = torch.cholesky_solve(target.unsqueeze(-1), factor)
    return (rows * solved).sum(-2) if by_example else solved.squeeze(-1)


def _grant(rows: Tensor, step: Tensor) -> Tensor:
    """What a step ``[..., P]`` grants the examples ``[..., n, P]``, in the mean."""
    return (rows.mean(-2) * step).sum(-1)


class GradientBatch(NamedTuple):
    """Examples that go through a module together."""

    inputs: tuple[Tensor, ...]
    """The module's arguments, each ``[B, ...]``."""
    wishes: Tensor
    """``[B, ...]`` as its output: the gradient of every example's loss with respect to that."""


def gram_of(module: nn.Module, batches: Sequence[GradientBatch]) -> Tensor:
    """K ``[N, N]`` of all examples of ``batches``, whose shapes may differ, for a module that works under ``vmap``.

    At most `GRAM_BYTES` of gradients are held at a time, or those of two examples.
    """
    wishes = batches[0].wishes
    count = sum(len(batch.wishes) for batch in batches)
    names = find_parameters_with_gradient(module, batches)
    if not names:
        return wishes.new_zeros(count, count)
    size = sum(parameter.numel() for name, parameter in module.named_parameters() if name in names)
    held = max(1, GRAM_BYTES // (size * wishes.element_size()))
    parts = list(_split(batches, held if held >= count else max(1, held // 2)))
    if held >= count:
        rows = torch.cat([example_gradients(module, names, part) for part in parts])
        return rows @ rows.mT
    ends = list(itertools.accumulate(len(part.wishes) for part in parts))
    places = [slice(end - len(part.wishes), end) for end, part in zip(ends, parts, strict=True)]
    gram = wishes.new_empty(count, count)
    for number, across in enumerate(places):
        rows = example_gradients(module, names, parts[number])
        gram[across, across] = rows @ rows.mT
        for other, down in enumerate(places[:number]):
            product = rows @ example_gradients(module, names, parts[other]).mT
            gram[across, down], gram[down, across] = product, product.mT
    return gram


def _split(batches: Iterable[GradientBatch], size: int) -> Iterator[GradientBatch]:
    """Batches of at most ``size`` examples, in order."""
    for inputs, wishes in batches:
        for start in range(0, len(wishes), size):
            part = slice(start, start + size)
            yield GradientBatch(tuple(one[part] for one in inputs), wishes[part])


def example_gradients(module: nn.Module, names: Sequence[str], batch: GradientBatch) -> Tensor:
    """G ``[B, P]``: gradients of ``<wish_i, module(input_i)>`` by the parameters ``names``, side by side."""
    values = {name: parameter.detach() for name, parameter in module.named_parameters()}
    moving = {name: values.pop(name) for name in names}
    with sdpa_kernel(SDPBackend.MATH):  # vmap would go through fused attention example by example
        gradients = vmap(
            grad(partial(inner_product_with_output, module)), in_dims=(None, None, 0, 0), chunk_size=_EXAMPLES_AT_ONCE
        )(moving, values, batch.inputs, batch.wishes)
    return torch.cat([gradient.flatten(1) for gradient in gradients.values()], dim=1)


def grant(
    module: nn.Module,
    moving: Mapping[str, Tensor],
    fixed: Mapping[str, Tensor],
    inputs: tuple[Tensor, ...],
    wish: Tensor,
) -> Tensor:
    """``<wish, module(inputs)>`` of one example; buffers are the module's own, or in ``fixed``."""
    output = functional_call(module, {**fixed, **moving}, tuple(one.unsqueeze(0) for one in inputs))
    return (output.squeeze(0) * wish).sum()


def find_parameters_with_gradient(module: nn.Module, batches: Iterable[GradientBatch]) -> list[str]:
    """The parameters that any gradient reaches: at birth, those that feed a last layer of zeros have none."""
    named = {name: parameter.detach().requires_grad_() for name, parameter in module.named_parameters()}
    total = {name: torch.zeros_like(parameter) for name, parameter in named.items()}
    for inputs, wishes in batches:
        with torch.enable_grad():
            output = functional_call(module, named, inputs)
            gradients = torch.autograd.grad(output, list(named.values()), wishes, materialize_grads=True)
        for name, gradient in zip(named, gradients, strict=True):
            total[name] += gradient.abs()
    return [name for name, found in total.items() if bool(found.any())]
