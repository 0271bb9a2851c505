"""Hosts that torch's deepcopy refuses: what can be copied all the same is, and the rest is one sentence."""

import copy
import pickle
import threading
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import spectral_norm, weight_norm

import esper.grower.spending
import esper.growth.export
from esper.errors import EsperError, ExportError
from esper.growth.model import GrowingModel

pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")


class Cached(nn.Linear):
    """A layer that keeps its last output."""

    last: Tensor | None = None

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        self.last = super().forward(input)
        return self.last


class CachedInList(nn.Linear):
    """A layer that keeps its outputs where nobody looks for them."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.outputs: list[Tensor] = []

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        self.outputs = [super().forward(input)]
        return self.outputs[0]


class Locked(nn.Linear):
    """A layer with a lock."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.lock = threading.Lock()


def growing(make: Callable[[int, int], nn.Module], blueprint: str) -> GrowingModel:
    """A model that has made a pass."""
    torch.manual_seed(0)
    host = nn.Sequential(nn.Sequential(make(4, 4), nn.ReLU()), nn.Linear(4, 2))
    model = esper.attach(host, {"0": [blueprint]}, torch.randn(3, 4))
    if blueprint != "block_copy":
        model.slots["0"].germinate(blueprint)
        model.slots["0"].fossilize()
    model(torch.randn(3, 4)).sum().backward()
    return model


def finalize(model: GrowingModel, _: Path) -> nn.Module:
    return model.finalize()


def export(model: GrowingModel, folder: Path) -> nn.Module:
    model.release()
    host = model.host
    with torch.enable_grad():
        host(torch.randn(3, 4))
    esper.growth.export.export(host, folder / "model.pt2", torch.randn(3, 4))
    return host


def copy_block(model: GrowingModel, _: Path) -> nn.Module:
    model.slots["0"].germinate("block_copy")
    return model


WAYS = {"finalize": finalize, "export": export, "block_copy": copy_block}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "make", [lambda *sizes: weight_norm(nn.Linear(*sizes)), lambda *sizes: spectral_norm(nn.Linear(*sizes)), Cached]
)
def test_results_of_a_pass_are_no_obstacle(make: Callable[[int, int], nn.Module], way: str, tmp_path: Path) -> None:
    model, inputs = growing(make, "block_copy" if way == "block_copy" else "norm"), torch.randn(5, 4)
    copied = WAYS[way](model, tmp_path).eval()
    copied(inputs).sum().backward()
    assert all(parameter.grad is not None for parameter in copied.parameters() if parameter.requires_grad)
    if way == "finalize":
        assert torch.allclose(copied(inputs), model.eval()(inputs), atol=1e-6)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", [CachedInList, Locked])
def test_what_cannot_be_copied_is_one_sentence(make: Callable[[int, int], nn.Module], way: str, tmp_path: Path) -> None:
    model = growing(make, "block_copy" if way == "block_copy" else "norm")
    with pytest.raises(EsperError, match=r"cannot be copied \(.*\): let modules keep no locks"):
        WAYS[way](model, tmp_path)


class TestTorchScript:
    @pytest.mark.parametrize("tool", [torch.jit.trace, torch.jit.script])
    @pytest.mark.parametrize("called", [True, False])
    def test_a_growing_model_is_refused(self, tool: Callable[..., object], *, called: bool) -> None:
        model = growing(nn.Linear, "norm")
        if not called:
            model.input_hook.inputs = None
        with pytest.raises(ExportError, match="a growing model cannot be exported or traced"):
            tool(model, torch.randn(3, 4))

    @pytest.mark.parametrize("blueprint", ["norm", "mlp", "input_skip"])
    def test_a_plain_model_can_be_traced_but_not_compiled(self, blueprint: str) -> None:
        plain = growing(nn.Linear, blueprint).finalize().eval()
        inputs = torch.randn(3, 4)  # torch.jit.trace writes the batch size into the graph
        for network in (plain, copy.deepcopy(plain), pickle.loads(pickle.dumps(plain))):
            traced = torch.jit.trace(network, torch.randn(3, 4))
            assert torch.allclose(traced(inputs), plain(inputs))
            for scripted in (network, nn.Sequential(network)):
                with pytest.raises(AttributeError, match="object has no attribute .__name__"):
                    torch.jit.script(scripted)

    def test_a_plain_model_without_what_grew_can_be_compiled(self) -> None:
        model = growing(nn.Linear, "norm")
        model.slots["0"].remove()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert torch.jit.script(model.finalize())(torch.randn(3, 4)).shape == (3, 2)
