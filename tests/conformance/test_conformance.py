"""Whatever users attach: every kind of model in every check is either right, or refused with a sentence."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn

import esper
from conformance.growth import RATE, Training, grown, grown_model, outputs, plain_of, stir
from conformance.kind import Kind, tensors
from conformance.kinds import (
    CONTROLLERS,
    KINDS,
    REFUSED,
    SENTENCES,
    every_kind,
    right_or_a_sentence,
)
from esper.errors import EsperError
from esper.growth.model import GrowingModel
from esper.growth.probe import call

USUAL = ("mlp", "resnet", "char_lm", "regression")
CHECKS = {
    "attach",
    "train",
    "finalize",
    "save",
    "resume",
    "copy",
    "ema",
    "masks",
    "caches",
    "safetensors",
    "pt2",
    "onnx",
}


def test_there_are_kinds_enough_and_every_sentence_is_of_one() -> None:
    names = [kind.name for kind in KINDS] + [kind.name for kind, _ in REFUSED]
    assert len(set(names)) == len(names) >= 25
    for check, name in SENTENCES:
        assert check in CHECKS
        assert name in names


@pytest.mark.parametrize(("kind", "sentence"), REFUSED, ids=[kind.name for kind, _ in REFUSED])
def test_what_no_slot_can_serve_is_refused_with_a_sentence(kind: Kind, sentence: str) -> None:
    host = kind.fresh()
    with pytest.raises(EsperError, match=sentence):
        kind.attached(host)
    assert all(not module._forward_hooks for module in host.modules())


@every_kind
def test_slots_and_newborn_seeds_change_no_bit(kind: Kind) -> None:
    with right_or_a_sentence("attach", kind):
        for training in (False, True):
            expected = outputs(kind, kind.fresh(), training=training)
            model = kind.attached()
            for found, wanted in zip(outputs(kind, copy.deepcopy(model), training=training), expected, strict=True):
                assert torch.equal(found, wanted)
            for slot in model.slots.values():
                slot.germinate(slot.blueprints[0], torch.Generator().manual_seed(1))
            for found, wanted in zip(outputs(kind, model, training=training), expected, strict=True):
                assert torch.equal(found, wanted)


def controllers() -> list[Any]:
    """Every controller with every kind; the fast ones show what no controller shares with another."""
    return [
        pytest.param(
            kind,
            controller,
            id=f"{kind.name}-{controller}",
            marks=() if controller in ("none", "all_at_start") or kind.name in USUAL else pytest.mark.slow,
        )
        for kind in KINDS
        for controller in CONTROLLERS
    ]


@pytest.mark.parametrize(("kind", "controller"), controllers())
def test_a_plain_loop_trains_under_every_controller(kind: Kind, controller: str) -> None:
    with right_or_a_sentence("train", kind):
        training = Training.of(kind, controller).go_on(4)
    model = training.model
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())
    owned = [parameter for group in training.optimizer.param_groups for parameter in group["params"]]
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert len(owned) == len(learning)
    assert {id(parameter) for parameter in owned} == {id(parameter) for parameter in learning}
    if controller == "none":
        assert not model.seeds
        bare = kind.fresh()
        optimizer = torch.optim.AdamW([one for one in bare.parameters() if one.requires_grad], lr=RATE)
        for epoch in range(4):
            torch.manual_seed(epoch)
            kind.train(bare, optimizer, seed=epoch)
        for mine, theirs in zip(model.host.parameters(), bare.parameters(), strict=True):
            assert torch.equal(mine, theirs)
    if controller == "all_at_start":
        assert set(model.seeds) == set(model.slots)
        for seed in model.seeds.values():
            assert any(bool(parameter.any()) for parameter in list(seed.parameters())[-1:]), "a seed has not learned"


@every_kind
def test_a_plain_model_of_an_early_stop_computes_the_same_and_trains_on(kind: Kind) -> None:
    model = grown_model(kind)
    with right_or_a_sentence("finalize", kind):
        plain = plain_of(model)
        assert not any(type(part).__module__.startswith("esper") for part in plain.modules())
        for found, wanted in zip(outputs(kind, plain), outputs(kind, model), strict=True):
            torch.testing.assert_close(found, wanted)
        optimizer = torch.optim.SGD([one for one in plain.parameters() if one.requires_grad], lr=RATE)
        before = [parameter.detach().clone() for parameter in plain.parameters()]
        kind.train(plain, optimizer)
        moved = [not torch.equal(one, other) for one, other in zip(before, plain.parameters(), strict=True)]
        assert any(moved)


@every_kind
def test_grower_finish_settles_every_seed(kind: Kind) -> None:
    training = grown(kind)
    training.grower.finish()
    assert all(seed.fossilized for seed in training.model.seeds.values())
    plain = training.model.finalize(unfinished="raise")
    for found, wanted in zip(outputs(kind, plain), outputs(kind, training.model), strict=True):
        torch.testing.assert_close(found, wanted)


@every_kind
def test_a_saved_training_goes_on_as_if_never_cut(kind: Kind, tmp_path: Path) -> None:
    whole = grown(kind)
    with right_or_a_sentence("save", kind):
        esper.save(whole.model, tmp_path)
        states = copy.deepcopy((whole.optimizer.state_dict(), whole.grower.state_dict()))
        model = esper.load(tmp_path, kind.fresh(), kind.minibatches(1)[0].inputs)
        for found, wanted in zip(outputs(kind, model), outputs(kind, whole.model), strict=True):
            assert torch.equal(found, wanted)
        resumed = Training.of(kind, "all_at_start", model)
        resumed.optimizer.load_state_dict(states[0])
        resumed.grower.load_state_dict(states[1])
        resumed.epochs = whole.epochs
        for one in (whole, resumed):
            one.go_on(2)
        for found, wanted in zip(outputs(kind, resumed.model), outputs(kind, whole.model), strict=True):
            assert torch.equal(found, wanted)


@every_kind
def test_a_copy_computes_the_same_and_is_its_own(kind: Kind) -> None:
    model = grown_model(kind)
    with right_or_a_sentence("copy", kind):
        other = copy.deepcopy(model)
        before = outputs(kind, model)
        for found, wanted in zip(outputs(kind, other), before, strict=True):
            assert torch.equal(found, wanted)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(1.5)
        for found, wanted in zip(outputs(kind, model), before, strict=True):
            assert torch.equal(found, wanted)


def followed(kind: Kind, model: GrowingModel, average: AveragedModel) -> None:
    """Whether the average follows an epoch of training, compared with one computed by hand."""
    before = {name: value.detach().clone() for name, value in average.module.named_parameters()}
    kind.train(model, torch.optim.SGD(model.parameter_groups(lr=RATE)), seed=77)
    average.update_parameters(model)
    for name, parameter in model.named_parameters():
        wanted = (before[name] + parameter) / 2
        torch.testing.assert_close(average.module.get_parameter(name), wanted)
    assert all(bool(tensor.isfinite().all()) for tensor in outputs(kind, average))


@every_kind
def test_an_average_of_a_model_that_has_grown_follows_it(kind: Kind) -> None:
    model = grown_model(kind)
    with right_or_a_sentence("ema", kind):
        average = AveragedModel(model, avg_fn=get_ema_avg_fn(0.5))
        average.update_parameters(model)
        followed(kind, model, average)


@every_kind
def test_an_average_that_was_there_before_growth_follows_it(kind: Kind) -> None:
    training = Training.of(kind, "all_at_start")
    average = AveragedModel(training.model, avg_fn=get_ema_avg_fn(0.5))
    training.model.mirror(average)
    average.update_parameters(training.model)
    training.go_on(4)
    with right_or_a_sentence("ema", kind):
        average.update_parameters(training.model)
        followed(kind, training.model, average)


PADDED = tuple(kind for kind in KINDS if kind.padded is not None)


@pytest.mark.parametrize("kind", PADDED, ids=lambda kind: kind.name)
def test_padding_changes_nothing_whatever_grows(kind: Kind) -> None:
    assert kind.padded is not None
    minibatch = kind.minibatches(1)[0]
    host = kind.fresh()
    for slot in kind.slots:
        offered = esper.attach(host, {slot: "auto"}, minibatch.inputs)
        blueprints = offered.slots[slot].blueprints
        offered.release()
        for blueprint in blueprints:
            model = esper.attach(kind.fresh(), {slot: [blueprint]}, minibatch.inputs)
            stir(model, slot, blueprint)
            model.eval()
            with right_or_a_sentence("masks", kind):
                found = [tensors(call(model, one.inputs)) for one in (minibatch, kind.padded(minibatch, 5))]
                for mine, wanted in zip(*found, strict=True):
                    torch.testing.assert_close(mine, wanted, msg=lambda told, who=blueprint: f"{who}: {told}")


CACHING = tuple(kind for kind in KINDS if kind.name == "hf_gpt2")


@pytest.mark.parametrize("kind", CACHING, ids=lambda kind: kind.name)
def test_generation_with_a_cache_equals_generation_without(kind: Kind) -> None:
    tokens = {"input_ids": torch.arange(8).reshape(2, 4)}
    options = {"max_new_tokens": 6, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    for slot in kind.slots:
        host = kind.fresh()
        offered = esper.attach(host, {slot: "auto"}, tokens)
        blueprints = offered.slots[slot].blueprints
        offered.release()
        for blueprint in blueprints:
            model = esper.attach(kind.fresh(), {slot: [blueprint]}, tokens)
            stir(model, slot, blueprint)
            model.eval()
            with right_or_a_sentence("caches", kind):
                found = [model.generate(**tokens, use_cache=cache, **options) for cache in (True, False)]
                assert torch.equal(found[0].sequences, found[1].sequences)
                for mine, wanted in zip(found[0].logits, found[1].logits, strict=True):
                    torch.testing.assert_close(mine, wanted, msg=lambda told, who=blueprint: f"{who}: {told}")


EXPORTS = [
    pytest.param(kind, form, id=f"{kind.name}-{form}")
    for kind in KINDS
    for form in ("safetensors", "pt2", "onnx")
    if form != "onnx" or kind.onnx
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "form"), EXPORTS)
def test_exports_compute_the_same_elsewhere(kind: Kind, form: str, tmp_path: Path) -> None:
    plain: nn.Module = plain_of(grown_model(kind)).eval()
    inputs = kind.minibatches(1)[0].inputs
    if isinstance(inputs, dict):
        inputs = {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}
    with right_or_a_sentence(form, kind):
        esper.export(plain, inputs, form, tmp_path / f"model.{form}")
        assert (tmp_path / f"model.{form}").stat().st_size > 0
