"""A small decoder, its tokens, and a step of its training, for ladders."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from zoo.hosts import TransformerBlock

CLASSES, LENGTH, WIDTH = 11, 6, 8
DEPTHS = (1, 2, 4)
STEPS = 20


class Decoder(nn.Module):
    """Indices int64 ``[B, T]`` to logits ``[B, T, CLASSES]``; it drops out."""

    def __init__(self, depth: int = 1, *, dropout: float = 0.1, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed, self.drop = nn.Embedding(CLASSES, WIDTH), nn.Dropout(dropout)
        self.blocks = nn.ModuleList(TransformerBlock(WIDTH, 2, causal=True) for _ in range(depth))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, indices: Tensor) -> Tensor:
        hidden = self.drop(self.embed(indices))
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def tokens(count: int = 32, seed: int = 1) -> Tensor:
    """Sequences that count up, each by a step of its own."""
    generator = torch.Generator().manual_seed(seed)
    starts, steps = (torch.randint(CLASSES, (count, 1), generator=generator) for _ in range(2))
    return (starts + steps * torch.arange(LENGTH)) % CLASSES


def compute_loss(model: nn.Module, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch)[:, :-1].flatten(0, 1), batch[:, 1:].flatten())


def learn(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
    loss = compute_loss(model, batch)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def evaluate(model: nn.Module) -> Tensor:
    return compute_loss(model, tokens(16, seed=2))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """With a group without weight decay."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    groups = [{"params": matrices, "lr": 1e-2}, {"params": others, "lr": 2e-2, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, weight_decay=0.1)
