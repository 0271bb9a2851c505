"""Hosts that mask padding or cache the past, each called with whole examples or with the same ones padded."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tiny_transformers
from esper.growth.attach import attach
from esper.growth.hooks import find_output_tensor
from esper.growth.model import GrowingModel

VOCABULARY, EXAMPLES, TOKENS, PADDING, WIDTH = 13, 3, 6, 4, 16


class TorchEncoder(nn.Module):
    """Around torch's own layers; one output per token."""

    def __init__(self, *, nested: bool = False) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, tokens: Tensor, padding: Tensor | None = None) -> Tensor:
        return self.head(self.encoder(tokens, src_key_padding_mask=padding))


class HandMade(nn.Module):
    """Attention by hand, with arguments whose names are no hint."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, tokens: Tensor, here: Tensor | None = None) -> Tensor:
        hidden = self.first(tokens)
        scores = hidden @ hidden.mT / 4
        if here is not None:
            scores = scores.masked_fill(~here.unsqueeze(1), -torch.inf)
        return self.head(scores.softmax(-1) @ hidden)


class Inner(nn.Module):
    """Makes masks of its own, and hands them to its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, text: Tensor) -> Tensor:
        return self.head(self.layer(self.embedding(text), src_key_padding_mask=text == 0))


def bert() -> nn.Module:
    return tiny_transformers.bert(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=2,
        intermediate_size=32,
        max_position_embeddings=TOKENS + PADDING,
        initializer_range=0.3,
    )


def gpt2() -> nn.Module:
    return tiny_transformers.gpt2(
        vocab_size=VOCABULARY, n_positions=2 * TOKENS, n_embd=WIDTH, initializer_range=0.3, pad_token_id=0
    )


def numbers() -> Tensor:
    return torch.randn(EXAMPLES, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))


def text() -> Tensor:
    """Without zeros, which pad it."""
    return torch.randint(1, VOCABULARY, (EXAMPLES, TOKENS), generator=torch.Generator().manual_seed(1))


def lengthened(tensor: Tensor, value: float) -> Tensor:
    return torch.cat([tensor, tensor.new_full((EXAMPLES, PADDING, *tensor.shape[2:]), value)], 1)


@dataclass(frozen=True)
class PaddedHost:
    """A host, and arguments for it; outputs are compared at the positions of the whole examples."""

    name: str
    make: Callable[[], nn.Module]
    slots: tuple[str, ...]
    tokens: Callable[[], dict[str, Tensor]]
    """What it reads."""
    mask: str | None = None
    """Name of the argument that masks padding; None: it finds padding by itself."""
    masked: bool = True
    """What stands at padding."""
    kind: torch.dtype = torch.bool
    named: bool = True
    """Whether the name of its mask is a hint."""

    def network(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.make().eval()

    def whole(self) -> dict[str, Tensor]:
        """Examples of one length."""
        return self.tokens()

    def unpadded(self) -> dict[str, Tensor]:
        """The same, with a mask that masks nothing."""
        return {**self.tokens(), **self._mask(0)}

    def padded(self) -> dict[str, Tensor]:
        """The same, with padding that is masked."""
        longer = {
            name: lengthened(tensor, 5.0 if tensor.is_floating_point() else 0) for name, tensor in self.tokens().items()
        }
        return {**longer, **self._mask(PADDING)}

    def _mask(self, padding: int) -> dict[str, Tensor]:
        if self.mask is None:
            return {}
        at_padding = torch.arange(TOKENS + padding).expand(EXAMPLES, -1) >= TOKENS
        return {self.mask: (at_padding if self.masked else ~at_padding).to(self.kind)}

    def attached(self, arguments: dict[str, Tensor] | None = None, **options: Any) -> GrowingModel:
        return attach(self.network(), list(self.slots), arguments or self.unpadded(), **options).eval()


def outputs(network: nn.Module, arguments: dict[str, Tensor]) -> Tensor:
    """At the positions of the whole examples, or of the examples as such."""
    returned = find_output_tensor(network(**arguments))
    return returned[:, :TOKENS] if returned.dim() == 3 else returned


TORCH = PaddedHost(
    "torch", TorchEncoder, ("encoder.layers.0", "encoder.layers.1"), lambda: {"tokens": numbers()}, "padding"
)
BERT = PaddedHost(
    "bert",
    bert,
    ("bert.embeddings", "bert.encoder.layer.0", "bert.encoder.layer.1.attention.output.dense"),
    lambda: {"input_ids": text()},
    "attention_mask",
    masked=False,
    kind=torch.long,
)
GPT2 = PaddedHost(
    "gpt2",
    gpt2,
    ("transformer.h.0", "transformer.h.1.mlp"),
    lambda: {"input_ids": text()},
    "attention_mask",
    masked=False,
    kind=torch.long,
)
HAND_MADE = PaddedHost(
    "hand-made", HandMade, ("first",), lambda: {"tokens": numbers()}, "here", masked=False, named=False
)
INNER = PaddedHost("inner", Inner, ("embedding", "layer"), lambda: {"text": text()})
PADDED_HOSTS = (TORCH, BERT, GPT2, HAND_MADE, INNER)
every_padded_host = pytest.mark.parametrize("host", PADDED_HOSTS, ids=lambda host: host.name)
