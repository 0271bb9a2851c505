"""A pretended accelerator: its tensors have true values, and obey the rules of a CUDA device.

A far tensor calls its device `meta`, a name that torch has wherever it runs, and computes on the CPU, on a tensor that
it hides. So a program that runs on it has the bits that it has on the CPU; what a CUDA device would refuse is refused,
and what makes the CPU wait for one is counted.

It is built on what torch documents for extending it (`__torch_function__`, `__torch_dispatch__`), of which
`TorchDispatchMode` and `_make_wrapper_subclass` have no other than their private names.
"""

import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any, Self
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

import esper

FAR = torch.device("meta")
_CPU = torch.device("cpu")
_IS_AUTOCAST_ENABLED = torch.is_autocast_enabled
_HOME = f"{Path(esper.__file__).parent}/"

COPIES = frozenset({"_to_copy", "copy_", "copy"})
GATHERS = frozenset({"index", "_unsafe_index"})
PUTS = frozenset({"index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put"})
"""Operations that send indices on the CPU to their device."""
AWAITED = frozenset(
    {
        *("_local_scalar_dense", "equal", "nonzero", "masked_select", "bincount", "multinomial"),
        *("_unique2", "unique_dim", "unique_consecutive"),
    }
)
"""Operations whose result, or its size, the CPU waits for."""
UNDETERMINED = frozenset(
    {
        *("_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d_backward", "adaptive_max_pool2d_backward"),
        *("avg_pool3d_backward", "reflection_pad1d_backward", "reflection_pad2d_backward", "grid_sampler_2d_backward"),
        *("upsample_linear1d_backward", "upsample_bilinear2d_backward", "put_", "histc", "median"),
    }
)
"""Operations that `torch.use_deterministic_algorithms` refuses on CUDA devices; besides them, sums by `cumsum`, by
weighted `bincount`, and in a loss that is reduced over more than two dimensions."""


class FarTensor(Tensor):
    """A tensor on the pretended device; ``near`` has its values."""

    near: Tensor

    @staticmethod
    def __new__(cls, near: Tensor) -> Self:
        return Tensor._make_wrapper_subclass(
            cls, near.shape, strides=near.stride(), storage_offset=near.storage_offset(), dtype=near.dtype, device=FAR
        )

    def __init__(self, near: Tensor) -> None:
        self.near = near

    def __repr__(self) -> str:
        return f"FarTensor({self.near})"

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, _types: Any, _args: tuple[Any, ...] = (), _kwargs: dict[str, Any] | None = None
    ) -> Any:
        raise RuntimeError(f"{func} on a far tensor outside of FarAway")


class FarAway:
    """While active, tensors may be made on `FAR`, and it is noted where Esper makes the CPU wait for them."""

    def __init__(self) -> None:
        self.reads: list[str] = []
        """Places where values are fetched; each makes the CPU wait."""
        self.waits: list[str] = []
        """Places where values are sent, and the CPU waits until they are there."""
        self.sent: list[str] = []
        """Places where values are sent, whether or not the CPU waits; each is a copy of its own."""
        self.undetermined: list[str] = []
        """Places, with the operation, that would be refused where results must be the same every time."""
        self._modes = ExitStack()

    def forget(self) -> None:
        """Begin anew."""
        for places in (self.reads, self.waits, self.sent, self.undetermined):
            places.clear()

    def __enter__(self) -> Self:
        for mode in (
            # The CPU's own tensors of this kind have no version, which torch wants where one is wrapped.
            mock.patch.object(torch.inference_mode, "__enter__", _enter_no_grad),
            mock.patch.object(torch.inference_mode, "__exit__", _exit_no_grad),
            mock.patch.object(torch, "autocast", _autocast),  # which knows no such device
            mock.patch.object(torch, "is_autocast_enabled", _is_autocast_enabled),
            _Constructors(),
            _Dispatch(self),
        ):
            self._modes.enter_context(mode)
        return self

    def __exit__(self, *_: object) -> None:
        self._modes.close()

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute an operation on the hidden tensors, if a CUDA device would."""
        name = func.overloadpacket.__name__
        tensors = list(_leaves([args, kwargs], Tensor))
        far = [one for one in tensors if isinstance(one, FarTensor)]
        near = [one for one in tensors if not isinstance(one, FarTensor)]
        named = [device for device in _leaves([args, kwargs], torch.device) if device.type == FAR.type]
        if not far and not named:
            return func(*args, **kwargs)
        for generator in _leaves([args, kwargs], torch.Generator):
            raise RuntimeError(f"{name}: expected a generator on {FAR} but found one on {generator.device}")

        # What both devices take part in.
        index = next(iter(args[1:2])) if name in GATHERS | PUTS else ()
        target = kwargs.get("device") or (args[0].device if name in COPIES else FAR)
        comes_back = target.type != FAR.type
        if name in COPIES:
            prompt = kwargs.get("non_blocking", False) or (name != "_to_copy" and args[2:3] == (True,))
            if comes_back and far:
                if prompt:
                    raise RuntimeError(f"{name}: values are read before they have come")
                self.reads.append(_place())
            elif near:
                self.sent.append(_place())
                if not prompt:
                    self.waits.append(_place())
        elif name in GATHERS | PUTS:
            written = args[2] if name in PUTS else args[0]
            if not isinstance(args[0], FarTensor) or (written.dim() and not isinstance(written, FarTensor)):
                raise _mixture(func)
            if any(isinstance(one, Tensor) and not isinstance(one, FarTensor) for one in index):
                self.waits.append(_place())  # an index on the CPU is sent first
        elif far and near:
            # Numbers without an axis on the CPU are handed over as arguments, where each element is computed alone.
            alone = torch.Tag.pointwise in func.tags or name in {"fill_", "fill", "index_fill", "masked_fill"}
            if any(one.dim() for one in near) or not alone:
                raise _mixture(func)

        # What the CPU waits for.
        masked = any(isinstance(one, FarTensor) and one.dtype == torch.bool for one in index if one is not None)
        if masked and name in PUTS:
            masked = args[2].numel() != 1 or isinstance(args[2], FarTensor)  # a number on the CPU is filled in
        repeats = name == "repeat_interleave" and kwargs.get("output_size") is None
        if name in AWAITED or masked or (repeats and isinstance(args[0], FarTensor)):
            self.reads.append(_place())
        if (
            name in UNDETERMINED
            or (name == "cumsum" and args[0].is_floating_point())
            or (name == "bincount" and len(far) > 1)
            or (name.startswith("nll_loss2d") and args[3 + ("backward" in name)] != 0)
        ):
            self.undetermined.append(f"{_place()}: {name}")

        hidden_args, hidden_kwargs = tree_map(_hide, (args, kwargs))
        found = func(*hidden_args, **hidden_kwargs)
        if comes_back:
            return args[0] if name == "copy_" else found
        known = {id(one.near): one for one in far}

        def show(value: Any) -> Any:
            return known.get(id(value), FarTensor(value)) if isinstance(value, Tensor) else value

        return tree_map(show, found)


class _Dispatch(TorchDispatchMode):
    def __init__(self, away: FarAway) -> None:
        super().__init__()
        self._away = away

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._away.run(func, args, kwargs or {})


class _Constructors(TorchFunctionMode):
    """What never reaches the dispatcher: torch makes such tensors, and reads them, by itself."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor) and torch.device(kwargs.get("device") or _CPU) == FAR:
            return func(*args, **{**kwargs, "device": _CPU}).to(FAR)
        if func is Tensor.new_tensor and isinstance(args[0], FarTensor):
            return torch.tensor(*args[1:], **kwargs).to(FAR)
        if func is Tensor.tolist and isinstance(args[0], FarTensor):
            return args[0].to(_CPU).tolist()
        return func(*args, **kwargs)


def _hide(value: Any) -> Any:
    if isinstance(value, FarTensor):
        return value.near
    return _CPU if isinstance(value, torch.device) else value


def _leaves(value: Any, kind: Any) -> Iterator[Any]:
    if isinstance(value, kind):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _leaves(part, kind)
    elif isinstance(value, dict):
        yield from _leaves(list(value.values()), kind)


def _mixture(func: Any) -> RuntimeError:
    return RuntimeError(f"{func}: expected all tensors to be on the same device, but found {FAR} and {_CPU}")


def _autocast(device_type: str, *args: Any, **kwargs: Any) -> Any:
    return nullcontext() if device_type == FAR.type else torch.amp.autocast(device_type, *args, **kwargs)


def _is_autocast_enabled(device_type: str) -> bool:
    return device_type != FAR.type and _IS_AUTOCAST_ENABLED(device_type)


def _enter_no_grad(mode: Any) -> None:
    mode.without_gradients = torch.no_grad()
    mode.without_gradients.__enter__()


def _exit_no_grad(mode: Any, *error: object) -> None:
    mode.without_gradients.__exit__(*error)


def _place() -> str:
    """The innermost function of Esper that is running, by file and name."""
    for frame, _ in traceback.walk_stack(None):
        if frame.f_code.co_filename.startswith(_HOME):
            return f"{frame.f_code.co_filename.removeprefix(_HOME)} {frame.f_code.co_name}"
    return "elsewhere"
