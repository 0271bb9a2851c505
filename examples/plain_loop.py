"""Growth in a training loop of your own."""

import torch
from digits import digits, score, small_network
from torch.nn import functional as F
from torch.utils.data import DataLoader

import esper

EPOCHS = 20
SEEDS = 3
train, validation, test = digits()


def train_one_epoch(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """An ordinary epoch; returns the mean loss."""
    model.train()
    losses = []
    for inputs, labels in DataLoader(train, batch_size=50, shuffle=True):
        loss = F.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses) / len(losses)


def without_growth(seed: int) -> float:
    """Test accuracy."""
    model = small_network(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(EPOCHS):
        train_one_epoch(model, optimizer)
    return score(model, test)[1]


def with_growth(seed: int) -> float:
    """Test accuracy of the plain model that comes out."""
    model = esper.attach(small_network(seed), {"0": ["mlp"], "2": ["mlp"]}, example_input=train[:2][0])
    optimizer = torch.optim.AdamW(model.parameter_groups(lr=3e-3))
    grower = esper.Grower(
        model, optimizer, controller="heuristic", evaluate=lambda model: score(model, validation), horizon=EPOCHS
    )
    for _ in range(EPOCHS):
        decision = grower.step(train_loss=train_one_epoch(model, optimizer))
        if decision.changes:
            print(decision)
    print(grower.finish())
    print(model.summary())
    return score(model.finalize(), test)[1]


bare = [without_growth(seed) for seed in range(SEEDS)]
grown = [with_growth(seed) for seed in range(SEEDS)]
print("by seed:", *(f"{before:.3f} -> {after:.3f}" for before, after in zip(bare, grown, strict=True)))
print(f"accuracy without growth {sum(bare) / SEEDS:.3f}, with growth {sum(grown) / SEEDS:.3f}")
