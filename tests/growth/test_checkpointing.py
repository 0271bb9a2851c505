"""Activation checkpointing of frozen language models: the same gradients, computed again instead of kept."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportUnknownVariableType]

import esper
import tiny_transformers
from esper.errors import SlotError
from esper.growth.model import GrowingModel
from esper.growth.taps import find_hook_tables

pytest.importorskip("transformers")

pytestmark = [pytest.mark.landing, pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")]

TOKENS = torch.randint(1, 23, (2, 7), generator=torch.Generator().manual_seed(0))
HOSTS: dict[str, tuple[Callable[..., nn.Module], str, str]] = {
    "gpt2": (partial(tiny_transformers.gpt2, vocab_size=23, n_positions=32), "transformer.h", "mlp"),
    "llama": (tiny_transformers.llama, "model.layers", "mlp"),
    "qwen2": (tiny_transformers.qwen2, "model.layers", "mlp"),
    "mistral": (tiny_transformers.mistral, "model.layers", "mlp"),
    "gemma": (tiny_transformers.gemma, "model.layers", "mlp"),
    "phi": (tiny_transformers.phi, "model.layers", "mlp"),
    "gpt_neox": (tiny_transformers.gpt_neox, "gpt_neox.layers", "mlp"),
    "opt": (partial(tiny_transformers.opt, layerdrop=0.5), "model.decoder.layers", "self_attn.out_proj"),
}
"""A host, where its blocks are, and a part of a block."""
GROWN = {"behind a block": "block_copy", "within a block": "lowrank"}


class Counter:
    """Counts the calls of a module, also of one that is computed again, and what is kept for backward passes."""

    def __init__(self, module: nn.Module) -> None:
        self.calls = 0
        module.register_forward_hook(self)

    def __call__(self, *_: Any) -> None:
        self.calls += 1


def grown(name: str, where: str, freeze_host: bool | Sequence[str] = True) -> GrowingModel:
    """A frozen host in training mode with something grown at its first block, which learns without dropout."""
    torch.manual_seed(0)
    make, blocks, part = HOSTS[name]
    slot = f"{blocks}.0" if where == "behind a block" else f"{blocks}.0.{part}"
    model = esper.attach(make().train(), {slot: [GROWN[where]]}, TOKENS, freeze_host=freeze_host)
    seed = model.slots[slot].germinate(GROWN[where], torch.Generator().manual_seed(0), alpha=0.5)
    for module in seed.modules():
        for attribute in ("p", "dropout", "attention_dropout"):
            if isinstance(getattr(module, attribute, None), float):
                setattr(module, attribute, 0.0)
    return model


def enable(model: GrowingModel, *, reentrant: bool) -> None:
    """Enable checkpointing in the host and in copies of its blocks, as before they were made."""
    host: Any = model.host
    host.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    for module in model.slots.modules():
        if "gradient_checkpointing" in vars(module) or type(module) in {type(part) for part in host.modules()}:
            vars(module)["gradient_checkpointing"] = True
            vars(module)["_gradient_checkpointing_func"] = partial(checkpoint, use_reentrant=reentrant)


def gradients_of(model: GrowingModel) -> dict[str, Tensor]:
    """Gradients of all that learns, by name."""
    model.zero_grad()
    model(input_ids=TOKENS, labels=TOKENS).loss.backward()
    return {name: values.grad for name, values in model.named_parameters() if values.grad is not None}


def count_calls(model: GrowingModel, name: str) -> list[int]:
    """How often each block is computed in a step of training; the first needs it only if its input has a gradient."""
    blocks = model.host.get_submodule(HOSTS[name][1])
    counters = [
        Counter(next(part for part in block.modules() if not [*part.children()])) for block in blocks.children()
    ]
    gradients_of(model)
    return [counter.calls for counter in counters]


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("where", GROWN)
@pytest.mark.parametrize("name", HOSTS)
def test_a_frozen_host_computes_blocks_again_and_gives_the_same_gradients(
    name: str, where: str, reentrant: bool
) -> None:
    model = grown(name, where)
    expected = gradients_of(model)
    assert expected
    enable(model, reentrant=reentrant)
    computed = gradients_of(model)
    assert computed.keys() == expected.keys()
    for key, gradient in expected.items():
        torch.testing.assert_close(computed[key], gradient, rtol=1e-4, atol=1e-7)
    assert count_calls(model, name)[-1] == 2


@pytest.mark.parametrize("freeze_host", [["transformer"], [r"re:transformer\.h\.\d+"], ["transformer.h.0"]])
def test_parts_that_are_frozen_are_computed_again_as_those_that_learn(freeze_host: list[str]) -> None:
    model = grown("gpt2", "behind a block", freeze_host)
    for module in model.host.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    expected = gradients_of(model)
    enable(model, reentrant=True)
    computed = gradients_of(model)
    assert computed.keys() == expected.keys()
    for key, gradient in expected.items():
        torch.testing.assert_close(computed[key], gradient, rtol=1e-4, atol=1e-7)
    assert count_calls(model, "gpt2") == [2, 2]


def test_activations_of_frozen_blocks_are_not_kept() -> None:
    def count_kept(model: GrowingModel) -> int:
        kept = 0

        def pack(tensor: Tensor) -> Tensor:
            nonlocal kept
            kept += tensor.numel() * (not isinstance(tensor, nn.Parameter))
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(input_ids=TOKENS, labels=TOKENS)
        return kept

    model = grown("llama", "behind a block")
    before = count_kept(model)
    enable(model, reentrant=False)
    assert count_kept(model) < before / 3


def test_a_seed_within_a_block_learns_though_no_input_requires_a_gradient() -> None:
    model = grown("llama", "within a block")
    host: Any = model.host
    expected = gradients_of(model)
    enable(model, reentrant=True)
    with suppress(AttributeError):  # newer versions of transformers make it require one
        host.disable_input_require_grads()
    computed = gradients_of(model)
    assert computed.keys() == expected.keys()
    assert all(torch.allclose(computed[key], gradient, atol=1e-7) for key, gradient in expected.items())


@pytest.mark.parametrize("name", HOSTS)
def test_a_frozen_host_still_computes_what_it_did(name: str) -> None:
    model = grown(name, "behind a block")
    enable(model, reentrant=True)
    with torch.no_grad():
        expected = model.eval()(TOKENS).logits
    assert torch.equal(model.train()(TOKENS, use_cache=False).logits, expected)


def test_nothing_is_computed_again_where_no_gradient_follows() -> None:
    model = grown("gpt2", "behind a block")
    enable(model, reentrant=True)
    counter = Counter(model.host.get_submodule("transformer.h.0.ln_1"))
    with torch.no_grad():
        assert len(model(TOKENS, use_cache=True).past_key_values) == 3
    assert len(model.eval()(TOKENS, use_cache=True).past_key_values) == 3
    assert counter.calls == 2
    model.train()
    assert model(TOKENS, use_cache=True).past_key_values is None  # as in a host that learns


def test_a_look_restores_the_mode_in_which_blocks_are_computed_again() -> None:
    model = grown("llama", "within a block")
    enable(model, reentrant=False)
    model.look(lambda model, batch: model(batch).logits.logsumexp(-1).mean(-1), [TOKENS] * 2, examples=4)
    assert count_calls(model, "llama") == [2, 2]


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_given_cache_is_refused(reentrant: bool) -> None:
    model = grown("gpt2", "behind a block")
    past = model.eval()(TOKENS, use_cache=True).past_key_values
    enable(model.train(), reentrant=reentrant)
    with pytest.raises(SlotError, match="call the model with use_cache=False and without a cache"):
        model(TOKENS, past_key_values=past)
    assert not any("forward" in vars(module) for module in model.modules())
    assert count_calls(model, "gpt2") == [2, 2]


def test_a_copy_of_a_block_is_given_no_cache_where_only_it_is_in_training() -> None:
    model = grown("gpt2", "behind a block", freeze_host=False)
    enable(model, reentrant=True)
    model.host.eval()
    with pytest.raises(SlotError, match="a GPT2Block with gradient checkpointing got a cache"):
        model(TOKENS, labels=TOKENS)
    model(TOKENS, labels=TOKENS, use_cache=False).loss.backward()


def test_copies_compute_again_too_and_the_plain_model_has_none_of_it() -> None:
    model = grown("gpt2", "behind a block")
    pickled = pickle.dumps(model)
    enable(model, reentrant=True)
    expected = gradients_of(model)
    enable(unpickled := pickle.loads(pickled), reentrant=True)
    for copied in (copy.deepcopy(model), unpickled):
        computed = gradients_of(copied)
        assert all(torch.allclose(computed[key], gradient, atol=1e-7) for key, gradient in expected.items())
        assert count_calls(copied, "gpt2") == [2, 2]
        assert not any("forward" in vars(module) for module in copied.modules())
    model.slots["transformer.h.0"].set_alpha(1.0)
    model.slots["transformer.h.0"].fossilize()
    plain = model.finalize()
    assert not [hook for table in find_hook_tables(plain) for hook in table.values()]


def test_blocks_are_computed_again_with_a_forward_of_the_instance() -> None:
    model = grown("llama", "behind a block")
    block: Any = model.host.get_submodule("model.layers.1")
    original = block.forward
    block.forward = own = partial(original)
    enable(model, reentrant=False)
    assert count_calls(model, "llama") == [2, 2]
    assert block.forward is own


def test_of_a_model_that_cannot_checkpoint_while_it_is_frozen_you_are_warned() -> None:
    class PreTrainedModel(nn.Sequential):
        """Checkpoints in a way of its own."""

    host = PreTrainedModel(nn.Linear(4, 4), nn.Linear(4, 2))
    vars(host).update(gradient_checkpointing=True, _gradient_checkpointing_func=checkpoint)
    model = esper.attach(host, ["0"], torch.zeros(2, 4), freeze_host=True)
    with pytest.warns(UserWarning, match="saves no memory in the frozen PreTrainedModel"):
        model(torch.zeros(2, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(torch.zeros(2, 4))
