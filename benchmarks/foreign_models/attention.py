"""Models of tokens: a ViT, an MLP-Mixer, a GPT, an encoder for padded sequences and a forecaster."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foreign_models.problem import Problem, Recipe, Splits, floats, split, token_cross_entropy
from foreign_models.sources import SHAPES, SIDE, read_help, split_digits, split_help, split_shapes


class Block(nn.Module):
    """Attention and an MLP, each behind a LayerNorm and beside a skip: ``[B, T, D]`` to the same."""

    def __init__(self, width: int, heads: int, *, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        query, key, value = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        x = x + self.proj(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class SmallViT(nn.Module):
    """Images ``[B, 1, 8, 8]`` as 16 patches to logits ``[B, 10]``."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(1, width, 2, stride=2)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, 17, width))
        self.blocks = nn.Sequential(Block(width, 2), Block(width, 2))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.patch_embed(images).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.cls_token.expand(len(images), -1, -1), patches], dim=1) + self.pos_embed
        return self.head(self.norm(self.blocks(tokens))[:, 0])


class MixerBlock(nn.Module):
    """An MLP over tokens and one over channels, each behind a LayerNorm and beside a skip."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.token_mlp = nn.Sequential(nn.Linear(tokens, 16), nn.GELU(), nn.Linear(16, tokens))
        self.channel_mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.token_mlp(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channel_mlp(self.norm2(x))


class Mixer(nn.Module):
    """Images ``[B, 1, 20, 20]`` as 25 patches to logits ``[B, 5]``."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, SIDE // 5, stride=SIDE // 5)
        self.blocks = nn.Sequential(MixerBlock(25, width), MixerBlock(25, width))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, len(SHAPES))

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.patches(images).flatten(2).transpose(1, 2))).mean(1))


CONTEXT = 32
"""Characters that the GPT sees."""


class SmallGPT(nn.Module):
    """Characters, int64 ``[B, T]``, to logits of the next one, ``[B, T, vocabulary]``."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        _, vocabulary = read_help()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(CONTEXT, width)
        self.h = nn.ModuleList(Block(width, 2, causal=True) for _ in range(2))
        self.ln_f, self.lm_head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, characters: Tensor) -> Tensor:
        x = self.wte(characters) + self.wpe(torch.arange(characters.shape[1], device=characters.device))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


LONGEST, WORDS = 24, 12


class PaddedEncoder(nn.Module):
    """Sequences of words from 1 on, int64 ``[B, T]`` with zeros at their end, to logits ``[B, 2]``."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS + 1, width, padding_idx=0)
        self.position = nn.Parameter(0.1 * torch.randn(LONGEST, width))
        layer = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.1, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 2)

    def forward(self, words: Tensor) -> Tensor:
        padding = words == 0
        states = self.encoder(self.embed(words) + self.position, src_key_padding_mask=padding)
        counted = (~padding).unsqueeze(-1)
        return self.head((states * counted).sum(1) / counted.sum(1))


def split_sentences(seed: int) -> Splits:
    """Does the word that comes first come again before the sentence is over?"""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(6, LONGEST + 1, size=2400)
    words = rng.integers(1, WORDS + 1, size=(len(lengths), LONGEST))
    # In half of the sentences the first word comes nowhere else.
    alone = rng.random(len(lengths)) < 0.5
    others = 1 + (words[:, :1] - 1 + rng.integers(1, WORDS, size=words.shape)) % WORDS
    others[:, 0] = words[:, 0]
    words = np.where(alone[:, None], others, words)
    words[np.arange(LONGEST) >= lengths[:, None]] = 0
    labels = (words[:, 1:] == words[:, :1]).any(1).astype(np.int64)
    return split(torch.from_numpy(words), torch.from_numpy(labels), seed, 400, 700)


PAST, FUTURE = 32, 4


class Forecaster(nn.Module):
    """The last 32 values of a series, ``[B, 32]``, to the four that follow, ``[B, 4]``."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Linear(4, width)
        self.position = nn.Parameter(0.1 * torch.randn(PAST // 4, width))
        self.block1, self.block2 = Block(width, 2), Block(width, 2)
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, FUTURE))

    def forward(self, series: Tensor) -> Tensor:
        tokens = self.embed(series.unflatten(1, (-1, 4))) + self.position
        return self.head(self.block2(self.block1(tokens)).mean(1))


def split_series(seed: int) -> Splits:
    """Noisy measurements of pendulums that are driven at random."""
    rng = np.random.default_rng(seed)
    count, length = 1800, PAST + FUTURE
    angle, speed = rng.uniform(-2, 2, count), rng.uniform(-2, 2, count)
    drive, phase = rng.uniform(0.5, 1.5, count), rng.uniform(0, 2 * np.pi, count)
    values = []
    for step in range(length):
        # Four steps of Euler's method for each value that is seen.
        for part in range(4):
            force = drive * np.sin(0.6 * (step + part / 4) + phase)
            speed += 0.1 * (force - 2 * np.sin(angle) - 0.1 * speed)
            angle = angle + 0.1 * speed
        values.append(np.sin(angle) + 0.05 * rng.standard_normal(count))
    series = floats(np.stack(values, axis=1))
    return split(series[:, :PAST], series[:, PAST:], seed, 300, 500)


PROBLEMS = (
    Problem(
        name="vit",
        build=SmallViT,
        data=split_digits,
        task="classification",
        loss=F.cross_entropy,
        recipe=Recipe(epochs=25, batch_size=50, learning_rate=2e-3, optimizer="adamw", weight_decay=0.05, cosine=True),
        slots={r"re:blocks\.\d": ["mlp", "attention", "lowrank"]},
    ),
    Problem(
        name="mixer",
        build=Mixer,
        data=split_shapes,
        task="classification",
        loss=F.cross_entropy,
        recipe=Recipe(epochs=20, batch_size=50, learning_rate=3e-3, optimizer="adamw", weight_decay=0.01),
        slots={r"re:blocks\.\d": "auto"},
    ),
    Problem(
        name="gpt",
        build=SmallGPT,
        data=lambda seed: split_help(seed, CONTEXT),
        task="language_modelling",
        loss=token_cross_entropy,
        recipe=Recipe(epochs=16, batch_size=50, learning_rate=3e-3, optimizer="adamw", weight_decay=0.1, clip_norm=1.0),
        slots={r"re:h\.\d": ["mlp", "attention"]},
    ),
    Problem(
        name="padded_encoder",
        build=PaddedEncoder,
        data=split_sentences,
        task="classification",
        loss=F.cross_entropy,
        recipe=Recipe(epochs=20, batch_size=50, learning_rate=3e-3, optimizer="adamw"),
        slots={r"re:encoder\.layers\.\d": ["mlp", "lowrank"]},
    ),
    Problem(
        name="forecaster",
        build=Forecaster,
        data=split_series,
        task="regression",
        loss=F.mse_loss,
        recipe=Recipe(epochs=25, batch_size=50, learning_rate=2e-3, optimizer="adamw", cosine=True),
        slots={"block1": ["mlp", "attention", "lowrank"], "block2": ["mlp", "attention", "lowrank"]},
    ),
)
