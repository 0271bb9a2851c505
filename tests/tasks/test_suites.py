"""What every suite promises."""

import json
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call, stack_module_state, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from esper.errors import TaskError
from esper.numerics.modules import Conv1d
from esper.tasks.generated_suite import GeneratedSuite
from esper.tasks.instance import PARTS, Instance, Part
from esper.tasks.registry import GENERATED, get_suite
from esper.tasks.suite import Suite
from factories import Decomposed


def test_every_prefix_of_a_sample_is_balanced(suite: Suite) -> None:
    sample = suite.sample(60, "train", np.random.default_rng(0))
    for count in range(1, len(sample) + 1):
        families = Counter(instance.family for instance in sample[:count])
        assert max(families.values()) - min(families[family] for family in suite.families) <= 1
    for family in suite.families:
        variants = Counter(instance.variant for instance in sample if instance.family == family)
        assert max(variants.values()) - min(variants[variant] for variant in suite.variants(family)) <= 1


def test_splits_share_no_seed_and_transfer_no_family(suite: Suite) -> None:
    rng = np.random.default_rng(0)
    count = 200 if suite.transfer_families else 0
    train, heldout, transfer = (
        suite.sample(200, "train", rng),
        suite.sample(200, "heldout", rng),
        suite.sample(count, "transfer", rng),
    )
    seeds = [{instance.seed for instance in sample} for sample in (train, heldout, transfer) if sample]
    assert all(max(before) < min(after) for before, after in pairwise(seeds))
    assert {instance.family for instance in train} == {instance.family for instance in heldout} == set(suite.families)
    assert {instance.family for instance in transfer} == set(suite.transfer_families)
    assert len(suite.transfer_families) >= 2 or suite.name.startswith(GENERATED)
    assert not set(suite.families) & set(suite.transfer_families)


def test_a_split_without_families_has_no_instances(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "transfer_families", ())
    assert suite.sample(0, "transfer", np.random.default_rng(0)) == []
    with pytest.raises(TaskError, match=f"suite '{suite.name}' has no families for the split 'transfer'"):
        suite.sample(1, "transfer", np.random.default_rng(0))


def test_sampling_is_reproducible(suite: Suite) -> None:
    first, second = (suite.sample(20, "train", np.random.default_rng(3)) for _ in range(2))
    assert first == second


def test_data_have_the_declared_sizes(suite: Suite, instances: list[Instance]) -> None:
    for instance in instances:
        sizes = {"train": instance.train_size, "validation": suite.validation_size, "test": suite.test_size}
        for part in PARTS:
            data = suite.data(instance, part, (0 if instance.drift_step is None else 1))
            assert data.inputs.shape == (sizes[part], *suite.input_shape)
            assert data.inputs.dtype == torch.float32
            assert data.labels.shape == (len(data), *suite.label_shape)
            assert data.labels.dtype == torch.int64
            labels = set(data.labels.flatten().tolist())
            # A language need not use all symbols.
            assert labels == set(range(suite.classes)) or (suite.label_shape and labels <= set(range(suite.classes)))


def test_training_inputs_are_standardised(suite: Suite, instances: list[Instance]) -> None:
    for instance in instances:
        inputs = suite.data(instance, "train").inputs
        torch.testing.assert_close(inputs.mean(), torch.tensor(0.0), atol=1e-4, rtol=0)
        torch.testing.assert_close(inputs.std(correction=0), torch.tensor(1.0), atol=1e-4, rtol=0)


def shows_symbols(suite: Suite) -> bool:
    """Whether inputs are one-hot: they have one scale in all parts."""
    return suite.name == "language" or (isinstance(suite, GeneratedSuite) and suite.kind == "language")


def test_other_parts_use_the_scale_of_the_training_part(suite: Suite, instances: list[Instance]) -> None:
    """If each part used its own, all deviations would be exactly 1."""
    if shows_symbols(suite):
        pytest.skip("one-hot inputs")
    for instance in instances:
        for part in ("validation", "test"):
            deviation = float(suite.data(instance, part).inputs.std(correction=0))
            assert deviation != pytest.approx(1, abs=1e-5)
            assert 0.2 < deviation < 5


def test_parts_are_disjoint(suite: Suite, instances: list[Instance]) -> None:
    if shows_symbols(suite) and isinstance(suite, GeneratedSuite):
        pytest.skip("so short sequences that the same ones are drawn again")
    for instance in instances:
        parts = [suite.data(instance, part).inputs.flatten(1).numpy() for part in PARTS]
        rows = np.concatenate(parts)
        assert len(np.unique(rows, axis=0)) == len(rows)


def test_data_do_not_depend_on_earlier_calls(suite: Suite, instances: list[Instance]) -> None:
    forwards = {(i, part): suite.data(i, part) for i in instances for part in PARTS}
    for part in reversed(PARTS):
        for instance in reversed(instances):
            again = suite.data(instance, part)
            assert torch.equal(again.inputs, forwards[instance, part].inputs)
            assert torch.equal(again.labels, forwards[instance, part].labels)


def test_callers_may_write_to_data(suite: Suite, instances: list[Instance]) -> None:
    instance = instances[0]
    for part in PARTS:
        before = suite.data(instance, part)
        expected = before.inputs.clone(), before.labels.clone()
        before.inputs.zero_()
        before.labels.zero_()
        after = suite.data(instance, part)
        assert torch.equal(after.inputs, expected[0])
        assert torch.equal(after.labels, expected[1])


def test_different_seeds_give_different_data_and_hosts(suite: Suite) -> None:
    rng = np.random.default_rng(0)
    first, second = (suite.draw(suite.families[0], suite.variants(suite.families[0])[0], seed, rng) for seed in (1, 2))
    assert not torch.equal(suite.data(first, "validation").inputs, suite.data(second, "validation").inputs)
    assert not torch.equal(*(suite.host(instance).get_parameter("head.weight") for instance in (first, second)))


def test_hosts_neither_read_nor_move_global_randomness(suite: Suite, instances: list[Instance]) -> None:
    for instance in instances:
        host = suite.host(instance)
        torch.manual_seed(instance.seed + 1)
        state = torch.get_rng_state()
        again = suite.host(instance)
        suite.template()
        assert torch.equal(torch.get_rng_state(), state)
        for name, parameter in host.named_parameters():
            assert torch.equal(again.get_parameter(name), parameter)


class Recorder(nn.Module):
    """A forward hook that keeps the shape of what passes."""

    def __init__(self) -> None:
        super().__init__()
        self.shape = torch.Size()

    def forward(self, module: nn.Module, inputs: object, features: torch.Tensor) -> None:
        self.shape = features.shape


class Doubler(nn.Module):
    """A forward hook that doubles what passes."""

    def forward(self, module: nn.Module, inputs: object, features: torch.Tensor) -> torch.Tensor:
        return 2 * features


def test_hosts_have_the_widths_of_their_instance_at_the_sites(suite: Suite, instances: list[Instance]) -> None:
    convolves = isinstance(suite, GeneratedSuite) and suite.kind in ("signals", "images")
    channels = 1 if suite.name in ("mnist1d_conv", "images") or convolves else -1
    for instance in instances:
        host = suite.host(instance)
        recorders = [Recorder() for _ in suite.sites]
        for site, recorder in zip(suite.sites, recorders, strict=True):
            host.get_submodule(site).register_forward_hook(recorder)
        logits = host(suite.data(instance, "validation").inputs)
        assert logits.shape == (suite.validation_size, *suite.label_shape, suite.classes)
        assert tuple(recorder.shape[channels] for recorder in recorders) == instance.widths


def shapes_of(suite: Suite, instance: Instance) -> list[torch.Size]:
    return [parameter.shape for parameter in suite.host(instance).parameters()]


def test_hooks_at_the_sites_act_on_stacked_hosts(suite: Suite, instances: list[Instance]) -> None:
    template = suite.template()
    full = [parameter.shape for parameter in template.parameters()]
    widest = [one for one in instances if shapes_of(suite, one) == full and not one.linear][:2]
    hosts = [suite.host(instance) for instance in widest]
    inputs = torch.stack([suite.data(instance, "test").inputs[:5] for instance in widest])
    for module in (template, *hosts):
        module.get_submodule(suite.sites[0]).register_forward_hook(Doubler())
    parameters, buffers = stack_module_state(hosts)

    def forward(p: dict[str, torch.Tensor], b: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return functional_call(template, (p, b), (x,))

    stacked = vmap(forward)(parameters, buffers, inputs)
    for network, host in enumerate(hosts):
        torch.testing.assert_close(stacked[network], host(inputs[network]))


@pytest.mark.parametrize("part", ["validation", "test"])
def test_label_noise_touches_training_labels_only(suite: Suite, instances: list[Instance], part: Part) -> None:
    noisy = next(instance for instance in instances if instance.label_noise > 0)
    clean = type(noisy).from_json({**noisy.to_json(), "label_noise": 0.0, "train_size": 96})
    noisy = type(noisy).from_json({**noisy.to_json(), "train_size": 96})
    assert torch.equal(suite.data(noisy, part).labels, suite.data(clean, part).labels)
    changed = (suite.data(noisy, "train").labels != suite.data(clean, "train").labels).float().mean()
    kept_by_chance = 1 / suite.classes
    assert float(changed) == pytest.approx(noisy.label_noise * (1 - kept_by_chance), abs=0.15)


def test_foreign_instances_are_refused(suite: Suite) -> None:
    other = get_suite("digits" if suite.name == "tokens" else "tokens")
    instance = other.sample(1, "train", np.random.default_rng(0))[0]
    with pytest.raises(TaskError, match=f"belongs to suite '{other.name}', not to '{suite.name}'"):
        suite.host(instance)
    with pytest.raises(TaskError, match="belongs to suite"):
        suite.data(instance, "train")


def test_data_that_never_drift_have_no_second_phase(suite: Suite, instances: list[Instance]) -> None:
    instance = next(instance for instance in instances if instance.drift_step is None)
    with pytest.raises(TaskError, match="no phase 1"):
        suite.data(instance, "train", phase=1)


def test_unknown_families_and_variants_are_refused(suite: Suite) -> None:
    with pytest.raises(TaskError, match=f"did you mean '{suite.families[0]}'"):
        suite.variants(suite.families[0] + "x")
    with pytest.raises(TaskError, match="'13_13'"):
        suite.draw(suite.families[0], "13_13", 0, np.random.default_rng(0))


# FLOPs of hosts -------------------------------------------------------------------------------------------------------


def test_flops_of_hosts_are_those_that_torch_counts_in_training(suite: Suite, instances: list[Instance]) -> None:
    for instance in instances:
        host = suite.host(instance).train()
        plain, unfused = torch.backends.mkldnn.flags(enabled=False), sdpa_kernel(SDPBackend.MATH)
        with torch.no_grad(), plain, unfused, FlopCounterMode(display=False) as counter:
            host(torch.zeros(3, *suite.input_shape))
        assert suite.flops(instance) == counter.get_total_flops() // 3 > 0


def replace_layer(monkeypatch: pytest.MonkeyPatch, layer: nn.Module) -> tuple[Suite, Instance]:
    """A suite whose hosts have another layer behind theirs, and an instance."""
    suite = get_suite("tokens")
    usual = suite.host
    monkeypatch.setattr(suite, "host", lambda instance: nn.Sequential(usual(instance), layer))
    return suite, suite.sample(1, "train", np.random.default_rng(0))[0]


def test_hosts_are_counted_whatever_layers_they_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some cannot train on one example, and some draw random numbers when they train."""
    plain, instance = replace_layer(monkeypatch, nn.Identity())
    expected = plain.flops(instance)
    random = torch.get_rng_state()
    for layer in (nn.BatchNorm1d(plain.classes), nn.Dropout(), nn.AlphaDropout(), nn.RReLU()):
        monkeypatch.undo()
        suite, _ = replace_layer(monkeypatch, layer)
        assert suite.flops(instance) == expected
    assert torch.equal(torch.get_rng_state(), random)


def test_hosts_that_cannot_be_counted_are_refused_by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    classes = get_suite("tokens").classes
    suite, instance = replace_layer(monkeypatch, Decomposed(classes, classes))
    with pytest.raises(TaskError, match=r"unknown, since torch cannot count aten::_linalg_svd in .1."):
        suite.flops(instance)


# An instance survives JSON, and a record of something else is refused with a sentence.


instances = st.builds(
    Instance,
    widths=st.lists(st.integers(1, 99)).map(tuple),
    seed=st.integers(0, 2**40),
    learning_rate=st.floats(1e-5, 1),
    rent=st.floats(0, 1),
    label_noise=st.floats(0, 1),
)


@given(instances)
def test_json_round_trip(instance: Instance) -> None:
    again = Instance.from_json(json.loads(json.dumps(instance.to_json())))
    assert again == instance
    assert {instance: 1}[again] == 1


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"colour": "red"}, "colour"),
        ({"suite": None}, "suite"),
        ({"seed": None}, "seed"),
        ({"widths": None}, "widths"),
        ({"train_size": "many"}, "train_size"),
    ],
)
def test_unknown_missing_and_mistyped_fields_are_refused(change: dict[str, str | None], field: str) -> None:
    drawn = get_suite("tokens").sample(1, "train", np.random.default_rng(0))[0]
    record = {
        name: value for name, value in (drawn.to_json() | change).items() if value is not None or name not in change
    }
    with pytest.raises(TaskError, match=field):
        Instance.from_json(record)


# A narrow host padded with zeros to the template's shapes is the same host, and stays so while it learns.


STEPS = 20


def pad_into(template: nn.Module, narrow: nn.Module) -> dict[str, torch.Tensor]:
    """Fill the template with the narrow host and zeros; where the narrow host lives, as masks by parameter name."""
    live: dict[str, torch.Tensor] = {}
    sources = {**dict(narrow.named_parameters()), **dict(narrow.named_buffers())}
    for name, target in [*template.named_parameters(), *template.named_buffers()]:
        live[name] = torch.zeros_like(target, dtype=torch.bool)
        live[name][tuple(slice(0, size) for size in sources[name].shape)] = True
        target.data.zero_()
        target.data[live[name]] = sources[name].detach().flatten()
    return live


@pytest.mark.few(4)
def test_padded_hosts_learn_like_narrow_ones(suite: Suite, instances: list[Instance]) -> None:
    # One instance of each shape of host.
    shapes = {
        (instance.linear, *(parameter.shape for parameter in suite.host(instance).parameters())): instance
        for instance in instances
    }
    for instance in shapes.values():
        narrow, padded = suite.host(instance).double(), suite.template().double()
        live = pad_into(padded, narrow)
        data = suite.data(instance, "train")
        optimizers = [torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9) for module in (narrow, padded)]
        # Where every position has a label a few examples are as many labels.
        size, steps = (4, STEPS // 4) if suite.label_shape else (32, STEPS)
        for step in range(steps):
            rows = torch.arange(step * size, (step + 1) * size) % len(data)
            for host, optimizer in zip((narrow, padded), optimizers, strict=True):
                optimizer.zero_grad()
                logits = host(data.inputs[rows].double())
                F.cross_entropy(logits.flatten(0, -2), data.labels[rows].flatten()).backward()
                optimizer.step()
            for key, parameter in padded.named_parameters():
                assert not parameter.grad[~live[key]].any(), f"padding of {key} has a gradient"
        inputs = suite.data(instance, "validation").inputs.double()
        torch.testing.assert_close(padded(inputs), narrow(inputs), atol=1e-10, rtol=1e-10)
        assert suite.parameters(instance) == sum(int(live[key].sum()) for key, _ in padded.named_parameters())


# Layers that compute stacks compute what torch's own do.


@pytest.mark.parametrize("kernel", [1, 3, 5])
@pytest.mark.parametrize("stride", [1, 2, 3])
def test_a_convolution_equals_torchs_alone_and_in_a_stack(kernel: int, stride: int) -> None:
    generator = torch.Generator().manual_seed(0)
    layer = Conv1d(3, 4, kernel, stride, generator).double()
    layer.bias.data.uniform_(generator=generator)
    signals = torch.randn(2, 5, 3, 10, generator=generator, dtype=torch.float64)
    expected = F.conv1d(signals.flatten(0, 1), layer.weight, layer.bias, stride, kernel // 2).unflatten(0, (2, 5))
    torch.testing.assert_close(layer(signals[0]), expected[0])
    weights = {name: torch.stack([own, -own]) for name, own in layer.named_parameters()}
    stacked = torch.func.functional_call(layer, weights, (signals,))
    torch.testing.assert_close(stacked, torch.stack([expected[0], -expected[1]]))
