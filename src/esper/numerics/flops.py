"""FLOPs of a forward pass, as torch counts them: two for a multiply-add in matrix products and convolutions.

Elementwise work, reductions, normalisation and moving data are free, here as in torch's counter. Products without a
formula of torch's have one below, or are named as uncounted.
"""

import math
import re
import warnings
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode  # torch's notes on extending it import it from here
from torch.utils.flop_counter import FlopCounterMode

from esper.numerics.modules import keep_buffers, keep_generators, keep_modes


class FlopCount(NamedTuple):
    """FLOPs of a forward pass, in total and by module."""

    total: int
    """Of all that could be counted."""
    parts: dict[str, int]
    """FLOPs of each named module, summed over its calls."""
    uncounted: str = ""
    """What could not be counted, and where; empty if everything was."""


@torch.no_grad()
def count_flops(
    network: nn.Module,
    run: Callable[[], object],
    parts: Mapping[str, nn.Module] = MappingProxyType({}),
    *,
    frozen: Collection[str] = (),
) -> FlopCount:
    """Count the FLOPs of a forward pass in training mode and in evaluation mode, and return the larger ones.

    Some networks skip layers at random in training mode, and some have outputs that only training needs. What raises an
    error in training mode is counted in evaluation mode alone. Modes, buffers and random generators are restored.

    Args:
        network: Any module.
        run: Calls ``network``.
        parts: Submodules of ``network``, each of which is also counted alone.
        frozen: Names of the submodules that stay in evaluation mode in training; ``""`` is ``network`` itself.
    """
    counts: list[FlopCount] = []
    failure = ""
    with keep_modes(network), keep_buffers(network), keep_generators(network), _use_countable_kernels():
        for training in (False,) if "" in frozen else (True, False):
            network.train(training)
            for name in frozen:
                network.get_submodule(name).eval()
            try:
                counts.append(_count_pass(run, parts))
            except Exception as error:  # noqa: BLE001 (whatever the network or the counter raises)
                first_line, _, _ = str(error).partition("\n")
                failure = f"anything, since counting raises {type(error).__name__}: {first_line}"
    if not counts:
        return FlopCount(0, dict.fromkeys(parts, 0), failure)
    return FlopCount(
        max(count.total for count in counts),
        {name: max(count.parts[name] for count in counts) for name in parts},
        next((count.uncounted for count in counts if count.uncounted), ""),
    )


@contextmanager
def _use_countable_kernels() -> Generator[None]:
    """Within the block nothing is compiled, and attention is computed by matrix products: fused kernels are opaque."""
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.compiler.set_stance("force_eager"), sdpa_kernel(SDPBackend.MATH), warnings.catch_warnings():
            # Such as that nothing needs a gradient where activations are checkpointed.
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)


def _count_pass(run: Callable[[], object], parts: Mapping[str, nn.Module]) -> FlopCount:
    before, flops = dict[str, int](), dict.fromkeys(parts, 0)
    counter = FlopCounterMode(display=False, custom_mapping=dict(_FORMULAS))

    def make_pre_hook(name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        return lambda _, __: before.update({name: counter.get_total_flops()})

    def make_hook(name: str) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
        return lambda _, __, ___: flops.update({name: flops[name] + counter.get_total_flops() - before[name]})

    hooks = [module.register_forward_pre_hook(make_pre_hook(name)) for name, module in parts.items()]
    hooks += [module.register_forward_hook(make_hook(name)) for name, module in parts.items()]
    try:
        # The counter comes first and breaks operations down; the other mode sees those that are left.
        with _UncountedRecorder(counter) as recorder, counter:
            run()
    finally:
        for hook in hooks:
            hook.remove()
    return FlopCount(counter.get_total_flops(), flops, recorder.describe())


# Formulas of an operation's arguments, with shapes in place of tensors.

_Shape = Sequence[int]


def _count_products(left: _Shape, right: _Shape) -> int:
    """``left @ right`` of vectors, matrices or batches of matrices, also if only groups of rows meet each matrix."""
    return 2 * math.prod(left) * (right[-1] if len(right) > 1 else 1)


def _count_bilinear(left: _Shape, weight: _Shape) -> int:
    """``left W_o right`` for each output o, from left to right; the weight is ``[outputs, lefts, rights]``."""
    outputs, lefts, rights = weight
    return 2 * math.prod(left[:-1]) * outputs * (lefts + 1) * rights


def _count_attention(queries: _Shape, keys: _Shape, values: _Shape) -> int:
    """Of queries ``[..., T, K]``, keys ``[..., S, K]`` and values ``[..., S, V]``, masked or not."""
    return 2 * math.prod(queries[:-1]) * keys[-2] * (queries[-1] + values[-1])


def _count_recurrent(inputs: _Shape, weights: Sequence[_Shape]) -> int:
    """Every weight of a recurrent layer is multiplied once by a vector of each token of ``inputs [..., D]``."""
    return 2 * math.prod(inputs[:-1]) * sum(math.prod(weight) for weight in weights if len(weight) == 2)


def _count_transform(values: _Shape, axes: Sequence[int], *_: Any, out_shape: _Shape, **__: Any) -> int:
    """``5 N log2 N`` of a complex Fourier transform of N values, by the split of Cooley and Tukey; half of a real one.

    The size is the larger one of ``values`` and the output: the other may hold only half of the frequencies.
    """
    sizes = [max(values[axis], out_shape[axis]) for axis in axes]
    others = math.prod(values) // math.prod(values[axis] for axis in axes)
    complex_flops = 5 * others * math.prod(sizes) * math.log2(math.prod(sizes))
    return round(complex_flops if tuple(values) == tuple(out_shape) else complex_flops / 2)


def _of(formula: Callable[..., int], *places: int | slice) -> Callable[..., int]:
    """The formula of an operation's arguments at these places."""

    def count(*arguments: Any, **_: Any) -> int:
        return formula(*(arguments[place] for place in places))

    return count


_FORMULAS: Mapping[Any, Callable[..., int]] = {
    getattr(torch.ops.aten, operation): formula
    for operations, formula in (
        ("dot vdot mv _int_mm _grouped_mm", _of(_count_products, 0, 1)),
        ("addmv addmv_ addbmm addmm_ baddbmm_", _of(_count_products, 1, 2)),
        ("_trilinear", _of(_count_bilinear, 0, 1)),
        # Attention on CPUs and by Metal; torch counts that of CUDA.
        (
            "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_attention_math_for_mps",
            _of(_count_attention, 0, 1, 2),
        ),
        # Recurrent layers where they are one operation: by oneDNN, on GPUs and by Metal.
        ("mkldnn_rnn_layer", _of(_count_recurrent, 0, slice(1, 3))),
        ("_cudnn_rnn miopen_rnn", _of(_count_recurrent, 0, 1)),
        ("_lstm_mps", _of(_count_recurrent, 0, 2)),
        ("_fft_c2c _fft_r2c _fft_c2r", _count_transform),
    )
    for operation in operations.split()
}


# What has no formula.

_MULTIPLYING = re.compile(
    r".*mm|.*mv|v?dot|linear|conv(?!ert).*|attention|encoder|rnn|lstm|gru|linalg|eigh?|svd|qr|lstsq|"
    r"cholesky|geqrf|ormqr|.*solve"
)
"""Words in the names of torch's operations that are made of products."""
_FREE = (
    *("linalg_vector_norm", "linalg__powsum", "linalg_cross", "_linalg_check_errors", "_cudnn_rnn_flatten_weight"),
    *("_thnn_fused_lstm_cell", "_thnn_fused_gru_cell"),
)
"""Operations that have such a word, and do but elementwise work or reductions."""
_PLAIN_LIBRARIES = ("aten", "prim", "prims", "profiler", "torchvision", "c10d", "_c10d_functional")
"""Libraries of operations whose names say whether they are made of products. Any operation of others may be."""
_SHOWN = 4


@cache
def _may_multiply(name: str) -> bool:
    library, _, operation = name.partition(".")
    if library not in _PLAIN_LIBRARIES:
        return True
    return operation not in _FREE and any(map(_MULTIPLYING.fullmatch, operation.split("_")))


class _UncountedRecorder(TorchDispatchMode):
    """Records operations that may have products and have no formula, and the submodules that call them."""

    supports_higher_order_operators = True

    def __init__(self, counter: FlopCounterMode) -> None:
        super().__init__()
        self._counted = {str(operation) for operation in counter.flop_registry}
        self._modules = counter.mod_tracker
        self._found: dict[str, None] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Torch writes an operation as library.operation.overload.
        name = str(func).rpartition(".")[0]
        if name not in self._counted and _may_multiply(name):
            innermost = max(self._modules.parents, key=len)
            submodule = innermost.partition(".")[2]
            self._found[f"{name.replace('.', '::')} in {submodule!r}" if submodule else name] = None
        return func(*args, **(kwargs or {}))

    def describe(self) -> str:
        """What was found, as one clause."""
        found = list(self._found)
        more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        return ", ".join(found[:_SHOWN]) + more
