"""Four ways to run many networks of one architecture forward; the results are the same.

1. *Stackable*: the host's own forward takes stacked parameters (`esper.numerics.modules`).
2. *Merged*: a host of plain linear layers and convolutions takes one batch of all networks' examples.
3. *Vmapped*: any other host runs under `torch.func.vmap` over the networks.
4. *Looped*: network by network, for hosts that vmap cannot handle or that draw random numbers, or where it is faster.

README.md in this folder has diagrams of them.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from esper.errors import SlotError
from esper.growth.hooks import SourceHook
from esper.growth.model import GrowingModel
from esper.growth.site import Site
from esper.numerics.modules import Stackable, global_generators, linear
from esper.numerics.random_streams import seed_globally
from esper.population.host_checks import can_vmap, draws_in_training

Parameters = Mapping[str, Tensor]
"""Parameters or buffers by name: each ``[E, *shape]`` where they are stacked."""


class SlotOp(Protocol):
    """Rewrites the features of a population at one slot, given the networks' inputs and the ``source``.

    The source is the input of the layer that computes the hidden units before the slot; None where no hidden units can
    be added. All are ``[E, N, ...]``.
    """

    def __call__(self, features: Tensor, inputs: Tensor, source: Tensor | None) -> Tensor: ...


class FunctionalModule:
    """`torch.func.functional_call` of one module, with names looked up once: for a small host that takes half the time.

    The module loses its own parameters and buffers, and keeps the tensors of the last call as plain attributes. So its
    forward must not call ``parameters()``.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module

        def list_tensors(owner: nn.Module, *, recurse: bool) -> list[tuple[str, Tensor]]:
            parameters = owner.named_parameters(recurse=recurse, remove_duplicate=False)
            return [*parameters, *owner.named_buffers(recurse=recurse, remove_duplicate=False)]

        # A tensor may have several places: weights can be tied.
        places: dict[Tensor, list[tuple[nn.Module, str]]] = {}
        for owner in module.modules():
            for attribute, tensor in list_tensors(owner, recurse=False):
                places.setdefault(tensor, []).append((owner, attribute))
        self._places = {name: places[tensor] for name, tensor in list_tensors(module, recurse=True)}
        self._current: dict[str, Tensor] = {}
        # Registered parameters refuse plain tensors, so all become ordinary attributes.
        for tensor, owners in places.items():
            for owner, attribute in owners:
                delattr(owner, attribute)
                setattr(owner, attribute, tensor.detach())

    def __call__(self, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], *inputs: Tensor) -> Tensor:
        """The module's output with these parameters and buffers, stacked or of one network."""
        for name, tensor in (*parameters.items(), *buffers.items()):
            if self._current.get(name) is not tensor:
                self._current[name] = tensor
                for owner, attribute in self._places[name]:
                    setattr(owner, attribute, tensor)
        return self._module(*inputs)


def call_module(module: nn.Module, parameters: Parameters, buffers: Parameters, *inputs: Tensor) -> Tensor:
    """The module's output with these parameters and buffers, which have the shapes of its own."""
    return functional_call(module, (dict(parameters), dict(buffers)), inputs)


def make_stacked_call(module: nn.Module) -> Callable[..., Tensor]:
    """Computes R modules like ``module`` at once, from stacked parameters, buffers and inputs ``[R, ...]``."""
    if isinstance(module, Stackable):
        return FunctionalModule(copy.deepcopy(module))
    return vmap_under_autocast(partial(call_module, module))


def vmap_under_autocast(call: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`torch.func.vmap` of a function of parameters, buffers and inputs that respects the caller's autocast."""

    def call_stacked(parameters: Parameters, buffers: Parameters, *inputs: Tensor) -> Tensor:
        device = inputs[0].device.type
        mode = AutocastInVmap(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else nullcontext()
        # vmap would run fused attention network by network, and its backward pass fails on CUDA.
        with mode, sdpa_kernel(SDPBackend.MATH):
            return vmap(call)(dict(parameters), dict(buffers), *inputs)

    return call_stacked


class AutocastInVmap(TorchFunctionMode):
    """Casts as autocast does: matrix products and convolutions to ``dtype``, norms to float32.

    A vmap decomposes these functions before autocast can act on them.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        dtype = self._dtype if func in _ROUNDED else torch.float32 if func in _RAISED else None
        if dtype is None:
            return func(*args, **(kwargs or {}))

        def convert(argument: Any) -> Any:
            return argument.to(dtype) if isinstance(argument, Tensor) and argument.is_floating_point() else argument

        return func(*map(convert, args), **{name: convert(argument) for name, argument in (kwargs or {}).items()})


_RAISED = frozenset({F.batch_norm, F.instance_norm, F.layer_norm, F.group_norm})
_ROUNDED = frozenset(
    {
        *(torch.mm, torch.bmm, torch.addmm, torch.baddbmm, torch.matmul, F.linear, F.scaled_dot_product_attention),
        *(Tensor.mm, Tensor.bmm, Tensor.addmm, Tensor.baddbmm, Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__),
        *(F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d),
        *(torch.conv1d, torch.conv2d, torch.conv3d),
    }
)


# Merging: the examples of all networks form one batch, for hosts whose parameters are all in linear layers and
# convolutions; the rest of such a host treats every example separately. A merged batch [N * E, ...] has the first
# example of every network, then the second, and so on: so the channels of all networks are adjacent, and one grouped
# convolution computes all networks.


def merge_networks(stacked: Tensor) -> Tensor:
    """``[E, N, ...]`` as one batch ``[N * E, ...]``."""
    return stacked.transpose(0, 1).flatten(0, 1)


def split_networks(batch: Tensor, networks: int) -> Tensor:
    """A merged batch ``[N * E, ...]`` as ``[E, N, ...]``, a view."""
    return batch.reshape(-1, networks, *batch.shape[1:]).transpose(0, 1)


def enable_merging(host: nn.Module) -> None:
    """Make the host's layers accept merged batches while their parameters are stacked; otherwise nothing changes."""
    for layer in host.modules():
        if type(layer) in _FORWARD:
            layer.forward = partial(_FORWARD[type(layer)], layer)


def can_merge(host: nn.Module, example_input: Tensor) -> bool:
    """Whether ``host`` has no buffers, and computes merged batches as a vmap does, tried on random values.

    It does not if it has parameters outside the layers that can merge, accesses them in another way
    (``next(self.parameters())``), or mixes the examples of a batch.
    """
    if any(True for _ in host.buffers()):
        return False
    networks, examples = 2, 3
    for training in (True, False):
        plain = copy.deepcopy(host).to("cpu", torch.float64).train(training)
        merging = copy.deepcopy(plain)
        enable_merging(merging)
        # Random values, because zeros or equal networks would hide a mix-up of networks.
        draw = partial(torch.randn, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        weights = {name: draw(networks, *parameter.shape) for name, parameter in plain.named_parameters()}
        inputs = draw(networks, examples, *example_input.shape[1:])
        with torch.no_grad():
            try:
                expected = vmap_under_autocast(partial(call_module, plain))(weights, {}, inputs)
                outputs = split_networks(FunctionalModule(merging)(weights, {}, merge_networks(inputs)), networks)
            except (RuntimeError, ValueError, StopIteration):
                return False
        if outputs.shape != expected.shape or not torch.allclose(outputs, expected):
            return False
    return True


def _forward_linear(layer: nn.Linear, features: Tensor) -> Tensor:
    """Features ``[N * E, ..., inputs]`` to ``[N * E, ..., outputs]``."""
    weight: Tensor = layer.weight
    if weight.dim() == 2:
        return nn.Linear.forward(layer, features)
    by_network = split_networks(features, len(weight))  # [E, N, ..., inputs]
    outputs = linear(weight, by_network.flatten(1, -2).mT, layer.bias).mT
    return merge_networks(outputs.reshape(*by_network.shape[:-1], -1))


def _forward_convolution(
    layer: nn.Conv1d | nn.Conv2d, features: Tensor, *, plain: Callable[..., Tensor], grouped: Callable[..., Tensor]
) -> Tensor:
    """Features ``[N * E, inputs, ...]`` to ``[N * E, outputs, ...]``."""
    weight, bias = layer.weight, layer.bias
    if weight.dim() == features.dim():
        return plain(layer, features)
    networks = len(weight)
    channels = features.reshape(-1, networks * features.shape[1], *features.shape[2:])  # [N, E * inputs, ...]
    outputs = grouped(
        channels,
        weight.flatten(0, 1),
        None if bias is None else bias.flatten(),
        layer.stride,
        layer.padding,
        layer.dilation,
        networks * layer.groups,
    )
    return outputs.reshape(features.shape[0], -1, *outputs.shape[2:])


_FORWARD: Mapping[type[nn.Module], Callable[..., Tensor]] = {
    nn.Linear: _forward_linear,
    nn.Conv1d: partial(_forward_convolution, plain=nn.Conv1d.forward, grouped=F.conv1d),
    nn.Conv2d: partial(_forward_convolution, plain=nn.Conv2d.forward, grouped=F.conv2d),
}
"""Forward functions by exact type: a subclass may compute something else."""


class _LeaveVmap(torch.autograd.Function):
    """Passes the features ``[E, N, ...]`` of all networks to a slot op from inside a vmap over networks.

    The outer autograd records the slot op's operations, so neither `forward` nor `backward` ever runs.
    """

    generate_vmap_rule = False

    @staticmethod
    def forward(features: Tensor, inputs: Tensor, source: Tensor | None, slot_op: SlotOp) -> Tensor:
        raise RuntimeError("a population's slot was called outside its vmap")

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def vmap(  # pyright: ignore[reportIncompatibleMethodOverride] - the base class leaves the arguments open
        info: Any,
        in_dims: tuple[int | None, ...],
        features: Tensor,
        inputs: Tensor,
        source: Tensor | None,
        slot_op: SlotOp,
    ) -> tuple[Tensor, int]:
        def move_networks_first(tensor: Tensor, axis: int | None) -> Tensor:
            return tensor.expand(info.batch_size, *tensor.shape) if axis is None else tensor.movedim(axis, 0)

        if source is not None:
            source = move_networks_first(source, in_dims[2])
        features, inputs = move_networks_first(features, in_dims[0]), move_networks_first(inputs, in_dims[1])
        return slot_op(features, inputs, source), 0


# How a slot calls its slot op in each way of execution, with the source that the slot's hook recorded in this pass.


def _apply_to_stack(slot_op: SlotOp, hook: SourceHook | None, features: Tensor, inputs: Tensor) -> Tensor:
    return slot_op(features, inputs, None if hook is None else hook.inputs)


def _apply_from_vmap(slot_op: SlotOp, hook: SourceHook | None, features: Tensor, inputs: Tensor) -> Tensor:
    return cast(Tensor, _LeaveVmap.apply(features, inputs, None if hook is None else hook.inputs, slot_op))


def _apply_to_merged(
    networks: int, slot_op: SlotOp, hook: SourceHook | None, features: Tensor, inputs: Tensor
) -> Tensor:
    source = None if hook is None or hook.inputs is None else split_networks(hook.inputs, networks)
    return merge_networks(slot_op(split_networks(features, networks), split_networks(inputs, networks), source))


def _apply_to_one(slot_op: SlotOp, hook: SourceHook | None, features: Tensor, inputs: Tensor) -> Tensor:
    source = None if hook is None or hook.inputs is None else hook.inputs.unsqueeze(0)
    return slot_op(features.unsqueeze(0), inputs.unsqueeze(0), source).squeeze(0)


class Execution:
    """Runs the hosts of a population with a slot op in each slot.

    The ``template`` is a host at full width. ``slots`` are names of submodules; a tuple names modules between which
    hidden units may grow, with the slot after the last of them.
    """

    def __init__(self, template: nn.Module, slots: Sequence[str | tuple[str, ...]], example_input: Tensor) -> None:
        self.draws = draws_in_training(template, example_input)
        """Whether hosts draw random numbers in training mode. If so, they need generators there, and are looped."""
        chains = [place for place in slots if not isinstance(place, str)]
        short = next((chain for chain in chains if len(chain) < 2), None)
        if short is not None:
            raise SlotError(
                f"site {short} is too short: name the layer that computes hidden units, the modules after it, and the "
                "layer that takes the units as input"
            )
        names = [place if isinstance(place, str) else place[-1] for place in slots]
        self._model = GrowingModel(copy.deepcopy(template), names, example_input, chains=chains)
        self._slots = [self._model.slots[name] for name in names]
        # Layers are dropped from the sites, because the model's layers lose their parameters.
        sites = [replace(slot.site, layer=None) for slot in self._slots]
        self.sites: list[Site] = [site.find_in(template, site.width) for site in sites]
        for site in self.sites:
            hidden = site.hidden
            if hidden is None:
                continue
            chain = nn.Sequential(hidden.first, *hidden.between)
            if draws_in_training(chain, hidden.first.weight.new_zeros(2, *hidden.input_shape)):
                raise SlotError(
                    f"no units can be added between {hidden.names[0]!r} and {hidden.names[-1]!r} in a population: what "
                    "lies there draws random numbers in training, as dropout does"
                )
        self._stacks = isinstance(template, Stackable)
        self._merges = not self._stacks and not self.draws and can_merge(template, example_input)
        self.needs_loop = self.draws or not (self._stacks or self._merges or can_vmap(template, example_input))
        """Whether the hosts can run only one after the other."""
        self._global_generators = global_generators(template)
        if self._merges:
            enable_merging(self._model.host)
        host = self._model.host
        self._call = FunctionalModule(host) if self._stacks or self._merges else partial(call_module, host)

    def run_stacked(
        self, parameters: Parameters, buffers: Parameters, inputs: Tensor, slot_ops: Sequence[SlotOp | None]
    ) -> Tensor:
        """Outputs ``[E, N', ...]`` of all networks on ``inputs`` ``[E, N, ...]``, as one program."""
        if self._stacks:
            self._set_slot_ops(slot_ops, _apply_to_stack)
            return self._call(parameters, buffers, inputs)
        if self._merges:
            networks = len(inputs)
            self._set_slot_ops(slot_ops, partial(_apply_to_merged, networks))
            return split_networks(self._call(parameters, buffers, merge_networks(inputs)), networks)
        self._set_slot_ops(slot_ops, _apply_from_vmap)
        return vmap_under_autocast(self._call)(parameters, buffers, inputs)

    def run_looped(
        self,
        parameters: Parameters,
        buffers: Parameters,
        inputs: Tensor,
        slot_ops: Sequence[Sequence[SlotOp | None]],
        generators: Sequence[torch.Generator] = (),
    ) -> Tensor:
        """The outputs of `run_stacked`, computed one network after the other.

        ``slot_ops[e]`` get the features of network ``e`` only, with E = 1. Its random numbers come from
        ``generators[e]``, which hosts that draw nothing do not need.
        """
        outputs: list[Tensor] = []
        # Not by indexing, whose backward pass would fill a gradient of all networks for each of them.
        rows = {name: tensor.unbind() for name, tensor in parameters.items()}
        for network, network_ops in enumerate(slot_ops):
            self._set_slot_ops(network_ops, _apply_to_one)
            network_parameters = {name: tensors[network] for name, tensors in rows.items()}
            network_buffers = {name: tensor[network] for name, tensor in buffers.items()}
            with ExitStack() as stack:
                if generators:
                    seed = int(torch.randint(2**62, (), generator=generators[network]))
                    stack.enter_context(seed_globally(seed, self._global_generators))
                outputs.append(self._call(network_parameters, network_buffers, inputs[network]))
        return torch.stack(outputs)

    def can_share_prefixes(self, example_input: Tensor) -> bool:
        """Whether every slot may append variants to the batch, which fails if a connection bypasses a slot.

        Every slot is made to append a copy of the first examples, and the host must return copies of its outputs: with
        a bypass, a tensor from before the slot no longer fits one from after it. Features must pass the slots in order.
        """
        inputs = example_input[:1].repeat(2, *[1] * (example_input.dim() - 1))
        order: list[int] = []

        def append_copy(slot: int, features: Tensor, inputs: Tensor) -> Tensor:
            order.append(slot)
            return torch.cat([features, features[: len(inputs)]])

        was_training = self._model.training
        self._model.eval()
        with torch.no_grad():
            for slot in self._slots:
                slot.occupant = None
            expected = self._model(inputs)
            for place, slot in enumerate(self._slots):
                slot.occupant = partial(append_copy, place)
            try:
                outputs = self._model(inputs)
            except RuntimeError:
                return False
            finally:
                self._model.train(was_training)
        if order != sorted(order):
            return False
        copies = expected.repeat(1 + len(self._slots), *[1] * (expected.dim() - 1))
        return outputs.shape == copies.shape and torch.allclose(outputs, copies)

    def train(self, mode: bool) -> None:
        """Put the hosts into training or evaluation mode."""
        self._model.host.train(mode)

    def _set_slot_ops(self, slot_ops: Sequence[SlotOp | None], apply: Callable[..., Tensor]) -> None:
        for slot, slot_op in zip(self._slots, slot_ops, strict=True):
            slot.occupant = None if slot_op is None else partial(apply, slot_op, slot.source)
