"""Growth in a training loop of your own."""

import torch
from digits import digits, score, small_network
from torch.nn import functional as F
from torch.utils.data import DataLoader

import esper

EPOCHS = 20
train, validation, test = digits()


def train_one_epoch(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """An ordinary epoch; returns the mean loss."""
    model.train()
    losses = []
    for inputs, labels in DataLoader(train, batch_size=50, shuffle=True, generator=shuffling):
        loss = F.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses) / len(losses)


shuffling = torch.Generator().manual_seed(0)
bare = small_network()
optimizer = torch.optim.AdamW(bare.parameters(), lr=3e-3)
for _ in range(EPOCHS):
    train_one_epoch(bare, optimizer)

shuffling.manual_seed(0)
model = esper.attach(small_network(), {"1": ["mlp"], "3": ["mlp"]}, example_input=train[:2][0])
optimizer = torch.optim.AdamW(model.parameter_groups(lr=3e-3))
grower = esper.Grower(
    model, optimizer, controller="heuristic", evaluate=lambda model: score(model, validation), horizon=EPOCHS
)
for _ in range(EPOCHS):
    decision = grower.step(train_loss=train_one_epoch(model, optimizer))
    if decision.changes:
        print(decision)

print(model.summary())
plain = model.finalize()
print(f"accuracy without growth {score(bare, test)[1]:.3f}, with growth {score(plain, test)[1]:.3f}")
