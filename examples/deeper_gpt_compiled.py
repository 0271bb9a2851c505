"""A GPT-2 that grows deeper under `torch.compile`: every structure is compiled before training begins."""

import torch
from counting import network, score, sequences
from torch import nn

import esper

EPOCHS, BATCH = 12, 32
BACKEND = "aot_eager"
"""Compiles fast and everywhere; "inductor", the default of torch, makes code that is fast, and wants a C++ compiler."""
train, validation, test = (sequences(number, seed) for seed, number in enumerate((512, 128, 256)))


def fitted(model: nn.Module, parameters: object, *, grow: bool) -> nn.Module:
    """The model, trained for `EPOCHS`."""
    optimizer = torch.optim.AdamW(parameters, lr=3e-3)
    compiled = torch.compile(model, backend=BACKEND)

    def learn(batch: torch.Tensor) -> float:
        model.train()
        loss = compiled(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        return loss.detach().item()

    def evaluate(_: nn.Module) -> tuple[float, float]:
        model.eval()
        return score(compiled, validation)

    grower = None
    if grow:
        grower = esper.Grower(model, optimizer, controller="all_at_start", evaluate=evaluate, horizon=EPOCHS)
        structures = grower.rehearse(lambda: learn(train[:BATCH]), lambda: evaluate(model))
        print(f"{structures} structures are compiled, and none from here on")
    for _ in range(EPOCHS):
        losses = []
        for batch in train.split(BATCH):
            optimizer.zero_grad()
            losses.append(learn(batch))
            optimizer.step()
        if grower is not None:
            decision = grower.step(train_loss=sum(losses) / len(losses))
            if decision.changes:
                print(decision)
    if grower is not None:
        print(grower.finish())
    return model


bare = network()
fitted(bare, bare.parameters(), grow=False)
model = esper.attach(network(), {"transformer.h.0": ["block_zero"]}, example_input=train[:2])
fitted(model, model.parameter_groups(), grow=True)
print(model.summary())
deeper = model.finalize()
print(f"{deeper.config.n_layer} blocks")
print(f"accuracy without growth {score(bare, test)[1]:.3f}, with growth {score(deeper, test)[1]:.3f}")
