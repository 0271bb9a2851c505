"""FLOPs against counts by hand."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils import flop_counter
from zoo.hosts import Gpt, MlpNet, build_host

import esper
from esper.growth.blueprints import get
from esper.growth.model import GrowingModel
from esper.numerics import flops
from esper.numerics.flops import count_flops

LENGTH, WIDTH, CLASSES = 6, 8, 5
HIDDEN, PROJECTED = 16, 3
EXAMPLES = 2


def mlp() -> MlpNet:
    return build_host(lambda: MlpNet(12, WIDTH, CLASSES), torch.Generator().manual_seed(0))


def counted(network: nn.Module, *inputs: Any) -> int:
    found = count_flops(network, lambda: network(*inputs))
    assert not found.uncounted
    return found.total


def tokens() -> Tensor:
    return torch.randn(EXAMPLES, LENGTH, WIDTH)


class Calls(nn.Module):
    """A network whose forward is a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Any) -> Any:
        return self.function(*inputs)


@pytest.mark.parametrize("examples", [2, 5])
def test_a_multilayer_perceptron(examples: int) -> None:
    by_hand = 2 * (12 * WIDTH + WIDTH * WIDTH + WIDTH * CLASSES)
    assert counted(mlp(), torch.zeros(examples, 12)) == examples * by_hand


def test_attention_is_counted_like_any_product() -> None:
    gpt = build_host(lambda: Gpt(LENGTH, WIDTH, 2, CLASSES), torch.Generator().manual_seed(0))
    projections = LENGTH * (4 * WIDTH * WIDTH + 2 * WIDTH * 2 * WIDTH)
    mixing = 2 * LENGTH * LENGTH * WIDTH
    by_hand = 2 * (2 * (projections + mixing) + LENGTH * WIDTH * CLASSES)
    assert counted(gpt, torch.zeros(3, LENGTH, dtype=torch.int64)) == 3 * by_hand


ATTENTION = 2 * LENGTH * (4 * WIDTH * WIDTH + 2 * LENGTH * WIDTH)
ENCODER = ATTENTION + 2 * LENGTH * 2 * WIDTH * HIDDEN


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("hooked", [True, False])
@pytest.mark.parametrize("padded", [True, False])
def test_encoders_of_torch_are_counted_as_they_are_trained(training: bool, hooked: bool, padded: bool) -> None:
    """Not by the fused kernels of evaluation mode, which torch uses where no submodule has a hook."""
    layer = nn.TransformerEncoderLayer(WIDTH, 2, HIDDEN, batch_first=True)
    network = nn.TransformerEncoder(layer, 2).train(training)
    if hooked:
        network.layers[0].linear1.register_forward_hook(lambda *_: None)
    padding = torch.arange(LENGTH).expand(EXAMPLES, -1) > 3
    found = count_flops(network, lambda: network(tokens(), src_key_padding_mask=padding if padded else None))
    assert found == (EXAMPLES * 2 * ENCODER, {}, "")
    assert network.training is training
    assert torch.backends.mha.get_fastpath_enabled()


GATES = {nn.RNN: 1, nn.LSTM: 4, nn.GRU: 3, nn.RNNCell: 1, nn.LSTMCell: 4, nn.GRUCell: 3}


def recurrent_by_hand(steps: int, gates: int, layers: int, directions: int, projected: int) -> int:
    """Of each step, layer and direction: inputs and state times all gates, and the state's projection."""
    state, multiplied = projected or HIDDEN, 0
    for layer in range(layers):
        inputs = WIDTH if layer == 0 else directions * state
        multiplied += directions * (gates * HIDDEN * (inputs + state) + HIDDEN * projected)
    return 2 * steps * multiplied


@pytest.mark.parametrize(("kind", "projected"), [(nn.RNN, 0), (nn.LSTM, 0), (nn.LSTM, PROJECTED), (nn.GRU, 0)])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("lengths", [None, (LENGTH, 4)])
def test_recurrent_layers(
    kind: type[nn.RNNBase], projected: int, bidirectional: bool, layers: int, lengths: tuple[int, ...] | None
) -> None:
    sizes = {"num_layers": layers, "bidirectional": bidirectional, "proj_size": projected}
    network = kind(WIDTH, HIDDEN, batch_first=True, **{name: size for name, size in sizes.items() if size})
    inputs = tokens() if lengths is None else pack_padded_sequence(tokens(), torch.tensor(lengths), batch_first=True)
    steps = EXAMPLES * LENGTH if lengths is None else sum(lengths)
    by_hand = recurrent_by_hand(steps, GATES[kind], layers, 1 + bidirectional, projected)
    assert counted(network, inputs) == by_hand


@pytest.mark.parametrize("kind", [nn.RNNCell, nn.LSTMCell, nn.GRUCell])
def test_recurrent_cells(kind: type[nn.RNNCellBase]) -> None:
    assert counted(kind(WIDTH, HIDDEN), torch.randn(EXAMPLES, WIDTH)) == recurrent_by_hand(
        EXAMPLES, GATES[kind], 1, 1, 0
    )


def test_recurrent_layers_of_other_devices_have_the_same_formula() -> None:
    """By the shapes that their operations take, as this machine may not have the device."""
    network = nn.LSTM(WIDTH, HIDDEN, 2, bidirectional=True)
    inputs, weights = (LENGTH, EXAMPLES, WIDTH), [tuple(weight.shape) for weight in network.parameters()]
    state = (4, EXAMPLES, HIDDEN)
    by_hand = recurrent_by_hand(EXAMPLES * LENGTH, 4, 2, 2, 0)
    formulas = flops._FORMULAS
    # Only the tail of the arguments differs from device to device, and no formula reads it.
    for operation in (torch.ops.aten._cudnn_rnn, torch.ops.aten.miopen_rnn):
        assert formulas[operation](inputs, weights, 4, None, state, state, 2, HIDDEN, out_shape=()) == by_hand
    assert formulas[torch.ops.aten._lstm_mps](inputs, [state, state], weights, True, 2, out_shape=()) == by_hand


VECTOR, MATRIX, BATCH = torch.ones(WIDTH), torch.ones(LENGTH, WIDTH), torch.ones(EXAMPLES, LENGTH, WIDTH)
SQUARE = torch.zeros(LENGTH, LENGTH)


@pytest.mark.parametrize(
    ("function", "by_hand"),
    [
        (lambda: VECTOR @ VECTOR, WIDTH),
        (lambda: MATRIX @ VECTOR, LENGTH * WIDTH),
        (lambda: torch.addmv(torch.ones(LENGTH), MATRIX, VECTOR), LENGTH * WIDTH),
        (lambda: torch.addbmm(SQUARE, BATCH, BATCH.mT), EXAMPLES * LENGTH * LENGTH * WIDTH),
        (lambda: SQUARE.clone().addmm_(MATRIX, MATRIX.T), LENGTH * LENGTH * WIDTH),
        (lambda: F.bilinear(MATRIX, MATRIX, torch.ones(CLASSES, WIDTH, WIDTH)), LENGTH * CLASSES * WIDTH * (WIDTH + 1)),
        (lambda: F.conv1d(BATCH, torch.ones(LENGTH, 1, 3), padding=1, groups=LENGTH), EXAMPLES * LENGTH * WIDTH * 3),
        (lambda: torch.einsum("btc,bsc->bts", BATCH, BATCH), EXAMPLES * LENGTH * LENGTH * WIDTH),
        (lambda: torch.softmax(MATRIX * MATRIX + MATRIX, -1).cumsum(0).norm(), 0),
        (lambda: F.layer_norm(F.gelu(MATRIX), (WIDTH,)), 0),
        (lambda: F.interpolate(BATCH, scale_factor=2, mode="linear"), 0),
        (lambda: F.embedding(torch.zeros(2, 3, dtype=torch.int64), MATRIX), 0),
        (lambda: torch.outer(VECTOR, VECTOR), 0),
        (lambda: torch.cdist(BATCH, BATCH), 0),
    ],
)
def test_products_are_counted_and_elementwise_work_is_free(function: Callable[[], Tensor], by_hand: int) -> None:
    assert counted(Calls(function)) == 2 * by_hand


@pytest.mark.parametrize("kernel", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
def test_attention_is_counted_whatever_kernel_the_network_chooses(kernel: SDPBackend) -> None:
    def attend(heads: Tensor) -> Tensor:
        with sdpa_kernel(kernel):
            return F.scaled_dot_product_attention(heads, heads, heads)

    assert counted(Calls(attend), torch.randn(EXAMPLES, 3, LENGTH, WIDTH)) == 2 * EXAMPLES * 3 * 2 * LENGTH**2 * WIDTH


def test_fourier_transforms_are_counted_by_the_algorithm_of_cooley_and_tukey() -> None:
    real, transform = torch.randn(3, 4, 8), 5 * 3 * 32 * 5  # 5 N log2 N of three transforms of 4 x 8 values
    assert counted(Calls(torch.fft.fft2), real.to(torch.complex64)) == transform
    assert counted(Calls(torch.fft.rfft2), real) == transform // 2
    assert counted(Calls(torch.fft.irfft), torch.fft.rfft(real)) == 5 * 12 * 8 * 3 // 2


# Modes and state ------------------------------------------------------------------------------------------------------


class Auxiliary(nn.Module):
    """Has a second output in training mode, and a layer that is then dropped always."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.second, self.dropped = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.trunk(inputs)
        return hidden + self.second(hidden) if self.training else self.dropped(hidden)


def test_each_part_counts_by_the_mode_in_which_it_takes_more() -> None:
    network, inputs = Auxiliary(), torch.randn(1, WIDTH)
    found = count_flops(network, lambda: network(inputs), dict(network.named_children()))
    once = 2 * WIDTH * WIDTH
    assert found == (2 * once, {"trunk": once, "second": once, "dropped": once}, "")
    frozen = count_flops(network, lambda: network(inputs), dict(network.named_children()), frozen=("",))
    assert frozen.parts == {"trunk": once, "second": 0, "dropped": once}


class NeedsTargets(nn.Linear):
    """As detectors, in training mode it takes more than inputs."""

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            raise AssertionError("targets must not be None in training mode")
        return super().forward(inputs)


@pytest.mark.parametrize(
    ("network", "shape"),
    [
        (NeedsTargets(WIDTH, WIDTH), (2, WIDTH)),
        (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)), (1, WIDTH)),  # cannot train on one example
    ],
)
def test_what_does_not_run_in_training_mode_is_counted_in_evaluation_mode(
    network: nn.Module, shape: tuple[int, ...]
) -> None:
    assert counted(network, torch.zeros(shape)) == shape[0] * 2 * WIDTH * WIDTH
    assert network.training


def test_counting_leaves_no_hooks_and_modes_buffers_and_random_numbers_as_they_were() -> None:
    network = nn.Sequential(
        nn.utils.parametrizations.spectral_norm(nn.Linear(12, WIDTH)),
        nn.BatchNorm1d(WIDTH),
        nn.Dropout(0.5),
        nn.RReLU(),
        nn.Linear(WIDTH, WIDTH).eval(),
    )
    before = {name: value.clone() for name, value in network.state_dict().items()}
    modes = [module.training for module in network.modules()]
    random = torch.get_rng_state()
    inputs = torch.randn(3, 12, generator=torch.Generator().manual_seed(1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = count_flops(network, lambda: network(inputs), {"4": network[4]})
    assert found.parts == {"4": 3 * 2 * WIDTH * WIDTH}
    assert torch.equal(torch.get_rng_state(), random)
    assert [module.training for module in network.modules()] == modes
    for name, value in network.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in network.modules())


def test_a_growing_model_knows_what_its_host_takes_for_one_example() -> None:
    host = mlp()
    assert GrowingModel(host, ["layer1"], torch.zeros(3, 12)).host_flops == counted(host, torch.zeros(1, 12))


def test_parts_are_counted_over_all_their_calls() -> None:
    host, inputs = mlp(), torch.zeros(2, 12)
    found = count_flops(host, lambda: (host(inputs), host(inputs)), {"first": host.layer1, "all": host})
    assert found.parts == {"first": 2 * 2 * 2 * 12 * WIDTH, "all": found.total}
    assert count_flops(host, lambda: None, {"first": host.layer1}) == (0, {"first": 0}, "")


# What cannot be counted -----------------------------------------------------------------------------------------------


@torch.library.custom_op("esper_tests::multiply", mutates_args=())
def multiply(inputs: Tensor) -> Tensor:
    return inputs @ inputs.mT


OPAQUE = {
    "esper_tests::multiply": multiply,
    "aten::_linalg_svd": lambda inputs: torch.linalg.svd(inputs, full_matrices=False)[0],
    "aten::_native_multi_head_attention": lambda inputs: torch._native_multi_head_attention(
        *[inputs] * 3, WIDTH, 2, *map(torch.ones, [(3 * WIDTH, WIDTH), 3 * WIDTH, (WIDTH, WIDTH), WIDTH])
    )[0],
}


@pytest.mark.parametrize("name", OPAQUE)
def test_an_operation_without_a_formula_is_named_with_its_submodule(name: str) -> None:
    network = nn.Sequential(nn.Linear(WIDTH, WIDTH), Calls(OPAQUE[name]))
    found = count_flops(network, lambda: network(tokens()))
    assert found.uncounted == f"{name} in '1'"
    assert found.total == 2 * EXAMPLES * LENGTH * WIDTH**2


def test_quantised_layers_are_named() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        network = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(WIDTH, WIDTH)), {nn.Linear})
        found = count_flops(network, lambda: network(torch.zeros(2, WIDTH)))
    assert found == (0, {}, "quantized::linear_dynamic in '0'")


def test_counting_that_fails_says_so() -> None:
    ragged = torch.nested.nested_tensor([torch.ones(2, WIDTH), torch.ones(3, WIDTH)])
    network = nn.Linear(WIDTH, WIDTH)
    found = count_flops(network, lambda: network(ragged))
    assert found.uncounted.startswith("anything, since counting raises")


def test_an_operation_of_an_owners_is_counted_by_the_formula_that_its_owner_gives_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(flop_counter, "flop_registry", dict(flop_counter.flop_registry))
    flop_counter.register_flop_formula(torch.ops.esper_tests.multiply)(lambda shape, **_: 2 * shape.numel() * shape[-2])
    assert counted(Calls(multiply), tokens()) == 2 * EXAMPLES * LENGTH * LENGTH * WIDTH


def test_attaching_to_what_cannot_be_counted_warns_and_block_copies_still_fit() -> None:
    host = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Linear(WIDTH, WIDTH), Calls(multiply)))
    inputs = torch.randn(WIDTH, WIDTH)
    with pytest.warns(UserWarning, match=r"FLOPs of this host are unknown, .* esper_tests::multiply in '1.1'") as seen:
        model = esper.attach(host, {"1": ["block_copy"]}, inputs)
    assert seen[0].filename == __file__
    assert model.host_flops is None
    assert get("block_copy").cost_at(model.slots["1"].site).flops == 2 * WIDTH * WIDTH
