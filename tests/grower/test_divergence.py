"""Whatever way training goes wrong, it is told of or undone, and no seed is kept on a dead network."""

import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import esper
from esper.engine.governor import Trouble
from esper.errors import DivergedError
from esper.grower import Grower
from esper.lifecycle.actions import Op
from grower.divergence import CLASSES, EPOCHS, SKEW, SPOILED, WAYS, Training, Way, course

pytestmark = pytest.mark.landing

KEEPING = ["heuristic", "periodic", "all_at_start", "random"]
"""Every rule that may fossilize."""


def noticed(name: str, measure: str, **options: Any) -> None:
    way = WAYS[name]
    # Without an accuracy, what was wrong from the start shows only beside the loss of guessing.
    classes = {"classes": CLASSES} if measure == "loss" and way.start == 1 else {}
    found = course(way, measure, **options, **classes)
    assert found.ends
    if name != "a rate of zero from the start":  # nothing changes then, which is no death
        assert not found.fossilized


@pytest.mark.parametrize("measure", ["accuracy", "loss"])
@pytest.mark.parametrize("name", WAYS)
def test_what_goes_wrong_is_noticed(name: str, measure: str) -> None:
    noticed(name, measure)


@pytest.mark.parametrize("number", range(len(WAYS)))
@pytest.mark.parametrize("measure", ["accuracy", "loss"])
def test_what_goes_wrong_is_noticed_where_one_class_is_frequent(number: int, measure: str) -> None:
    """Each way meets one of the controllers, and each controller every fourth way, by either measure."""
    controller = KEEPING[(number + (measure == "loss")) % len(KEEPING)]
    noticed(list(WAYS)[number], measure, controller=controller, skew=SKEW)


@pytest.mark.parametrize("controller", KEEPING)
@pytest.mark.parametrize("name", ["adam at 100 from the start", "dead from the start", "dead units", "weights of zero"])
def test_no_controller_keeps_a_seed_on_a_network_that_guesses_the_most_frequent_class(
    name: str, controller: str
) -> None:
    noticed(name, "accuracy", controller=controller, skew=SKEW)


def test_a_dead_network_is_rolled_back_although_its_accuracy_looks_skilled() -> None:
    training = Training(skew=SKEW, controller="none")
    for _ in range(SPOILED):
        training.grower.step(train_loss=training.epoch())
    WAYS["dead units"].spoil(training)  # type: ignore[misc]
    rollbacks = []
    while not rollbacks:
        loss = training.epoch()
        with torch.no_grad():
            training.model.host[0].bias.fill_(-1e6)
        decision = training.grower.step(train_loss=loss)
        rollbacks += [decision.rollback] if decision.rollback else []
        assert training.grower.decisions < EPOCHS
    assert rollbacks[0].trouble is Trouble.COLLAPSED


def _shuffle(training: Training, share: float) -> None:
    generator = torch.Generator().manual_seed(5)
    wrong = torch.rand(len(training.labels), generator=generator) < share
    training.labels[wrong] = torch.randint(CLASSES, (int(wrong.sum()),), generator=generator)


def _few(training: Training) -> None:
    training.inputs, training.labels = training.inputs[:12].repeat(8, 1), training.labels[:12].repeat(8)


HEALTHY: dict[str, Way] = {
    "adamw": Way(),
    "sgd": Way(lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9)),
    "rmsprop": Way(lambda groups: torch.optim.RMSprop(groups, lr=0.01)),
    "noisy": Way(lambda groups: torch.optim.SGD(groups, lr=0.3, momentum=0.8)),
    "noisy labels": Way(None, lambda training: _shuffle(training, 0.3), 1),
    "overfitting": Way(None, _few, 1),
}


@pytest.mark.parametrize("skew", [0.0, SKEW])
@pytest.mark.parametrize("measure", ["accuracy", "loss"])
@pytest.mark.parametrize("name", HEALTHY)
def test_what_is_sound_raises_no_alarm(name: str, measure: str, skew: float) -> None:
    found = course(HEALTHY[name], measure, skew=skew)
    # Where the loss is all that is known, one that goes on rising while it overfits may be told of; nothing is undone.
    assert found.ends <= ({"warning"} if (name, measure) == ("overfitting", "loss") else set())
    assert len(found.decisions) == EPOCHS


SUMMED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "summed over many": lambda logits, labels: 100 * F.cross_entropy(logits, labels, reduction="sum"),
    "of scaled cosines": lambda logits, labels: F.cross_entropy(64 * F.normalize(logits) - 16 * _hot(labels), labels),
    "weighed": lambda logits, labels: 1e3 * F.cross_entropy(logits, labels),
}


def _hot(labels: Tensor) -> Tensor:
    return F.one_hot(labels, CLASSES).float()


def _in_units_of(name: str, rate: float) -> tuple[list[esper.Decision], int]:
    """Decisions about a sound training with that loss, and how many seeds were kept."""
    training, loss_of = Training(lambda groups: torch.optim.AdamW(groups, lr=rate)), SUMMED[name]

    @torch.no_grad()
    def evaluate(model: nn.Module) -> tuple[Tensor, float]:
        inputs, labels = training._held_out
        logits = model.eval()(inputs)
        return loss_of(logits, labels), (logits.argmax(1) == labels).float().mean().item()

    grower = Grower(training.model, training.optimizer, evaluate=evaluate, horizon=2 * EPOCHS)
    decisions: list[esper.Decision] = []
    with torch.no_grad():
        training.model.host[4].bias[0] += 5.0  # so that at first it does no better than guessing
    for _ in range(2 * EPOCHS):
        loss = loss_of(training.model.train()(training.inputs), training.labels)
        training.optimizer.zero_grad()
        loss.backward()
        training.optimizer.step()
        decisions.append(grower.step(train_loss=loss))
    return decisions, sum(slot.seed is not None and slot.seed.fossilized for slot in training.model.slots.values())


@pytest.mark.parametrize("name", SUMMED)
def test_losses_on_a_scale_of_their_own_hinder_no_growth(name: str) -> None:
    decisions, kept = _in_units_of(name, 0.03)
    assert decisions[-1].value > 0.7
    assert kept
    assert not any(decision.rollback for decision in decisions)


@pytest.mark.filterwarnings("ignore:the network has learned nothing")
@pytest.mark.parametrize("name", SUMMED)
def test_losses_on_a_scale_of_their_own_that_hardly_fall_are_no_explosion(name: str) -> None:
    assert not any(decision.rollback for decision in _in_units_of(name, 1e-5)[0])


def test_the_figures_of_a_decision_are_those_after_a_rollback() -> None:
    training = Training()
    for _ in range(8):
        training.grower.step(train_loss=training.epoch())
    training.scale_weights(1e30)
    decision = training.grower.step(train_loss=training.epoch())
    assert decision.rollback is not None
    assert decision.loss == pytest.approx(training.evaluate(training.model)[0])
    assert f"loss {decision.loss:.4g}, accuracy {decision.value:.4g}" in str(decision)


@pytest.mark.parametrize("spoil", ["weight", "gradient"])
def test_what_is_not_finite_is_never_measured(spoil: str) -> None:
    training = Training()
    grower = Grower(
        training.model, training.optimizer, controller="none", evaluate=lambda model: _sound(model, training)
    )
    grower.step(train_loss=training.epoch())
    loss = training.epoch()
    weight = next(training.model.host.parameters())
    assert weight.grad is not None
    if spoil == "weight":
        weight.data[0, 0] = math.nan
    elif spoil == "gradient":
        weight.grad[0, 0] = math.inf
    decision = grower.step(train_loss=loss)
    assert decision.rollback is not None
    assert decision.rollback.trouble is Trouble.NOT_FINITE


def _sound(model: nn.Module, training: Training) -> Any:
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters()), "a measure may raise on that"
    assert all(parameter.grad is None or bool(parameter.grad.isfinite().all()) for parameter in model.parameters())
    return training.evaluate(model)


@pytest.mark.parametrize("measure", ["accuracy", "loss"])
@pytest.mark.parametrize("wrong", ["loss", "train_loss"])
def test_a_finite_model_is_left_as_it_is_if_a_measure_of_it_is_not(wrong: str, measure: str) -> None:
    """Nothing is decided, and what was measured of modules before still holds."""
    training = Training(measure=measure, controller="all_at_start")
    for _ in range(6):
        training.grower.step(train_loss=training.epoch())
    held_out, known = training._held_out, training.grower.network.measurements.contribution.copy()
    assert np.isfinite(known).any()
    if wrong == "loss":
        training._held_out = torch.full_like(held_out[0], math.inf), held_out[1]
    loss = math.nan if wrong == "train_loss" else training.epoch()
    with pytest.warns(UserWarning, match=f"^{wrong} not finite, although .* finite: nothing is decided") as found:
        decision = training.grower.step(train_loss=loss)
    assert found[0].filename == __file__
    assert (decision.rollback, decision.op, len(training.model.seeds)) == (None, Op.WAIT, 2)
    np.testing.assert_array_equal(training.grower.network.measurements.contribution, known)
    training._held_out = held_out
    assert training.grower.step(train_loss=training.epoch()).contributions


def test_a_measure_that_is_not_finite_for_long_ends_training() -> None:
    training = Training(controller="none")
    training.epoch()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(2):
            training.grower.step(train_loss=math.nan)
            training.epoch()
    assert sum("not finite" in str(warning.message) for warning in found) == 1
    with pytest.raises(DivergedError, match="^train_loss not finite, .*, at 3 decisions in a row"):
        training.grower.step(train_loss=math.nan)


def test_without_a_governor_a_measure_that_is_not_finite_stops_nothing() -> None:
    training = Training(controller="all_at_start", growth=esper.GrowthConfig(governor=None))
    training.epoch()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*not finite")
        ops = [training.grower.step(train_loss=math.nan).op for _ in range(6)]
    assert Op.GERMINATE in ops


def test_a_step_that_a_scaler_skipped_is_no_trouble() -> None:
    training = Training()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    grower = Grower(training.model, training.optimizer, controller="none", evaluate=training.evaluate, scaler=scaler)
    loss = training.epoch()
    for parameter in training.model.parameters():
        parameter.grad = torch.full_like(parameter, math.inf)
    scaler.scale(torch.ones(()))  # which makes the scale known
    scaler.step(training.optimizer)
    scaler.update()
    assert grower.step(train_loss=loss).rollback is None


def test_it_is_measured_as_often_as_before_and_once_more_after_a_rollback() -> None:
    training, calls = Training(), 0

    def evaluate(model: nn.Module) -> Any:
        nonlocal calls
        calls += 1
        return training.evaluate(model)

    grower = Grower(training.model, training.optimizer, controller="none", evaluate=evaluate)
    grower.step(train_loss=training.epoch())
    assert calls == 2, "once more at first, to see whether the result is the same"
    grower.step(train_loss=training.epoch())
    assert calls == 3
    figures = training.evaluate(training.model)
    grower.step(train_loss=training.epoch(), val_loss=figures[0], accuracy=figures[1])
    assert calls == 3
    nn.init.constant_(training.model.host[0].weight, math.nan)
    grower.step(train_loss=training.epoch())
    assert calls == 4, "not of the model that was not finite"


def test_an_accuracy_that_counts_as_a_loss_is_named() -> None:
    training = Training(controller="none")
    grower = Grower(
        training.model,
        training.optimizer,
        controller="none",
        evaluate=lambda model: training.evaluate(model)[1],  # type: ignore[index]
    )
    for _ in range(7):
        grower.step(train_loss=training.epoch())
    loss = training.epoch()
    with pytest.warns(UserWarning, match=r"; if it is an accuracy, return \(loss, accuracy\) or use esper.Metric"):
        grower.step(train_loss=loss)
