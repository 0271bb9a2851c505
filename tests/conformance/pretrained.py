"""Hugging Face's models, made from their configurations."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tiny_transformers
from conformance.kind import CLASSES, EXAMPLES, TOKENS, WIDTH, Kind, Minibatch, cross_entropy, right, text

VOCABULARY = 12
PAD = 0


NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def bert() -> nn.Module:
    shape = {"hidden_size": WIDTH, "num_hidden_layers": 2, "max_position_embeddings": 32}
    return tiny_transformers.bert(vocab_size=VOCABULARY, num_labels=CLASSES, pad_token_id=PAD, **shape, **NO_DROPOUT)


def gpt2() -> nn.Module:
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return tiny_transformers.gpt2(
        vocab_size=VOCABULARY, n_positions=32, n_embd=WIDTH, bos_token_id=1, eos_token_id=VOCABULARY - 1, **dropout
    )


def vit() -> nn.Module:
    return tiny_transformers.vit(hidden_size=WIDTH, num_hidden_layers=2, num_labels=CLASSES, **NO_DROPOUT)


def t5() -> nn.Module:
    return tiny_transformers.t5(
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        d_kv=4,
        num_decoder_layers=1,
        dropout_rate=0.0,
        decoder_start_token_id=PAD,
        pad_token_id=PAD,
    )


def sentences(generator: torch.Generator) -> Minibatch:
    """Words, their padding, and a class that shows in the first word."""
    words = torch.randint(1, VOCABULARY, (EXAMPLES, TOKENS), generator=generator)
    lengths = torch.randint(2, TOKENS + 1, (EXAMPLES,), generator=generator)
    mask = (torch.arange(TOKENS) < lengths[:, None]).long()
    return Minibatch({"input_ids": words * mask + PAD * (1 - mask), "attention_mask": mask}, words[:, 0] % CLASSES)


def more_padding(minibatch: Minibatch, more: int) -> Minibatch:
    inputs = dict(minibatch.inputs)
    inputs["input_ids"] = F.pad(inputs["input_ids"], (0, more), value=PAD)
    inputs["attention_mask"] = F.pad(inputs["attention_mask"], (0, more), value=0)
    return minibatch._replace(inputs=inputs)


def numerals(generator: torch.Generator) -> Minibatch:
    tokens = text(generator, VOCABULARY, TOKENS + 1)
    return Minibatch({"input_ids": tokens[:, :-1], "use_cache": False}, tokens[:, 1:])


def images(generator: torch.Generator) -> Minibatch:
    pixels = torch.randn(EXAMPLES, 3, 8, 8, generator=generator)
    return Minibatch({"pixel_values": pixels}, pixels.mean((2, 3)).argmax(1))


def translations(generator: torch.Generator) -> Minibatch:
    """To be written backwards."""
    source = text(generator, VOCABULARY - 1) + 1
    target = source.flip(1)
    begun = F.pad(target[:, :-1], (1, 0), value=PAD)
    return Minibatch({"input_ids": source, "decoder_input_ids": begun, "use_cache": False}, target)


def loss(found: Any, target: Tensor) -> Tensor:
    return cross_entropy(found.logits, target)


def accuracy(found: Any, target: Tensor) -> float:
    return right(found.logits, target)


KINDS = (
    Kind(
        "hf_bert",
        bert,
        {"bert.encoder.layer.0": ["mlp"], "bert.encoder.layer.1": ["lowrank"]},
        sentences,
        loss,
        accuracy,
        padded=more_padding,
    ),
    Kind("hf_gpt2", gpt2, {"transformer.h.0": ["mlp"], "transformer.h.1.mlp": ["lowrank"]}, numerals, loss, accuracy),
    Kind("hf_vit", vit, {"vit.embeddings": ["mlp"], "classifier": ["lowrank"]}, images, loss, accuracy),
    Kind(
        "hf_t5",
        t5,
        {"encoder.block.0.layer.1": ["mlp"], "decoder.final_layer_norm": ["lowrank"]},
        translations,
        loss,
        accuracy,
    ),
)
