"""Whatever users attach: every kind of model in every check is either right, or refused with a sentence."""

import copy
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn
from torch.utils.flop_counter import FlopCounterMode

import esper
from conformance.growth import DECISIONS, HORIZON, RATE, Training, grown, grown_model, outputs, plain_of
from conformance.kind import Kind, tensors
from conformance.kinds import CONTROLLERS, KINDS, LEARNED, REFUSED, SENTENCES, every_kind, right_or_a_sentence
from esper.errors import EsperError
from esper.growth.export import export
from esper.growth.inputs import call_host, first_tensor
from esper.growth.model import GrowingModel
from factories import plant
from train.runs import create_untrained_run

pytestmark = pytest.mark.landing

USUAL = ("mlp", "resnet", "char_lm", "regression")
CHECKS = {
    *("attach", "train", "finalize", "save", "resume", "ema", "masks", "caches", "safetensors"),
    *("pt2", "onnx", "lightning", "hf_trainer"),
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


@pytest.fixture
def unfused() -> Iterator[None]:
    """Torch keeps encoder layers that have hooks off its fused kernel, which rounds in another way."""
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(True)


@every_kind
@pytest.mark.usefixtures("unfused")
def test_slots_and_newborn_seeds_change_no_bit(kind: Kind) -> None:
    with right_or_a_sentence("attach", kind):
        for training in (False, True):
            expected = outputs(kind, kind.fresh(), training=training and not kind.frozen)
            model = kind.attached()
            for found, wanted in zip(outputs(kind, copy.deepcopy(model), training=training), expected, strict=True):
                assert torch.equal(found, wanted)
            for slot in model.slots.values():
                slot.germinate(slot.blueprints[0], torch.Generator().manual_seed(1))
            for found, wanted in zip(outputs(kind, model, training=training), expected, strict=True):
                assert torch.equal(found, wanted)


@every_kind
def test_flops_of_hosts_are_those_of_training_wherever_the_slots_are(kind: Kind) -> None:
    """As torch counts in training mode without fused kernels, and beside that products of matrices with vectors."""
    host, inputs = kind.fresh().train(not kind.frozen), kind.minibatches(1)[0].inputs
    vectors = {
        torch.ops.aten.mv: lambda matrix, _, **__: 2 * math.prod(matrix),
        torch.ops.aten.dot: lambda vector, _, **__: 2 * math.prod(vector),
        torch.ops.aten.vdot: lambda vector, _, **__: 2 * math.prod(vector),
    }
    plain, unfused = torch.backends.mkldnn.flags(enabled=False), sdpa_kernel(SDPBackend.MATH)
    with torch.no_grad(), plain, unfused, FlopCounterMode(display=False, custom_mapping=vectors) as counter:
        call_host(host, inputs)
    expected = counter.get_total_flops() // len(first_tensor(inputs))
    for name in kind.slots:
        model = esper.attach(kind.fresh(), [name], inputs, freeze_host=kind.frozen)
        assert (model.host_flops, model.uncounted_flops) == (expected, ""), name
    assert kind.attached().host_flops == expected > 0


@every_kind
def test_attaching_leaves_buffers_modes_and_random_numbers_as_they_were(kind: Kind) -> None:
    host, untouched = kind.fresh(), kind.fresh().state_dict()
    inputs, random = kind.minibatches(1)[0].inputs, torch.get_rng_state()
    model = esper.attach(host, kind.slots, inputs)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(module.training for module in model.host.modules()) is all(m.training for m in kind.fresh().modules())
    for name, value in host.state_dict().items():
        assert torch.equal(value, untouched[name]), name


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


def test_every_controller_is_among_them() -> None:
    rules = ", ".join(name for name in CONTROLLERS if name != LEARNED)
    with pytest.raises(EsperError, match=f"give one of {rules}, the directory of a run"):
        Training.of(KINDS[0], "nobody")


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The run of one that has learned nothing yet, and was made eager to plant."""
    return create_untrained_run(tmp_path_factory.mktemp("learned") / "run", "policy.op_prior.germinate=5")


@pytest.mark.parametrize(("kind", "controller"), controllers())
def test_a_plain_loop_trains_under_every_controller(
    kind: Kind, controller: str, request: pytest.FixtureRequest
) -> None:
    decides = request.getfixturevalue("policy") if controller == LEARNED else controller
    with right_or_a_sentence("train", kind):
        training = Training.of(kind, decides).go_on(DECISIONS)
        if controller == "all_at_plateau" or (controller != "none" and not training.ever):
            training.go_on(HORIZON - DECISIONS)
    model = training.model
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())
    owned = [parameter for group in training.optimizer.param_groups for parameter in group["params"]]
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert len(owned) == len(learning)
    assert {id(parameter) for parameter in owned} == {id(parameter) for parameter in learning}
    assert bool(training.ever) is (controller != "none")
    if controller == "none":
        bare = kind.fresh()
        optimizer = torch.optim.AdamW([one for one in bare.parameters() if one.requires_grad], lr=RATE)
        for epoch in range(0 if kind.frozen else DECISIONS):
            torch.manual_seed(epoch)
            kind.train(bare, optimizer, seed=epoch)
        for mine, theirs in zip(model.host.parameters(), bare.parameters(), strict=True):
            assert torch.equal(mine, theirs)
    if controller in ("all_at_start", "all_at_plateau"):
        assert training.ever == set(model.slots)
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
    training.go_on(DECISIONS)
    assert training.model.seeds
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
            plant(model, slot, blueprint)
            model.eval()
            with right_or_a_sentence("masks", kind):
                for gradient in (False, True):
                    with torch.set_grad_enabled(gradient):
                        found = [
                            tensors(call_host(model, one.inputs)) for one in (minibatch, kind.padded(minibatch, 5))
                        ]
                    for mine, wanted in zip(*found, strict=True):
                        torch.testing.assert_close(mine, wanted, msg=lambda told, who=blueprint: f"{who}: {told}")


def generates(kind: Kind) -> bool:
    """Whether a model writes text by itself, as Hugging Face's language models do: they cache what came before."""
    asked = getattr(kind.fresh(), "can_generate", None)
    return asked is not None and asked()


CACHING = tuple(kind for kind in KINDS if generates(kind))


def generated(model: nn.Module, *, cache: bool) -> Tensor:
    """Logits of what it writes."""
    tokens = torch.arange(1, 9).reshape(2, 4)
    options = {"max_new_tokens": 3, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    mask = torch.ones_like(tokens)
    found = model.eval().generate(tokens, attention_mask=mask, use_cache=cache, eos_token_id=None, **options)
    return torch.stack(found.logits)


def caching(kind: Kind) -> Mapping[str, Any]:
    """What such a model is called with where nobody says that it is to cache nothing."""
    inputs = kind.minibatches(1)[0].inputs
    assert isinstance(inputs, Mapping)
    return {name: value for name, value in inputs.items() if name != "use_cache"}


def test_several_models_cache() -> None:
    assert {"hf_gpt2", "hf_t5"} <= {kind.name for kind in CACHING}


@pytest.mark.parametrize("kind", CACHING, ids=lambda kind: kind.name)
def test_generation_with_a_cache_equals_generation_without(kind: Kind) -> None:
    """Of a model that was never called before, too: its encoder may be called alone."""
    bare = generated(kind.fresh(), cache=False)
    torch.testing.assert_close(generated(kind.fresh(), cache=True), bare)
    for slot in kind.slots:
        offered = esper.attach(kind.fresh(), {slot: "auto"}, caching(kind))
        for blueprint in offered.slots[slot].blueprints:
            model = esper.attach(kind.fresh(), {slot: [blueprint]}, caching(kind))
            plant(model, slot, blueprint)
            with right_or_a_sentence("caches", kind):
                expected = generated(model, cache=False)
                assert not torch.allclose(expected, bare), f"{blueprint} in {slot!r} does nothing"
                torch.testing.assert_close(generated(model, cache=True), expected)


@pytest.mark.parametrize("kind", CACHING, ids=lambda kind: kind.name)
def test_a_plain_model_generates_as_the_grown_one_with_a_cache_or_without(kind: Kind) -> None:
    model = grown_model(kind)
    with right_or_a_sentence("caches", kind):
        expected = generated(model, cache=False)
        for one in (model, plain_of(model)):
            for cache in (True, False):
                torch.testing.assert_close(generated(one, cache=cache), expected)


EXPORTS = [
    pytest.param(kind, form, id=f"{kind.name}-{form}")
    for kind in KINDS
    for form in ("pt2", "onnx")
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
        export(plain, tmp_path / f"model.{form}", inputs)
        assert (tmp_path / f"model.{form}").stat().st_size > 0
