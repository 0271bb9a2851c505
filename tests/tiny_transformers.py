"""Hugging Face's models, tiny, from their configurations; tests that ask for them are skipped without the library."""

from typing import Any

import pytest
from torch import nn

LAYER = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
ENDS = {"bos_token_id": 0, "eos_token_id": 0}
DECODER = {**LAYER, **ENDS, "vocab_size": 23, "num_hidden_layers": 2, "intermediate_size": 24}
GROUPED = {**DECODER, "num_key_value_heads": 1}


def _make(model: str, config: str, *settings: dict[str, Any]) -> nn.Module:
    """The later settings win."""
    transformers = pytest.importorskip("transformers")
    merged = {name: value for each in settings for name, value in each.items()}
    return getattr(transformers, model)(getattr(transformers, config)(**merged))


def bert(**settings: Any) -> nn.Module:
    """A classifier of one layer."""
    return _make("BertForSequenceClassification", "BertConfig", LAYER, settings)


def gpt2(**settings: Any) -> nn.Module:
    """A language model of two layers."""
    return _make("GPT2LMHeadModel", "GPT2Config", {"n_embd": 16, "n_layer": 2, "n_head": 2, **ENDS}, settings)


def llama(**settings: Any) -> nn.Module:
    """A language model of two layers."""
    return _make("LlamaForCausalLM", "LlamaConfig", GROUPED, settings)


def qwen2(**settings: Any) -> nn.Module:
    """A language model of two layers, the second of which sees the last four tokens alone."""
    window = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
    return _make("Qwen2ForCausalLM", "Qwen2Config", GROUPED, window, settings)


def gemma(**settings: Any) -> nn.Module:
    """A language model of two layers with tied embeddings."""
    return _make("GemmaForCausalLM", "GemmaConfig", GROUPED, {"head_dim": 8}, settings)


def phi(**settings: Any) -> nn.Module:
    """A language model of two layers."""
    return _make("PhiForCausalLM", "PhiConfig", DECODER, {"num_key_value_heads": 2}, settings)


def gpt_neox(**settings: Any) -> nn.Module:
    """A language model of two layers."""
    return _make("GPTNeoXForCausalLM", "GPTNeoXConfig", DECODER, settings)


def opt(**settings: Any) -> nn.Module:
    """A language model of two layers with tied embeddings, which drops out."""
    sizes = {"word_embed_proj_dim": 16, "ffn_dim": 24, "max_position_embeddings": 32, "pad_token_id": 0}
    decoder = {name: value for name, value in DECODER.items() if name != "intermediate_size"}
    return _make("OPTForCausalLM", "OPTConfig", decoder, sizes, settings)


def bert_language_model(**settings: Any) -> nn.Module:
    """A masked language model of one layer with tied embeddings."""
    return _make("BertForMaskedLM", "BertConfig", LAYER, {"vocab_size": 23}, settings)


def bart() -> nn.Module:
    """An encoder and a decoder of one layer each, and a head, with one embedding."""
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "d_model": 16}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "forced_eos_token_id": None}
    tokens = {"pad_token_id": 0, "decoder_start_token_id": 0, "vocab_size": 23, **ENDS}
    return _make("BartForConditionalGeneration", "BartConfig", sizes, heads, tokens)


def vit(**settings: Any) -> nn.Module:
    """A classifier of images of 8 x 8 pixels, of one layer."""
    return _make("ViTForImageClassification", "ViTConfig", LAYER, {"image_size": 8, "patch_size": 4}, settings)


def t5(**settings: Any) -> nn.Module:
    """An encoder and a decoder of one layer each."""
    layers = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}
    return _make("T5ForConditionalGeneration", "T5Config", layers, settings)
