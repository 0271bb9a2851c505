"""Data that change after a host has learned them."""

from __future__ import annotations

import pytest
import torch

from esper.errors import ConfigError
from esper.growth.blueprints.registry import get
from esper.practice.shifts import BATCH, INPUT_SHIFTS, LABEL_SHIFTS, change_data, find_shift, offer_everywhere
from esper.tasks.practice.examples import Minibatch
from esper.tasks.practice.hosts import HOSTS
from esper.tasks.practice.registry import DataAccess, get_task

CLASSES = 10


def minibatch(*shape: int) -> Minibatch:
    inputs = torch.randn(12, *shape, generator=torch.Generator().manual_seed(0))
    return Minibatch(inputs, torch.arange(12) % CLASSES)


@pytest.mark.parametrize("shape", [(1, 8, 8), (1, 40)], ids=["images", "signals"])
@pytest.mark.parametrize("name", INPUT_SHIFTS)
def test_inputs_change_and_labels_do_not(name: str, shape: tuple[int, ...]) -> None:
    before = minibatch(*shape)
    after = find_shift(name, CLASSES, torch.Generator().manual_seed(0))(before)
    assert after.inputs.shape == before.inputs.shape
    assert (after.inputs != before.inputs).any()
    assert torch.equal(after.targets, before.targets)
    again = find_shift(name, CLASSES, torch.Generator().manual_seed(0))(before)
    assert torch.equal(again.inputs, after.inputs)


@pytest.mark.parametrize("name", LABEL_SHIFTS)
def test_labels_change_within_the_classes_and_inputs_do_not(name: str) -> None:
    before = minibatch(1, 40)
    after = find_shift(name, CLASSES, torch.Generator())(before)
    assert torch.equal(after.inputs, before.inputs)
    assert (after.targets != before.targets).any()
    assert 0 <= after.targets.min() <= after.targets.max() < CLASSES


def test_what_is_learned_anew_is_not_what_judges() -> None:
    splits = get_task("digits").load(DataAccess())
    data = change_data(splits, "inversion", 120)
    assert len(data.new) == 3
    assert sum(len(batch.targets) for batch in data.new) == 3 * BATCH
    expected = -next(iter(splits.test.in_order(BATCH))).inputs
    assert torch.equal(data.test[0].inputs, expected)
    rows = {tuple(row.tolist()) for batch in data.new for row in batch.inputs.flatten(1)}
    judged = [tuple(row.tolist()) for batch in data.test for row in batch.inputs.flatten(1)]
    assert sum(row in rows for row in judged) <= 2  # digits has some images twice


def test_what_is_protected_was_neither_learned_nor_is_it_judged_by() -> None:
    splits = get_task("digits").load(DataAccess())
    assert not change_data(splits, "inversion", 200).old
    data = change_data(splits, "inversion", 150, protected=True)
    validation = list(splits.validation.in_order(BATCH))
    assert len(data.new) == len(data.old) == 3
    for old, spare in zip(data.old, validation[3:6], strict=True):
        assert torch.equal(old.inputs, spare.inputs)
        assert torch.equal(old.targets, spare.targets)
    assert len(change_data(splits, "inversion", 200, protected=True).old) == 2
    with pytest.raises(ConfigError, match="examples is 201 of 300 .* give 200 at most, or protect nothing"):
        change_data(splits, "inversion", 201, protected=True)


def test_noise_differs_from_batch_to_batch() -> None:
    shift = find_shift("noise", CLASSES, torch.Generator().manual_seed(0))
    before = minibatch(1, 40)
    assert not torch.equal(shift(before).inputs, shift(before).inputs)


@pytest.mark.parametrize(
    ("examples", "message"), [(BATCH, "two are needed"), (0, "two are needed"), (10**6, "no more than 300 to spare")]
)
def test_too_few_and_too_many_examples_are_refused(examples: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        change_data(get_task("digits").load(DataAccess()), "inversion", examples)


def test_a_near_name_is_offered() -> None:
    with pytest.raises(ConfigError, match="did you mean 'inversion'"):
        find_shift("invresion", CLASSES, torch.Generator())


@pytest.mark.parametrize("kind", [name for name, host in HOSTS.items() if name != "gpt"])
def test_all_that_is_on_offer_can_grow_there(kind: str) -> None:
    shape = (1, 40) if kind == "conv1d" else (1, 8, 8)
    host = HOSTS[kind].build(shape, CLASSES, torch.Generator().manual_seed(0)).eval()
    offers = offer_everywhere(host, kind, torch.zeros(2, *shape))
    assert any("lora_4" in names for names in offers.values())
    assert set(HOSTS[kind].sites) <= set(offers)
    assert all(get(name) for names in offers.values() for name in names)
