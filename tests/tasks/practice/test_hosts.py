"""Every host reads the tasks it is said to suit, from weights that follow from its generator alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from esper.errors import TaskError
from esper.growth.attach import attach
from esper.tasks.practice.hosts import HOSTS, build_host
from esper.tasks.practice.registry import TASKS, get_host, get_task, host_for

CLASSES = 7
SHAPES: dict[str, tuple[int, ...]] = {
    "digits": (1, 8, 8),
    "mnist1d": (1, 40),
    "fashion-mnist": (1, 28, 28),
    "cifar10": (3, 32, 32),
    "charlm": (16,),
}
SUITED = [(task, host) for task in TASKS for host in get_task(task).hosts]


def example(task: str, count: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    if get_task(task).reads_text:
        return torch.randint(CLASSES, (count, *SHAPES[task]), generator=generator)
    return torch.randn(count, *SHAPES[task], generator=generator)


def host(task: str, name: str, seed: int = 0) -> nn.Module:
    return get_host(name).build(SHAPES[task], CLASSES, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("task", "name"), SUITED)
def test_hosts_read_their_tasks_and_every_parameter_learns(task: str, name: str) -> None:
    model, inputs = host(task, name), example(task)
    logits = model(inputs)
    expected = (*inputs.shape, CLASSES) if get_task(task).reads_text else (len(inputs), CLASSES)
    assert logits.shape == expected
    assert logits.isfinite().all()
    (logits**2).sum().backward()
    unmoved = [key for key, parameter in model.named_parameters() if parameter.grad is None]
    assert not unmoved


@pytest.mark.parametrize(("task", "name"), SUITED)
def test_every_blueprint_of_a_host_fits_where_it_is_on_offer(task: str, name: str) -> None:
    model = attach(host(task, name), get_host(name).slots, example(task))
    assert list(model.slots) == list(get_host(name).slots)
    for slot in model.slots.values():
        for blueprint in slot.blueprints:
            slot.germinate(blueprint, torch.Generator().manual_seed(0), alpha=1.0)
            model(example(task))
            slot.prune()
    assert {slot.site.causal for slot in model.slots.values()} == {name == "gpt"}


@pytest.mark.parametrize("name", HOSTS)
def test_weights_follow_from_the_generator_and_leave_the_global_one_alone(name: str) -> None:
    task = next(task for task, suited in SUITED if suited == name)
    before = torch.get_rng_state()
    first, same, other = (host(task, name, seed).state_dict() for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(first[key], same[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)


def test_a_layer_without_a_rule_is_refused() -> None:
    with pytest.raises(TypeError, match="GRUCell"):
        build_host(lambda: nn.GRUCell(2, 2), torch.Generator())


def test_names_that_do_not_exist_or_do_not_suit() -> None:
    assert host_for("digits", None) == get_task("digits").hosts[0]
    with pytest.raises(TaskError, match="did you mean 'digits'"):
        host_for("digit", None)
    with pytest.raises(TaskError, match="did you mean 'resnet'"):
        host_for("digits", "resne")
    with pytest.raises(TaskError, match="'gpt' cannot read task 'digits': choose from conv"):
        host_for("digits", "gpt")
