"""A GPT-2 that grows deeper in a loop of its own: bf16 autocast, accumulated gradients, clipping and a schedule."""

import tempfile

import torch
from counting import LENGTH, network, score, sequences
from torch import nn
from transformers import AutoModelForCausalLM

import esper

EPOCHS, BATCH, ACCUMULATED = 12, 16, 2
train, validation, test = (sequences(number, seed) for seed, number in enumerate((512, 128, 256)))
STEPS = EPOCHS * len(train) // (BATCH * ACCUMULATED)


def train_one_epoch(
    model: nn.Module, optimizer: torch.optim.Optimizer, schedule: torch.optim.lr_scheduler.LRScheduler
) -> float:
    """An ordinary epoch; returns the mean loss."""
    model.train()
    total = 0.0
    for number, batch in enumerate(train.split(BATCH), start=1):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(input_ids=batch, labels=batch).loss
        (loss / ACCUMULATED).backward()
        total += loss.item()
        if number % ACCUMULATED == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return total / number


def fitted(model: nn.Module, parameters: object, *, grow: bool) -> nn.Module:
    """The model, trained for `EPOCHS`."""
    optimizer = torch.optim.AdamW(parameters, lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=STEPS)
    grower = None
    if grow:
        grower = esper.Grower(
            model, optimizer, controller="all_at_start", evaluate=lambda model: score(model, validation), horizon=EPOCHS
        )
    for _ in range(EPOCHS):
        loss = train_one_epoch(model, optimizer, schedule)
        if grower is not None:
            decision = grower.step(train_loss=loss)
            if decision.changes:
                print(decision)
    if grower is not None:
        print(grower.finish())
    return model


def main() -> None:
    """Train bare and growing, and use the deeper model that comes out as any other."""
    bare = network()
    fitted(bare, bare.parameters(), grow=False)
    model = esper.attach(network(), {r"re:transformer\.h\.\d+": ["block_zero"]}, example_input=train[:2])
    fitted(model, model.parameter_groups(), grow=True)
    print(model.summary())
    plain = model.finalize().eval()
    with tempfile.TemporaryDirectory() as folder:
        plain.save_pretrained(folder)
        deeper = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert torch.equal(deeper(test).logits, plain(test).logits)
    start = test[:1, :3]
    counted = deeper.generate(start, attention_mask=torch.ones_like(start), max_length=LENGTH, pad_token_id=0)
    print(f"{deeper.config.n_layer} blocks, which count {counted[0].tolist()}")
    print(f"accuracy without growth {score(bare, test)[1]:.3f}, with growth {score(deeper, test)[1]:.3f}")


if __name__ == "__main__":
    main()
