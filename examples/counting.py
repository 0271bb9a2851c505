"""What the examples with language models share: counting in steps of one, two or three, and a thin GPT-2 for it."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel

VOCABULARY, LENGTH, LARGEST_STEP = 13, 12, 3


def sequences(number: int, seed: int) -> Tensor:
    """Arithmetic progressions modulo the vocabulary, ``[number, LENGTH]``: start and step are to be found out."""
    generator = torch.Generator().manual_seed(seed)
    start = torch.randint(VOCABULARY, (number, 1), generator=generator)
    step = torch.randint(1, 1 + LARGEST_STEP, (number, 1), generator=generator)
    return (start + step * torch.arange(LENGTH)) % VOCABULARY


def network() -> nn.Module:
    """One thin block."""
    torch.manual_seed(0)
    shape = {"vocab_size": VOCABULARY, "n_positions": LENGTH, "n_embd": 16, "n_layer": 1, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=None, eos_token_id=None))


@torch.no_grad()
def score(model: nn.Module, data: Tensor) -> tuple[float, float]:
    """Loss, and how often the next token is the likeliest."""
    model.eval()
    logits, following = model(input_ids=data, use_cache=False).logits[:, :-1], data[:, 1:]
    loss = F.cross_entropy(logits.flatten(0, 1), following.flatten())
    return float(loss), float((logits.argmax(-1) == following).float().mean())
