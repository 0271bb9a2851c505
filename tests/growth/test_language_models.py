"""Language models of Hugging Face's that grow deeper: caches, configurations, what their library saves and loads."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import esper
import tiny_transformers
from esper.errors import ExportError, SlotError
from esper.growth.model import GrowingModel
from esper.growth.slot import Seed

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.landing

BLOCKS = ["block_copy", "block_zero"]
HOSTS: dict[str, tuple[Callable[..., nn.Module], str]] = {
    "gpt2": (lambda: tiny_transformers.gpt2(vocab_size=23, n_positions=32), "transformer.h"),
    "llama": (tiny_transformers.llama, "model.layers"),
    "llama tied": (lambda: tiny_transformers.llama(tie_word_embeddings=True), "model.layers"),
    "qwen2": (tiny_transformers.qwen2, "model.layers"),
}
TOKENS = torch.randint(1, 23, (2, 7), generator=torch.Generator().manual_seed(0))


def host_of(name: str) -> nn.Module:
    torch.manual_seed(0)
    return HOSTS[name][0]().eval()


def growing(name: str, blueprint: str = "block_copy", host: nn.Module | None = None) -> GrowingModel:
    place = HOSTS[name][1].replace(".", r"\.")
    return esper.attach(host or host_of(name), {rf"re:{place}\.\d+": [blueprint]}, example_input=TOKENS)


def plant(model: GrowingModel, slot: str, alpha: float = 1.0) -> Seed:
    """As after much training."""
    seed = model.slots[slot].germinate(model.slots[slot].blueprints[0], alpha=alpha)
    with torch.no_grad():
        for index, parameter in enumerate(seed.parameters()):
            parameter += torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index)) / 10
    return seed


def grown(name: str, blueprint: str = "block_copy", alpha: float = 1.0) -> GrowingModel:
    """A block behind each."""
    model = growing(name, blueprint)
    for slot in model.slots:
        plant(model, slot, alpha)
        model.slots[slot].fossilize()
    return model


def generate(model: Any, **options: Any) -> Tensor:
    mask = torch.ones_like(TOKENS)
    settings = {
        "max_new_tokens": 8,
        "do_sample": False,
        "pad_token_id": 0,
        "attention_mask": mask,
        "eos_token_id": None,
    }
    return model.generate(TOKENS, **{**settings, **options})


@pytest.mark.parametrize("blueprint", BLOCKS)
@pytest.mark.parametrize("name", HOSTS)
def test_a_block_changes_nothing_at_birth_to_the_bit(name: str, blueprint: str) -> None:
    model = growing(name, blueprint)
    for slot in reversed(model.slots.keys()):  # the second comes where the first one counts already
        before = model(TOKENS).logits
        seed = model.slots[slot].germinate(blueprint, alpha=1.0 if blueprint == "block_zero" else 0.0)
        assert torch.equal(model(TOKENS).logits, before)
        seed.alpha.fill_(1.0)


@pytest.mark.parametrize("name", HOSTS)
def test_a_zero_block_is_alive(name: str) -> None:
    model = growing(name, "block_zero")
    seed = model.slots[next(iter(model.slots))].germinate("block_zero", alpha=1.0)
    before = {key: value.clone() for key, value in seed.named_parameters()}
    optimizer = torch.optim.Adam(seed.parameters(), 0.01)
    for _ in range(2):
        optimizer.zero_grad()
        model(TOKENS, labels=TOKENS).loss.backward()
        optimizer.step()
    still = [key for key, value in seed.named_parameters() if torch.equal(value, before[key])]
    assert still == []


@pytest.mark.parametrize("alpha", [0.4, 1.0])
@pytest.mark.parametrize("blueprint", BLOCKS)
@pytest.mark.parametrize("name", HOSTS)
def test_it_generates_with_a_cache_as_without_while_it_grows(name: str, blueprint: str, alpha: float) -> None:
    model = growing(name, blueprint)
    bare = generate(model)
    for slot in model.slots:
        plant(model, slot, alpha)
        assert torch.equal(generate(model), generate(model, use_cache=False))
    assert not torch.equal(generate(model), bare)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(generate(copied), generate(model))
    assert torch.equal(generate(model, num_beams=2), generate(model, num_beams=2, use_cache=False))


@pytest.mark.parametrize("name", ["gpt2", "qwen2"])
def test_it_generates_with_a_static_cache_and_behind_padding(name: str) -> None:
    model = growing(name)
    for slot in model.slots:
        plant(model, slot, 0.4)
    expected = generate(model)
    assert torch.equal(generate(model, cache_implementation="static", disable_compile=True), expected)
    padded = torch.cat([TOKENS.new_zeros(2, 3), TOKENS], dim=1)
    mask = (torch.arange(10) >= 3).long().expand(2, 10)
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    assert torch.equal(model.generate(padded, attention_mask=mask, **options)[:, 3:], expected)


def test_it_begins_in_the_mode_of_its_host() -> None:
    host = host_of("gpt2")
    assert not growing("gpt2", host=host).training
    assert not plant(growing("gpt2"), "transformer.h.0").training
    assert growing("gpt2", host=host_of("gpt2").train()).training


def test_pruning_gives_layers_of_the_cache_back() -> None:
    model = growing("gpt2")
    for slot in model.slots:
        plant(model, slot)
    assert len(model(TOKENS, use_cache=True).past_key_values) == 4
    model.slots["transformer.h.0"].prune()
    assert len(model(TOKENS, use_cache=True).past_key_values) == 3
    assert torch.equal(generate(model), generate(model, use_cache=False))
    plant(model, "transformer.h.0")
    assert torch.equal(generate(model), generate(model, use_cache=False))


def test_the_given_configuration_stays_as_it_is() -> None:
    host = host_of("qwen2")
    config = host.config
    kinds = list(config.layer_types)
    model = growing("qwen2", host=host)
    plant(model, "model.layers.1")
    assert (config.num_hidden_layers, config.layer_types) == (2, kinds)
    assert (model.config.num_hidden_layers, model.config.layer_types) == (3, [*kinds, kinds[1]])
    model.release()
    assert all(module.config is config for module in host.modules() if "config" in vars(module))


def test_what_is_set_on_the_configuration_while_it_grows_stays() -> None:
    host = host_of("llama")
    original, expected = host.config, host(TOKENS).logits
    model = growing("llama", host=host)
    plant(model, "model.layers.0")
    model.config.pad_token_id, model.config.use_cache = 5, False
    model.set_attn_implementation("eager")
    plant(model, "model.layers.1")
    for slot in model.slots.values():
        slot.fossilize()
    for one in (model, model.finalize()):
        assert (one.config.pad_token_id, one.config.use_cache, one.config.num_hidden_layers) == (5, False, 4)
        configurations = [part.config for part in one.modules() if "config" in vars(part)]
        assert {config._attn_implementation for config in configurations} == {"eager"}
    model.release()
    assert host.config is original
    assert (original.pad_token_id, original._attn_implementation, original.num_hidden_layers) == (5, "eager", 2)
    torch.testing.assert_close(host(TOKENS).logits, expected)


def test_an_average_generates_too() -> None:
    model = growing("llama")
    average = copy.deepcopy(model)
    model.mirror(average)
    plant(model, "model.layers.0")
    assert average.config.num_hidden_layers == 3
    assert torch.equal(generate(average), generate(average, use_cache=False))


@pytest.mark.parametrize("blueprint", BLOCKS)
@pytest.mark.parametrize("name", HOSTS)
def test_the_plain_model_is_its_librarys_own(name: str, blueprint: str, tmp_path: Path) -> None:
    model = grown(name, blueprint)
    plain: Any = model.finalize()
    assert type(plain) is type(model.host)
    assert plain.config.num_hidden_layers == 4
    assert b"esper" not in pickle.dumps(plain)
    assert torch.equal(plain(TOKENS).logits, model(TOKENS).logits)
    plain.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert type(again) is type(plain)
    assert torch.equal(again(TOKENS).logits, plain(TOKENS).logits)
    expected = generate(model)
    for one in (plain, again):
        assert torch.equal(generate(one), expected)
        assert torch.equal(generate(one, use_cache=False), expected)


def test_the_name_of_the_depth_is_gpt2s_own() -> None:
    assert grown("gpt2").finalize().config.n_layer == 4
    assert growing("gpt2").finalize().config.n_layer == 2


def test_kinds_of_layers_go_with_their_blocks() -> None:
    model = growing("qwen2")
    plant(model, "model.layers.0")
    model.slots["model.layers.0"].fossilize()
    plain: Any = model.finalize()
    assert plain.config.layer_types == ["full_attention", "full_attention", "sliding_attention"]
    assert [block.self_attn.layer_idx for block in plain.model.layers] == [0, 1, 2]


@pytest.mark.parametrize("name", ["gpt2", "llama tied"])
def test_tied_embeddings_stay_tied(name: str) -> None:
    for one in (grown(name), grown(name).finalize()):
        assert one.get_input_embeddings().weight is one.get_output_embeddings().weight


def test_blocks_that_depend_on_their_number_are_not_saved_as_others(tmp_path: Path) -> None:
    host = tiny_transformers.gpt2(vocab_size=23, scale_attn_by_inverse_layer_idx=True).eval()
    model = growing("gpt2", host=host)
    plant(model, "transformer.h.0")
    model.slots["transformer.h.0"].fossilize()
    plain: Any = model.finalize()
    assert torch.equal(plain(TOKENS).logits, model(TOKENS).logits)
    for part in (plain, plain.transformer):
        with pytest.raises(KeyError, match="would lose what grew here"):
            part.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("behind", [["0"], ["1"], ["0", "1"]], ids="+".join)
@pytest.mark.parametrize("name", ["gpt2", "qwen2"])
def test_a_block_that_counts_for_less_runs_behind_its_own(name: str, behind: list[str], tmp_path: Path) -> None:
    model = growing(name)
    for slot in model.slots:
        plant(model, slot, 0.5 if slot.rpartition(".")[2] in behind else 1.0)
        model.slots[slot].fossilize()
    with pytest.warns(UserWarning, match=r"counts with 0\.50: it runs behind its block"):
        plain: Any = model.finalize()
    blocks: Any = plain.get_submodule(HOSTS[name][1])
    assert len(blocks) == 4 - len(behind)
    for one in (plain, copy.deepcopy(plain), pickle.loads(pickle.dumps(plain))):
        assert torch.equal(one(TOKENS).logits, model(TOKENS).logits)
        assert torch.equal(generate(one), generate(model))
        assert torch.equal(generate(one), generate(one, use_cache=False))
        with pytest.raises(KeyError, match="would lose what grew here"):
            one.save_pretrained(tmp_path)
    assert b"esper.growth" not in pickle.dumps(plain)
    plain.train()(TOKENS, labels=TOKENS).loss.backward()
    assert all(parameter.grad is not None for parameter in plain.parameters())


@pytest.mark.parametrize("blueprint", BLOCKS)
def test_saved_while_it_grows_it_goes_on(blueprint: str, tmp_path: Path) -> None:
    model = growing("gpt2", blueprint)
    plant(model, "transformer.h.1", 0.3)
    esper.save(model, tmp_path)
    again = esper.load(tmp_path, host_of("gpt2"), TOKENS).eval()
    assert torch.equal(again(TOKENS).logits, model(TOKENS).logits)
    assert torch.equal(generate(again), generate(model))


def test_moments_and_schedules_survive() -> None:
    """The host learns as it does alone where what grew does not count and random numbers play no part."""

    def learn(model: Any, groups: Any, grow: Callable[[int], None]) -> Tensor:
        optimizer = torch.optim.AdamW(groups)
        if isinstance(model, GrowingModel):
            model.link(optimizer)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=6)
        for step in range(6):
            optimizer.zero_grad()
            model(TOKENS, labels=TOKENS).loss.backward()
            optimizer.step()
            schedule.step()
            grow(step)
        return model(TOKENS).logits

    bare, model = host_of("gpt2"), growing("gpt2")
    groups = model.parameter_groups()

    def grow(step: int) -> None:
        if step == 2:
            model.slots["transformer.h.0"].germinate("block_copy")

    expected = learn(bare, bare.parameters(), lambda _: None)
    assert torch.equal(learn(model, groups, grow), expected)


def test_a_block_after_which_something_is_normalised_cannot_be_the_identity() -> None:
    host = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), 2, enable_nested_tensor=False)
    with pytest.raises(SlotError, match="'block_zero' does not support"):
        esper.attach(host, {"layers.0": ["block_zero"]}, torch.randn(2, 3, 8))


@pytest.mark.parametrize("when", ["before attach", "in training"])
@pytest.mark.parametrize("freeze_host", [True, [r"re:.*\.0"]], ids=["host", "block"])
@pytest.mark.parametrize("name", HOSTS)
def test_gradient_checkpointing_of_what_is_frozen_is_refused(name: str, freeze_host: Any, when: str) -> None:
    host: Any = host_of(name)
    if when == "before attach":
        host.gradient_checkpointing_enable()
        with pytest.raises(SlotError, match="gradient checkpointing is enabled in the frozen"):
            esper.attach(host, {f"{HOSTS[name][1]}.0": ["block_copy"]}, TOKENS, freeze_host=freeze_host)
        assert all(parameter.requires_grad for parameter in host.parameters())
    else:
        model = esper.attach(host, {f"{HOSTS[name][1]}.0": ["block_copy"]}, TOKENS, freeze_host=freeze_host)
        host.gradient_checkpointing_enable()
        with pytest.raises(SlotError, match="call gradient_checkpointing_disable()"):
            model.train()
    host.gradient_checkpointing_disable()
    esper.attach(host_of(name), {f"{HOSTS[name][1]}.0": ["block_copy"]}, TOKENS, freeze_host=freeze_host).train()


def checkpointed(name: str, *, reentrant: bool) -> tuple[GrowingModel, dict[str, Tensor]]:
    """A host that learns and checkpoints, as do copies of its blocks; and its gradients without checkpointing."""
    host: Any = host_of(name)
    host.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model = growing(name, host=host).train()
    for slot in model.slots:
        plant(model, slot, 0.5)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    enabled = [module for module in model.modules() if vars(module).get("gradient_checkpointing")]
    for module in enabled:
        vars(module)["gradient_checkpointing"] = False
    expected = gradients_of(model)
    for module in enabled:
        vars(module)["gradient_checkpointing"] = True
    return model, expected


def gradients_of(model: GrowingModel) -> dict[str, Tensor]:
    model.zero_grad()
    model(input_ids=TOKENS, labels=TOKENS).loss.backward()
    return {name: values.grad.clone() for name, values in model.named_parameters() if values.grad is not None}


@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_copies_of_blocks_that_checkpoint_get_the_same_gradients(name: str, reentrant: bool) -> None:
    model, expected = checkpointed(name, reentrant=reentrant)
    computed = gradients_of(model)
    assert computed.keys() == expected.keys()
    for key, gradient in expected.items():
        torch.testing.assert_close(computed[key], gradient, rtol=1e-4, atol=1e-7)


def test_a_copy_of_a_block_that_checkpoints_is_given_no_cache_where_only_it_is_in_training() -> None:
    model, _ = checkpointed("gpt2", reentrant=False)
    model.host.eval()
    with pytest.raises(SlotError, match="a GPT2Block with gradient checkpointing got a cache"):
        model(TOKENS, labels=TOKENS)
    model(TOKENS, labels=TOKENS, use_cache=False).loss.backward()


TIED: dict[str, Callable[[], nn.Module]] = {
    "gpt2": HOSTS["gpt2"][0],
    "llama": HOSTS["llama tied"][0],
    "gemma": tiny_transformers.gemma,
    "opt": tiny_transformers.opt,
    "bert": tiny_transformers.bert_language_model,
    "t5": lambda: tiny_transformers.t5(vocab_size=23),
    "bart": tiny_transformers.bart,
}
"""Hosts whose head shares the weight of one embedding or several."""


@pytest.mark.parametrize("name", TIED)
def test_an_update_of_a_tied_head_is_refused_until_it_is_untied(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    host: Any = TIED[name]().eval()
    slot = next(path for path, module in host.named_modules() if module is host.get_output_embeddings())
    example: Any = (
        {"input_ids": TOKENS, "decoder_input_ids": TOKENS} if name in ("t5", "bart") else {"input_ids": TOKENS}
    )
    model = esper.attach(host, {slot: ["lora_4"]}, example, freeze_host=True)
    plant(model, slot)
    model.slots[slot].fossilize()
    with pytest.raises(
        ExportError, match=f"'lora_4' in slot '{slot}' cannot change only one of .* which share a weight"
    ):
        model.finalize()
    head = host.get_output_embeddings()
    head.weight = nn.Parameter(head.weight.detach().clone())
    host.config.tie_word_embeddings = False
    plain: Any = model.finalize()
    expected = model(**example).logits
    torch.testing.assert_close(plain(**example).logits, expected, rtol=1e-4, atol=1e-3)
    if name not in ("t5", "bart"):  # whose embeddings one setting ties to each other, too
        plain.save_pretrained(tmp_path)
        loaded = type(plain).from_pretrained(tmp_path).eval()
        torch.testing.assert_close(loaded(**example).logits, expected, rtol=1e-4, atol=1e-3)
