"""What lies between two layers is found by calling them, and what treats units unlike is refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize

import esper
import tiny_transformers
from esper.errors import SlotError
from esper.growth.hidden import FUNCTIONS, LayerPair, find_hidden, find_pairs
from growth.growing import generator, random
from growth.hosts import EncoderClassifier

PAIR = LayerPair(("fc1",), "fc2")


class Between(nn.Module):
    """``fc2(function(fc1(x)))``."""

    def __init__(self, function: Callable[[Tensor], Tensor], **modules: nn.Module) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(5, 8), nn.Linear(8, 3)
        for name, module in modules.items():
            self.add_module(name, module)
        self.function = function if not isinstance(function, nn.Module) else None
        self.module = function if isinstance(function, nn.Module) else None

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2((self.function or self.module)(self.fc1(x)))


def steps_of(net: nn.Module, pair: LayerPair = PAIR, x: Tensor | None = None) -> list[tuple[str, str]]:
    inputs = random(4, 5) if x is None else x
    (hidden,) = find_hidden(net, [pair], lambda: net(inputs)).values()
    return [(type(step.module).__name__, step.name) for steps in hidden.steps for step in steps]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: str(function).lower())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_functions_are_told_apart(function: nn.Module, dtype: torch.dtype) -> None:
    net = Between(function.forward).to(dtype)
    inputs = random(16, 5).to(dtype)
    (hidden,) = find_hidden(net, [PAIR], lambda: net(inputs)).values()
    ((step,),) = hidden.steps
    assert repr(step.module) == repr(function)


def test_a_function_that_is_written_out_is_found() -> None:
    def gelu(x: Tensor) -> Tensor:
        return 0.5 * x * (1 + torch.erf(x / 2**0.5))

    assert steps_of(Between(gelu)) == [("GELU", "")]


def test_modules_are_found_in_containers_and_behind_functions() -> None:
    class Sine(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.sin(x)  # no function that is known

    inner = nn.Sequential(nn.BatchNorm1d(8), nn.Sequential(Sine(), nn.Dropout()))
    net = Between(lambda x: net.inner(F.relu(x)), inner=inner)
    assert steps_of(net) == [
        ("ReLU", ""),
        ("BatchNorm1d", "inner.0"),
        ("Sequential", "inner.1"),
    ]


def test_the_host_stays_as_it_is() -> None:
    net = nn.Sequential(
        nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(8, 3)
    ).train()
    net[3].eval()
    before, state = {name: value.clone() for name, value in net.state_dict().items()}, torch.get_rng_state()
    steps_of(net, LayerPair(("0",), "4"))
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    assert [part.training for part in net] == [True, True, True, False, True]
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in net.modules())


class ReadTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(5, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.fc1(x).relu()
        return self.fc2(hidden) + hidden


class Unconnected(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(x) + self.fc1(x)


class CalledTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.fc1(self.fc1(x)))


class ChangedInPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.fc1, self.fc2 = nn.Linear(5, 5), nn.Linear(5, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        features = self.before(x)
        hidden = self.fc1(features)
        return features.relu_() + self.fc2(hidden.relu())


class Tripled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return 3 * super().forward(input)


def hooked() -> nn.Module:
    net = Between(nn.ReLU())
    net.fc1.register_forward_hook(lambda *_: 2 * _[-1])
    return net


def normed() -> nn.Module:
    net = Between(nn.ReLU())
    parametrizations.weight_norm(net.fc2)
    return net


def computed_bias() -> nn.Module:
    net = Between(nn.ReLU())
    parametrize.register_parametrization(net.fc1, "bias", nn.Softplus())
    return net


def tripled() -> nn.Module:
    net = Between(nn.ReLU())
    net.fc2 = Tripled(8, 3)
    return net


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "layer norm": (lambda: Between(nn.LayerNorm(8)), r"'module' \(LayerNorm\) has parameters or buffers"),
    "layer norm without weights": (
        lambda: Between(nn.LayerNorm(8, elementwise_affine=False)),
        r"'module' \(LayerNorm\) mixes units",
    ),
    "softmax": (lambda: Between(nn.Softmax(-1)), r"'module' \(Softmax\) mixes units"),
    "slopes of units": (lambda: Between(nn.PReLU(8)), r"'module' \(PReLU\) has parameters"),
    "of fixed width": (
        lambda: Between(nn.Sequential(nn.Unflatten(1, (2, 4)), nn.Flatten())),
        r"'module.0' \(Unflatten\) mixes units",
    ),
    "other function": (lambda: Between(lambda x: torch.sin(x).cumsum(-1)), "no function of each unit that is known"),
    "clamped": (lambda: Between(lambda x: x.relu().clamp(max=20)), "ReLU near zero, but not at large values"),
    "clamped GELU": (lambda: Between(lambda x: F.gelu(x).clamp(max=30)), "GELU near zero, but not at large values"),
    "behind a module": (
        lambda: Between(nn.Sequential(nn.ReLU(), nn.LayerNorm(8))),
        r"'module.1' \(LayerNorm\) has parameters",
    ),
    "read twice": (ReadTwice, "read elsewhere"),
    "unconnected": (Unconnected, "does not run after|read elsewhere"),
    "called twice": (CalledTwice, "called 2 times"),
    "input changed": (ChangedInPlace, "input of the first layer is changed in place"),
    "hooked": (hooked, "a hook on 'fc1'"),
    "weight norm": (normed, r"'fc2' \(ParametrizedLinear\) is no plain"),
    "computed bias": (computed_bias, r"'fc1' \(ParametrizedLinear\) is no plain"),
    "own forward": (tripled, r"'fc2' \(Tripled\) is no plain"),
    "groups": (
        lambda: nn.Sequential(nn.Conv1d(5, 10, 1, groups=5), nn.ReLU(), nn.Conv1d(10, 3, 1)),
        r"'0' \(Conv1d\) is no plain",
    ),
    "norm of positions": (
        lambda: nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)),
        r"channels of '1' \(BatchNorm1d\) are the second axis",
    ),
    "channels elsewhere": (
        lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Conv1d(5, 3, 1)),
        "channels last",
    ),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED.keys())
def test_what_does_not_treat_units_alike_is_refused_by_name(case: tuple[Callable[[], nn.Module], str]) -> None:
    net, message = case[0](), case[1]
    place: Any = ("0", "2") if isinstance(net, nn.Sequential) else ("fc1", "fc2")
    x = random(4, 5)
    if isinstance(net, nn.Sequential):
        x = random(4, 5, 6)
    with pytest.raises(SlotError, match=message):
        esper.attach(net, {place: ["units_2"]}, x)
    esper.attach(net, [place[0]] if message != "called 2 times" else [place[1]], x)  # it has no slot yet


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ({("0", "9"): ["units"]}, "no submodule '9'"),
        ({("0", "2"): "auto"}, "name the blueprints"),
        ({("0", "2"): ["mlp"]}, "no blueprint for units is given"),
        ({("0",): ["units"]}, "give a list of submodules' names"),
        ({(): ["units"]}, "give a list of submodules' names"),
        ({"0": ["units"]}, "has no two linear layers"),
        ({"nine": ["units"]}, "no submodule 'nine'"),
        ({("0", "2"): ["units"], "2": ["mlp"]}, "which already has a slot"),
        ({("0", "2", "4"): ["units"]}, "different inputs"),
        ({("0", "2", "2", "4"): ["units"]}, "by two of one width"),
    ],
)
def test_places_that_are_none_are_refused(places: Any, message: str) -> None:
    net = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    with pytest.raises(SlotError, match=message):
        esper.attach(net, places, random(4, 5))


def test_several_pairs_in_a_submodule_are_listed() -> None:
    net = nn.Sequential(nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)))
    with pytest.raises(SlotError, match=r"holds 2 pairs .*\('0.0', '0.2'\), \('0.2', '0.4'\)"):
        esper.attach(net, {"0": ["units"]}, random(4, 5))


def test_one_slot_behind_a_layer_is_enough() -> None:
    net = nn.Sequential(nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)))
    with pytest.raises(SlotError, match="the slot of '0' is behind '0.2'"):
        esper.attach(net, {"0": ["units"], "0.2": ["mlp"]}, random(4, 5))


def test_two_submodules_around_one_pair_are_refused() -> None:
    net = nn.Sequential(nn.Sequential(nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))))
    with pytest.raises(SlotError, match=r"the slot of '0.0' is behind '0.0.2'"):
        esper.attach(net, {"0": ["units"], "0.0": ["units"]}, random(4, 5))


def test_units_grow_where_padded_tokens_are_nested_tensors() -> None:
    host = EncoderClassifier().eval()
    tokens, padding = random(3, 6, 16), torch.zeros(3, 6, dtype=torch.bool)
    padding[1, 4:] = True
    places: Any = {f"encoder.layers.{layer}": ["units_3"] for layer in (0, 1)}
    with pytest.raises(SlotError, match="leave padding out of the example input"), torch.no_grad():
        esper.attach(copy.deepcopy(host), places, (tokens, padding))
    model = esper.attach(host, places, tokens)
    for slot in model.slots.values():
        for parameter in slot.germinate("units_3", generator(1), alpha=1.0).parameters():
            nn.init.normal_(parameter, generator=generator(2))
        slot.fossilize()
    plain = model.finalize().eval()
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(tokens, padding), plain(tokens, padding))


IDS = torch.randint(0, 20, (2, 6), generator=generator(0))
MODELS: dict[str, tuple[Callable[..., nn.Module], str, str, str]] = {
    "gpt2": (tiny_transformers.gpt2, r"re:transformer\.h\.\d+\.mlp", "n_inner", "c_proj"),
    "llama": (tiny_transformers.llama, r"re:.*\.mlp", "intermediate_size", "down_proj"),
    "qwen2": (tiny_transformers.qwen2, r"re:.*\.mlp", "intermediate_size", "down_proj"),
    "gemma": (tiny_transformers.gemma, r"re:.*\.mlp", "intermediate_size", "down_proj"),
    "phi": (tiny_transformers.phi, r"re:.*\.mlp", "intermediate_size", "fc2"),
    "gpt_neox": (tiny_transformers.gpt_neox, r"re:.*\.mlp", "intermediate_size", "dense_4h_to_h"),
    "bert": (partial(tiny_transformers.bert, num_hidden_layers=2), r"re:.*\.layer\.\d+", "intermediate_size", "dense"),
    "vit": (partial(tiny_transformers.vit, num_hidden_layers=2), r"re:.*\.mlp", "intermediate_size", "fc2"),
}


def grown(name: str, places: Any) -> tuple[Any, Any, Tensor]:
    """A growing model with 3 units in each slot, the plain one, and its input."""
    torch.manual_seed(0)
    host = MODELS[name][0]().double().eval()
    x = random(2, 3, 8, 8).double() if name == "vit" else IDS
    model = esper.attach(host, places, x)
    for number, slot in enumerate(model.slots.values()):
        seed = slot.germinate("units_3", generator(number), alpha=0.5)
        for parameter in seed.parameters():
            nn.init.normal_(parameter)
        slot.fossilize()
    return model, model.finalize(), x


@pytest.mark.landing
@pytest.mark.parametrize("name", MODELS)
def test_mlps_of_transformers_are_found_and_saved_by_their_configuration(name: str, tmp_path: Any) -> None:
    _, pattern, setting, last = MODELS[name]
    model, plain, x = grown(name, {pattern: ["units_3"]})
    assert len(model.slots) == 2
    assert all(slot.endswith(last) for slot in model.slots)
    torch.testing.assert_close(plain(x).logits, model(x).logits, rtol=1e-10, atol=1e-10)
    width = getattr(model.host.config, setting) or 64
    assert getattr(plain.config, setting) == width + 3
    plain.save_pretrained(tmp_path)
    loaded = type(plain).from_pretrained(tmp_path, dtype=torch.float64).eval()
    torch.testing.assert_close(loaded(x).logits, plain(x).logits, rtol=1e-10, atol=1e-10)


def test_a_configuration_with_one_width_cannot_state_two() -> None:
    _, plain, _ = grown("gpt2", {"transformer.h.0.mlp": ["units_3"]})
    with pytest.raises(KeyError, match="would lose what grew here"):
        plain.save_pretrained("nowhere")


def test_generation_with_a_cache_is_that_of_the_wider_model() -> None:
    model, plain, x = grown("llama", {r"re:.*\.mlp": ["units_3"]})
    expected = model.generate(x, max_new_tokens=4, do_sample=False)
    assert torch.equal(plain.generate(x, max_new_tokens=4, do_sample=False), expected)


def test_pairs_in_a_submodule_are_found_by_calling_it() -> None:
    host = tiny_transformers.llama().eval()
    pairs = find_pairs(host, ["model.layers.1.mlp"], lambda: host(IDS))
    path = "model.layers.1.mlp"
    assert pairs == {path: LayerPair((f"{path}.gate_proj", f"{path}.up_proj"), f"{path}.down_proj")}
