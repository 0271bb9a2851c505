"""Running statistics: right, floored, windowed, and without effect on predictions."""

from __future__ import annotations

import pytest
import torch
from esper.engine.observation import Observation

from control.synthetic import SPEC, generator, observations
from esper.control.policy.layers import OBSERVATION_BOUND, WINDOW, ObservationNormaliser, RunningMoments
from esper.control.policy.network import ValueHead


def test_batches_merge_to_the_moments_of_their_union() -> None:
    data = torch.randn(90, 4, generator=generator()) * torch.tensor([1.0, 10.0, 0.1, 3.0]) + 5
    moments = RunningMoments(4, floor=1e-6)
    for batch in data.split([10, 50, 30]):
        moments.update(batch)
    torch.testing.assert_close(moments.mean, data.double().mean(0))
    torch.testing.assert_close(moments.variance, data.double().var(0, correction=0))


def test_old_batches_fade_so_that_statistics_follow_a_changed_policy() -> None:
    moments = RunningMoments(1, floor=1e-6)
    for _ in range(10 * WINDOW):
        moments.update(torch.zeros(5, 1))
    for _ in range(5 * WINDOW):
        moments.update(torch.ones(5, 1))
    assert moments.mean.item() > 0.99


def test_a_feature_that_hardly_varied_cannot_explode() -> None:
    normaliser = ObservationNormaliser(SPEC)
    seen = observations((6,))
    seen = seen._replace(globals=1 + 1e-4 * seen.globals)
    normaliser.update(seen)
    surprising = seen._replace(globals=seen.globals + 100)
    assert normaliser(surprising).globals.abs().max() == OBSERVATION_BOUND


def test_statistics_take_in_parts_of_several_shapes_as_one_batch() -> None:
    whole, apart = ObservationNormaliser(SPEC), ObservationNormaliser(SPEC)
    for _ in range(3):
        seen = observations((30, 4))
        whole.update(seen)
        apart.update(*(Observation(*(part[rows] for part in seen)) for rows in (slice(0, 3), slice(3, 30))))
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(apart.state_dict()[name], value)


@pytest.mark.parametrize("value", [0.0, 0.1, 1.0])
def test_what_never_varied_in_training_is_not_shown(value: float) -> None:
    normaliser = ObservationNormaliser(SPEC)
    seen = observations((7, 5))
    seen.globals[..., 2] = value
    assert normaliser(seen).globals[..., 2].eq(value).all(), "nothing is known before the first batch"
    for _ in range(50):
        normaliser.update(seen)
    elsewhere = seen._replace(globals=seen.globals + 100)
    shown = normaliser(elsewhere).globals
    assert not shown[..., 2].any()
    assert shown[..., [0, 1, 3]].abs().min() == OBSERVATION_BOUND


def test_normalised_observations_are_standard_and_reading_changes_nothing() -> None:
    normaliser = ObservationNormaliser(SPEC)
    seen = observations((50, 4))
    seen = seen._replace(slots=seen.slots * 0.3 + 2)
    normaliser.update(seen)
    before = {name: value.clone() for name, value in normaliser.state_dict().items()}
    slots = normaliser(seen).slots.flatten(0, -2)
    torch.testing.assert_close(slots.mean(0), torch.zeros(SPEC.slots), atol=1e-4, rtol=0)
    torch.testing.assert_close(slots.std(0), torch.ones(SPEC.slots), atol=1e-2, rtol=0)
    assert all(torch.equal(value, before[name]) for name, value in normaliser.state_dict().items())


@pytest.mark.parametrize("offset", [0.0, 40.0])
def test_rescaling_the_value_head_keeps_every_prediction(offset: float) -> None:
    head = ValueHead(12, 8, generator())
    memory = torch.randn(20, 12, generator=generator(1))
    for seed, spread in enumerate((3.0, 0.2, 7.0)):
        before = head(memory)
        head.rescale(torch.randn(30, 4, generator=generator(seed)) * spread + offset)
        torch.testing.assert_close(head(memory), before, atol=1e-4, rtol=1e-5)
    assert head.scale.item() == pytest.approx(head.returns.variance.sqrt().item())
