"""Networks of sequences, sets and graphs."""

from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint

from conformance.kind import CLASSES, EXAMPLES, TOKENS, WIDTH, Kind, Minibatch, classified, text
from factories import TinyGpt


class Gru(nn.Module):
    """Sequences ``[B, T, D]`` of the given lengths, packed; the last state tells the class."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, WIDTH)
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.project = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, inputs: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.embed(inputs), lengths.cpu(), batch_first=True, enforce_sorted=False)
        _, state = self.gru(packed)
        return self.head(self.project(state[-1]).tanh())


class Lstm(nn.Module):
    """The last output tells the class."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, WIDTH, batch_first=True, bidirectional=True)
        self.project = nn.Linear(2 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs, _ = self.lstm(inputs)
        return self.head(self.project(outputs).relu()[:, -1])


def conv1d() -> nn.Module:
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv1d(4, WIDTH, 3, padding=1),
            relu=nn.ReLU(),
            conv2=nn.Conv1d(WIDTH, WIDTH, 3, padding=1),
            norm=nn.BatchNorm1d(WIDTH),
            pool=nn.AdaptiveAvgPool1d(1),
            flat=nn.Flatten(),
            head=nn.Linear(WIDTH, CLASSES),
        )
    )


class CharLm(TinyGpt):
    """A language model; ``tied``: the embedding is the head. It may save memory."""

    def __init__(self, *, tied: bool = False, checkpointed: bool = False) -> None:
        super().__init__()
        if tied:
            self.head.weight = self.characters.weight
        self.checkpointed = checkpointed

    def forward(self, text: Tensor) -> Tensor:
        tokens = self.characters(text) + self.positions(torch.arange(text.shape[1], device=text.device))
        for block in self.blocks:
            is_saving = self.checkpointed and self.training
            tokens = checkpoint(block, tokens, use_reentrant=False) if is_saving else block(tokens)
        return self.head(tokens)


def next_tokens(generator: torch.Generator) -> Minibatch:
    tokens = text(generator, length=TOKENS + 1)
    return Minibatch(tokens[:, :-1], tokens[:, 1:])


class Encoder(nn.Module):
    """torch's own encoder over tokens ``[B, T, D]``, with a mask of padding that is true where there is nothing."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
        self.embed = nn.Linear(4, WIDTH)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor, src_key_padding_mask: Tensor) -> Tensor:
        encoded = self.encoder(self.embed(tokens), src_key_padding_mask=src_key_padding_mask)
        return self.head(encoded[:, 0])


def with_padding(generator: torch.Generator) -> Minibatch:
    tokens = torch.randn(EXAMPLES, TOKENS, 4, generator=generator)
    lengths = torch.randint(2, TOKENS + 1, (EXAMPLES,), generator=generator)
    padding = torch.arange(TOKENS) >= lengths[:, None]
    return Minibatch({"tokens": tokens, "src_key_padding_mask": padding}, tokens[:, 0].argmax(1))


def more_padding(minibatch: Minibatch, more: int) -> Minibatch:
    inputs = dict(minibatch.inputs)
    inputs["tokens"] = torch.cat((inputs["tokens"], torch.ones(EXAMPLES, more, 4)), 1)
    inputs["src_key_padding_mask"] = F.pad(inputs["src_key_padding_mask"], (0, more), value=True)
    return minibatch._replace(inputs=inputs)


def with_lengths(generator: torch.Generator) -> Minibatch:
    tokens = torch.randn(EXAMPLES, TOKENS, 4, generator=generator)
    lengths = torch.randint(1, TOKENS + 1, (EXAMPLES,), generator=generator)
    return Minibatch((tokens, lengths), tokens[:, 0].argmax(1))


def later_steps(minibatch: Minibatch, more: int) -> Minibatch:
    """Beyond the lengths, which stay."""
    sequences, lengths = minibatch.inputs
    return minibatch._replace(inputs=(torch.cat((sequences, torch.ones(EXAMPLES, more, 4)), 1), lengths))


class MessagePassing(nn.Module):
    """Kipf and Welling 2017, over a dense normalised adjacency ``[B, N, N]``."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inner, outer)

    def forward(self, nodes: Tensor, adjacency: Tensor) -> Tensor:
        return (adjacency @ self.linear(nodes)).relu()


class GraphNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = MessagePassing(4, WIDTH), MessagePassing(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, nodes: Tensor, adjacency: Tensor) -> Tensor:
        return self.head(self.conv2(self.conv1(nodes, adjacency), adjacency).mean(1))


def graphs(generator: torch.Generator) -> Minibatch:
    nodes = torch.randn(EXAMPLES, TOKENS, 4, generator=generator)
    edges = torch.rand(EXAMPLES, TOKENS, TOKENS, generator=generator) > 0.5
    adjacency = (edges | edges.transpose(1, 2) | torch.eye(TOKENS, dtype=torch.bool)).float()
    return Minibatch((nodes, adjacency / adjacency.sum(-1, keepdim=True)), nodes.mean(1).argmax(1))


class DeepSets(nn.Module):
    """Zaheer et al. 2017."""

    def __init__(self) -> None:
        super().__init__()
        self.phi = nn.Sequential(nn.Linear(4, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        self.rho = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES))

    def forward(self, elements: Tensor) -> Tensor:
        return self.rho(self.phi(elements).sum(1))


class SetTransformer(nn.Module):
    """Attention over the elements of a set, through torch's own layer, which returns a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.ff = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, elements: Tensor) -> Tensor:
        x = self.embed(elements)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.head((x + self.ff(x).relu()).mean(1))


SETS = classified(TOKENS, 4)
KINDS = (
    Kind("gru_packed", Gru, {"embed": ["mlp"], "project": ["lowrank"]}, with_lengths, padded=later_steps),
    Kind("lstm", Lstm, {"lstm": ["lowrank", "norm"], "project": ["lowrank", "mlp"]}, classified(TOKENS, 4)),
    Kind("conv1d", conv1d, {"conv1": ["conv1x1"], "norm": ["depthwise"]}, classified(4, 9)),
    Kind("char_lm", CharLm, {"blocks.0": ["attention", "mlp"], "blocks.1": ["mlp"]}, next_tokens),
    Kind("tied_weights", lambda: CharLm(tied=True), {"blocks.0": ["mlp"], "blocks.1": ["lowrank"]}, next_tokens),
    Kind(
        "checkpointing",
        lambda: CharLm(checkpointed=True),
        {"blocks.0": ["mlp"], "blocks.1.mlp": ["lowrank"]},
        next_tokens,
    ),
    Kind(
        "encoder_with_padding",
        Encoder,
        {"encoder.layers.0": ["mlp"], "encoder.layers.1": ["lowrank"]},
        with_padding,
        padded=more_padding,
    ),
    Kind("graph", GraphNet, {"conv1": ["mlp"], "conv2": ["lowrank"]}, graphs),
    Kind("deep_sets", DeepSets, {"phi": ["mlp"], "rho.0": ["lowrank"]}, SETS),
    Kind("set_transformer", SetTransformer, {"embed": ["attention"], "attention": ["lowrank"]}, SETS),
)
