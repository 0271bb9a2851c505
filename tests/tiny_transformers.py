"""Hugging Face's models, tiny, from their configurations; tests that ask for them are skipped without the library."""

from typing import Any

import pytest
from torch import nn

_DECODER = {
    "vocab_size": 23,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 24,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def bert(**settings: Any) -> nn.Module:
    """A classifier of one layer."""
    transformers = pytest.importorskip("transformers")
    layers = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    return transformers.BertForSequenceClassification(transformers.BertConfig(**{**layers, **settings}))


def gpt2(**settings: Any) -> nn.Module:
    """A language model of two layers."""
    transformers = pytest.importorskip("transformers")
    layers = {"n_embd": 16, "n_layer": 2, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**{**layers, **settings}))


def llama(**settings: Any) -> nn.Module:
    """A language model of two layers."""
    transformers = pytest.importorskip("transformers")
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**_DECODER, **settings}))


def qwen2(**settings: Any) -> nn.Module:
    """A language model of two layers, the second of which sees the last four tokens alone."""
    transformers = pytest.importorskip("transformers")
    window = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**{**_DECODER, **window, **settings}))


def gemma(**settings: Any) -> nn.Module:
    """A language model of two layers with tied embeddings."""
    transformers = pytest.importorskip("transformers")
    return transformers.GemmaForCausalLM(transformers.GemmaConfig(**{**_DECODER, "head_dim": 8, **settings}))


def phi(**settings: Any) -> nn.Module:
    """A language model of two layers."""
    transformers = pytest.importorskip("transformers")
    return transformers.PhiForCausalLM(transformers.PhiConfig(**{**_DECODER, "num_key_value_heads": 2, **settings}))


def gpt_neox(**settings: Any) -> nn.Module:
    """A language model of two layers."""
    transformers = pytest.importorskip("transformers")
    layers = {name: value for name, value in _DECODER.items() if name != "num_key_value_heads"}
    return transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**{**layers, **settings}))


def opt(**settings: Any) -> nn.Module:
    """A language model of two layers with tied embeddings, which drops out."""
    transformers = pytest.importorskip("transformers")
    layers = {"hidden_size": 16, "word_embed_proj_dim": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    tokens = {"vocab_size": 23, "max_position_embeddings": 32, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    return transformers.OPTForCausalLM(transformers.OPTConfig(**{**layers, **tokens, "ffn_dim": 24, **settings}))


def bert_language_model(**settings: Any) -> nn.Module:
    """A masked language model of one layer with tied embeddings."""
    transformers = pytest.importorskip("transformers")
    layers = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    return transformers.BertForMaskedLM(transformers.BertConfig(**{**layers, "vocab_size": 23, **settings}))


def bart() -> nn.Module:
    """An encoder and a decoder of one layer each, and a head, with one embedding."""
    transformers = pytest.importorskip("transformers")
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "d_model": 16}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "forced_eos_token_id": None}
    tokens = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0, "decoder_start_token_id": 0, "vocab_size": 23}
    return transformers.BartForConditionalGeneration(transformers.BartConfig(**sizes, **heads, **tokens))


def vit(**settings: Any) -> nn.Module:
    """A classifier of images of 8 x 8 pixels, of one layer."""
    transformers = pytest.importorskip("transformers")
    layers = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(**{**layers, "image_size": 8, "patch_size": 4, **settings})
    )


def t5(**settings: Any) -> nn.Module:
    """An encoder and a decoder of one layer each."""
    transformers = pytest.importorskip("transformers")
    layers = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**{**layers, **settings}))
