"""What tests grow: hosts and models by name, data, seeds and fossils, and a training loop."""

import io
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Self

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import esper
import tiny_transformers
from esper import Grower, GrowingModel
from esper.control.controller import Controller
from esper.growth.attach import Places, attach
from esper.growth.hooks import find_output_tensor
from esper.growth.inputs import Arguments, call_host
from esper.growth.persist import plant_structure
from esper.growth.slot import Seed
from esper.lifecycle.actions import Blend, Op
from esper.lifecycle.rules import Rules
from esper.population.population import NetworkSpec, PopulationConfig
from esper.serialization import pack_state

# Seeds and fossils that change the output.


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def draw_normal(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=generator(seed))


def plant(model: GrowingModel, slot: str, blueprint: str, blend: Blend = Blend.ADD, alpha: float = 0.7) -> Seed:
    """A seed as after much training."""
    seed = model.slots[slot].germinate(blueprint, generator(2), blend=blend, alpha=alpha)
    with torch.no_grad():
        for index, parameter in enumerate(seed.parameters()):
            parameter.add_(draw_normal(*parameter.shape, seed=100 + index) / 3)
    return seed


def fossilize(model: GrowingModel, slot: str, blueprint: str, blend: Blend = Blend.ADD) -> Seed:
    seed = plant(model, slot, blueprint, blend)
    model.slots[slot].fossilize()
    return seed


# Small hosts, with and without connections across their slots.


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, features: Tensor) -> Tensor:
        return torch.tanh(self.linear(features))


class Chain(nn.Module):
    """Nothing bypasses a slot."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = Layer(4), Layer(4), nn.Linear(4, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.second(self.first(inputs)))


class Residual(Chain):
    """What the first layer yields bypasses the second, whose slot therefore may not append to the batch."""

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        return self.head(hidden + self.second(hidden))


class InputSkip(Chain):
    """The input bypasses everything."""

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.second(self.first(inputs)) * inputs)


def make_small_population(kind: type[Chain], count: int) -> tuple[PopulationConfig, list[NetworkSpec]]:
    torch_seed = torch.Generator().manual_seed(0)

    def host() -> nn.Module:
        model = kind()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(generator=torch_seed)
        return model

    shared = PopulationConfig(
        kind(), ("first", "second"), ("mlp", "gate", "input_skip"), torch.zeros(2, 4), dtype=torch.float64
    )
    return shared, [NetworkSpec(host(), (4, 4), 0.05, seed) for seed in range(count)]


# Networks as practitioners have them: none of them knows that it will grow.


CLASSES = 5
EXAMPLES = 6
TOKENS = 8


class ResidualBlock(nn.Module):
    """He et al. 2016."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.norm1(self.conv1(images)).relu()
        return (images + self.norm2(self.conv2(hidden))).relu()


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.layer1 = ResidualBlock(8)
        self.layer2 = ResidualBlock(8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.layer2(self.layer1(self.stem(images))).mean((2, 3)))


class Attention(nn.Module):
    """Self-attention over ``[B, T, D]``, causal or not."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, tokens: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(tokens).chunk(3, -1)
        )
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        return self.out(attended.transpose(1, 2).flatten(2))


class TransformerBlock(nn.Module):
    """Pre-norm."""

    def __init__(self, width: int, *, causal: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, 2, causal=causal)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = tokens + self.attention(self.norm1(tokens))
        return tokens + self.mlp(self.norm2(tokens))


class VisionTransformer(nn.Module):
    """Dosovitskiy et al. 2021: patches, a class token, learned positions."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 4, stride=4)
        self.class_token = nn.Parameter(torch.randn(1, 1, 16) / 4)
        self.positions = nn.Parameter(torch.randn(1, 5, 16) / 4)
        self.blocks = nn.ModuleList(TransformerBlock(16, causal=False) for _ in range(2))
        self.head = nn.Linear(16, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.patches(images).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.class_token.expand(len(images), -1, -1), patches], 1) + self.positions
        for block in self.blocks:
            tokens = block(tokens)
        return self.head(tokens[:, 0])


class EncoderClassifier(nn.Module):
    """Around torch's own `nn.TransformerEncoder`; padding takes no part in the mean."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, tokens: Tensor, padding: Tensor | None = None) -> Tensor:
        encoded = self.encoder(tokens, src_key_padding_mask=padding)
        if padding is None:
            return self.head(encoded.mean(1))
        kept = (~padding).unsqueeze(-1)
        return self.head((encoded * kept).sum(1) / kept.sum(1))


class TupleClassifier(nn.Module):
    """A recurrent layer and torch's attention, which both return tuples."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(6, 8, batch_first=True)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, sequence: Tensor) -> Tensor:
        hidden, _ = self.gru(sequence)
        mixed, _ = self.attention(hidden, hidden, hidden, need_weights=False)
        return self.head((hidden + mixed)[:, -1])


class LstmClassifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 12, batch_first=True)
        self.projection = nn.Linear(12, 8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, sequence: Tensor) -> Tensor:
        return self.head(self.projection(self.lstm(sequence)[0]).mean(1))


class UNet(nn.Module):
    """Ronneberger et al. 2015, two scales: the first's features skip across all that follows. A class per pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU())
        self.bottom = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(6, 8, 3, padding=1), nn.ReLU())
        self.up = nn.ConvTranspose2d(8, 6, 2, stride=2)
        self.merge = nn.Sequential(nn.Conv2d(12, 6, 3, padding=1), nn.ReLU())
        self.head = nn.Conv2d(6, CLASSES, 1)

    def forward(self, images: Tensor) -> Tensor:
        fine = self.down(images)
        return self.head(self.merge(torch.cat([fine, self.up(self.bottom(fine))], 1)))


class TinyGpt(nn.Module):
    """Predicts the next of `CLASSES` characters."""

    def __init__(self) -> None:
        super().__init__()
        self.characters = nn.Embedding(CLASSES, 16)
        self.positions = nn.Embedding(TOKENS, 16)
        self.blocks = nn.ModuleList(TransformerBlock(16, causal=True) for _ in range(2))
        self.head = nn.Linear(16, CLASSES)

    def forward(self, text: Tensor) -> Tensor:
        tokens = self.characters(text) + self.positions(torch.arange(text.shape[1], device=text.device))
        for block in self.blocks:
            tokens = block(tokens)
        return self.head(tokens)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 12), nn.ReLU(), nn.Linear(12, 9), nn.ReLU(), nn.Linear(9, CLASSES))


def attach_mlp() -> GrowingModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return attach(mlp(), ["0", "2"], numbers(7))


class Decomposed(nn.Linear):
    """Torch cannot count its decomposition."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) * torch.linalg.svdvals(self.weight).amax()


def gpt2() -> nn.Module:
    return tiny_transformers.gpt2(
        vocab_size=CLASSES, n_positions=TOKENS, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )


def numbers(*shape: int) -> Tensor:
    return torch.randn(EXAMPLES, *shape, generator=torch.Generator().manual_seed(1))


def text() -> Tensor:
    return torch.randint(CLASSES, (EXAMPLES, TOKENS), generator=torch.Generator().manual_seed(1))


def padding() -> Tensor:
    """Bool ``[B, T]``: the first example is whole, each later one a token shorter."""
    return torch.arange(TOKENS) >= (TOKENS - torch.arange(EXAMPLES)).unsqueeze(1)


@dataclass(frozen=True)
class Host:
    """A network, where it is to grow, and something to learn."""

    name: str
    make: Callable[[], nn.Module]
    places: Places
    slots: tuple[str, ...]
    """The names that ``places`` stands for."""
    blueprint: str
    """One that serves the first slot."""
    arguments: Callable[[], Arguments]
    causal: bool = False
    fused: bool = False
    """Whether torch has a kernel for whole layers that it uses only where nobody hooks them; it rounds differently."""

    def network(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.make()

    def grown_by_hand(self) -> GrowingModel:
        """With a seed in the first slot that counts, and newborn ones in the others."""
        model = self.attached()
        plant(model, self.slots[0], self.blueprint)
        for slot in self.slots[1:]:
            model.slots[slot].germinate("norm", torch.Generator().manual_seed(4))
        return model

    def attached(self) -> GrowingModel:
        return attach(self.network(), self.places, self.arguments())


def outputs(network: nn.Module, arguments: Arguments) -> Tensor:
    """Logits ``[N, classes]``, whatever the network's way of returning them."""
    returned = find_output_tensor(call_host(network, arguments))
    return returned.movedim(1, -1).flatten(0, -2) if returned.dim() == 4 else returned.flatten(0, -2)


def classes(count: int) -> Tensor:
    """Arbitrary ones."""
    return (torch.arange(count) * 7 // 3) % CLASSES


def loss(network: nn.Module, arguments: Arguments) -> Tensor:
    """Mean cross-entropy against arbitrary classes."""
    logits = outputs(network, arguments)
    return F.cross_entropy(logits.float(), classes(len(logits)))


@torch.no_grad()
def score(network: nn.Module, arguments: Arguments) -> tuple[float, float]:
    """Loss and accuracy in eval mode."""
    was_training = network.training
    network.eval()
    logits = outputs(network, arguments)
    network.train(was_training)
    targets = classes(len(logits))
    return float(F.cross_entropy(logits, targets)), float((logits.argmax(-1) == targets).float().mean())


RESNET = Host(
    "resnet",
    ResNet,
    {"layer1": ["conv3x3", "gate"], "layer2.conv1": "auto", "layer2": ["norm"]},
    ("layer1", "layer2.conv1", "layer2"),
    "conv3x3",
    lambda: numbers(3, 8, 8),
)
HOSTS: tuple[Any, ...] = (
    Host("mlp", mlp, ["0", "2"], ("0", "2"), "mlp", lambda: numbers(7)),
    RESNET,
    Host(
        "vit",
        VisionTransformer,
        {r"re:blocks\.\d+": ["attention", "gate", "lowrank", "mlp", "norm", "token_mix"]},
        ("blocks.0", "blocks.1"),
        "attention",
        lambda: numbers(3, 8, 8),
    ),
    Host(
        "encoder",
        EncoderClassifier,
        [r"re:encoder\.layers\.\d+"],
        ("encoder.layers.0", "encoder.layers.1"),
        "mlp",
        lambda: numbers(TOKENS, 16),
        fused=True,
    ),
    Host(
        "encoder_with_padding",
        EncoderClassifier,
        [r"re:encoder\.layers\.\d+"],
        ("encoder.layers.0", "encoder.layers.1"),
        "mlp",
        lambda: {"tokens": numbers(TOKENS, 16), "padding": padding()},
        fused=True,
    ),
    Host("lstm", LstmClassifier, ["projection"], ("projection",), "lowrank", lambda: numbers(TOKENS, 6)),
    Host(
        "tuples",
        TupleClassifier,
        ["gru", "attention"],
        ("gru", "attention"),
        "lowrank",
        lambda: numbers(TOKENS, 6),
        fused=True,
    ),
    Host("unet", UNet, ["down", "bottom", "merge"], ("down", "bottom", "merge"), "depthwise", lambda: numbers(3, 8, 8)),
    Host(
        "gpt",
        TinyGpt,
        {r"re:blocks\.\d": ["attention", "lowrank", "mlp", "norm"]},
        ("blocks.0", "blocks.1"),
        "attention",
        text,
        causal=True,
    ),
    pytest.param(
        Host(
            "gpt2",
            gpt2,
            {r"re:.*\.h\.\d": ["attention", "lowrank", "mlp", "norm"]},
            ("transformer.h.0", "transformer.h.1"),
            "mlp",
            lambda: {"input_ids": text(), "use_cache": False},
            causal=True,
        ),
        marks=pytest.mark.slow,
    ),
)


every_host = pytest.mark.parametrize("host", HOSTS, ids=lambda host: host.name)


CAUSAL_HOSTS = tuple(host for host in HOSTS if (host if isinstance(host, Host) else host.values[0]).causal)
every_causal_host = pytest.mark.parametrize("host", CAUSAL_HOSTS, ids=lambda host: host.name)
"""Language models."""


# A small model that grows in a plain loop, with all that such a loop owns.


RINGS = 3
WIDTH = 8
SLOTS = {"0": ["mlp", "norm"], "2": ["mlp", "lowrank"]}


def make_data(examples: int = 96, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Points in three interleaved rings."""
    generator = torch.Generator().manual_seed(seed)
    points = torch.randn(examples, 4, generator=generator)
    return points, (points.norm(dim=1) * RINGS / math.pi).long().clamp(max=RINGS - 1)


def make_host(seed: int = 0) -> nn.Module:
    """Two hidden layers."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, RINGS))


class WithLoss(nn.Module):
    """`make_host` that returns its loss, as Hugging Face's models do."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.net = make_host(seed)

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.net(inputs)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


SLOTS_WITH_LOSS = {f"net.{name}": blueprints for name, blueprints in SLOTS.items()}


HELD = Rules(operations=(Op.WAIT, Op.GERMINATE))
"""What germinates is held for good."""


def make_growing(seed: int = 0, *, frozen: bool = False) -> GrowingModel:
    """`make_host` with two slots."""
    return esper.attach(make_host(seed), SLOTS, torch.zeros(2, 4), freeze_host=frozen)


@torch.no_grad()
def validate(model: nn.Module) -> tuple[float, float]:
    """Loss and accuracy on points of its own."""
    model.eval()
    inputs, labels = make_data(64, seed=1)
    logits = model(inputs)
    return float(F.cross_entropy(logits, labels)), float((logits.argmax(1) == labels).float().mean())


@torch.no_grad()
def validate_examples(model: nn.Module) -> tuple[Tensor, Tensor]:
    """Loss and hit of every validation example."""
    inputs, labels = make_data(64, seed=1)
    logits = model.eval()(inputs)
    return F.cross_entropy(logits, labels, reduction="none"), logits.argmax(1) == labels


def packed(state: dict[str, Any]) -> Tensor:
    """A grower's state but for what was spent: no two runs take the same seconds."""
    return pack_state({**state, "memory": {name: part for name, part in state["memory"].items() if name != "spending"}})


def remembered(grower: Grower) -> Tensor:
    """Such a state without that of torch's global generator, which trainers need not restore."""
    state = grower.state_dict()
    del state["memory"]["snapshot"]["generators"]
    return packed(state)


class Loop:
    """Model, optimizer, scheduler and grower."""

    def __init__(self, controller: str | Controller, model: GrowingModel | None = None, **options: Any) -> None:
        self.model = make_growing() if model is None else model
        self.optimizer = torch.optim.AdamW(self.model.parameter_groups(lr=1e-2))
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, max_lr=1e-2, total_steps=1000)
        told = {"evaluate": validate, "horizon": 20, **options}
        self.grower = Grower(self.model, self.optimizer, controller=controller, **told)
        self.inputs, self.labels = make_data()

    def epoch(self, told: Callable[[float], float] = float) -> esper.Decision:
        """Two minibatches and a decision with the training loss ``told(loss)``; the model is as finite as that."""
        self.model.train()
        total = 0.0
        for half in (slice(0, 48), slice(48, 96)):
            loss = F.cross_entropy(self.model(self.inputs[half]), self.labels[half])
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            total += loss.item() / 2
        if not math.isfinite(told(total)):
            with torch.no_grad():
                next(self.model.parameters()).fill_(math.nan)
        return self.grower.step(train_loss=told(total))

    def saved(self) -> dict[str, Any]:
        """All that a checkpoint needs."""
        return {
            "model": {name: tensor.clone() for name, tensor in self.model.state_dict().items()},
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "grower": self.grower.state_dict(),
        }

    @classmethod
    def resume(cls, saved: dict[str, Any], controller: str | Controller, **options: Any) -> Self:
        """In new objects, from what went through a file."""
        file = io.BytesIO()
        torch.save(saved, file)
        file.seek(0)
        state = torch.load(file, weights_only=True)
        model = make_growing(seed=5)
        plant_structure(model, state["grower"]["seeds"])
        loop = cls(controller, model, **options)
        for name in ("model", "optimizer", "scheduler", "grower"):
            getattr(loop, name).load_state_dict(state[name])
        return loop


def iterate_arrays(struct: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every array of nested named tuples, with a dotted name such as ``masks.slot``."""
    for name, part in struct._asdict().items():
        if isinstance(part, tuple):
            yield from iterate_arrays(part, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", part
