"""Hugging Face's models, made from their configurations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from conformance.kind import CLASSES, EXAMPLES, TOKENS, WIDTH, Kind, Minibatch, cross_entropy, right, text

transformers = pytest.importorskip("transformers")

VOCABULARY = 12
PAD = 0


def bert() -> nn.Module:
    return transformers.BertForSequenceClassification(
        transformers.BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=16,
            max_position_embeddings=32,
            num_labels=CLASSES,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            pad_token_id=PAD,
        )
    )


def gpt2() -> nn.Module:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=32,
            n_embd=WIDTH,
            n_layer=2,
            n_head=2,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=1,
            eos_token_id=VOCABULARY - 1,
        )
    )


def vit() -> nn.Module:
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(
            hidden_size=WIDTH,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=16,
            image_size=8,
            patch_size=4,
            num_labels=CLASSES,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def t5() -> nn.Module:
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=VOCABULARY,
            d_model=WIDTH,
            d_kv=4,
            d_ff=16,
            num_layers=1,
            num_decoder_layers=1,
            num_heads=2,
            dropout_rate=0.0,
            decoder_start_token_id=PAD,
            pad_token_id=PAD,
        )
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
