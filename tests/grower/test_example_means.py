"""Means that keep their examples: what they are made of, and the errors of differences between them."""

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import esper
from esper.grower.validation import ExampleMean, compute_difference_error
from factories import Loop, make_data

COUNT = 400


@pytest.mark.parametrize(
    "values",
    [
        torch.tensor([1.0, 2.0, 6.0]),
        torch.tensor([1.0, 2.0, 6.0], dtype=torch.bfloat16, requires_grad=True),
        torch.tensor([1, 2, 6]),
        np.array([1.0, 2.0, 6.0], np.float32),
    ],
)
def test_one_value_per_example_is_a_mean(values: Any) -> None:
    mean = ExampleMean.read(values)
    assert mean == 3.0
    np.testing.assert_array_equal(mean.examples, [1.0, 2.0, 6.0])


def test_hits_are_a_share() -> None:
    assert ExampleMean.read(torch.tensor([True, False, True, True])) == 0.75


@pytest.mark.parametrize(
    "value", [0.5, "0.5", None, torch.tensor(0.5), torch.rand(1), torch.rand(2, 2), torch.zeros(3, dtype=torch.cfloat)]
)
def test_what_is_not_one_value_per_example_is_no_mean(value: Any) -> None:
    assert ExampleMean.read(value) is None


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda mean: pickle.loads(pickle.dumps(mean))])
def test_examples_survive_copies_and_pickles(clone: Any) -> None:
    mean = ExampleMean(np.array([1.0, 4.0]))
    np.testing.assert_array_equal(clone(mean).examples, mean.examples)
    assert clone(mean) == 2.5


def test_an_error_is_that_of_repeated_draws() -> None:
    """The standard deviation of contributions over fresh sets of examples is what one set alone estimates."""
    rng, differences, ratios = np.random.default_rng(0), list[tuple[float, float]](), list[tuple[float, float]]()
    for _ in range(600):
        without = rng.gamma(2.0, 1.0, COUNT)
        with_module = 0.8 * without + 0.1 * rng.standard_normal(COUNT)
        pair = ExampleMean(with_module), ExampleMean(without)
        share = 1 - pair[0] / pair[1]
        differences.append((pair[1] - pair[0], compute_difference_error(*pair)))
        ratios.append((share, compute_difference_error(*pair, share) / pair[1]))
    for drawn in (differences, ratios):
        values, errors = np.array(drawn).T
        assert errors.mean() == pytest.approx(values.std(ddof=1), rel=0.1)
    # The ratio's error is not the one of the difference, over the mean: numerator and denominator rise together.
    assert np.mean([error for _, error in ratios]) < 0.5 * np.mean([error for _, error in differences]) / 2


def test_pairs_have_smaller_errors_than_two_sets_of_examples() -> None:
    values = np.random.default_rng(0).gamma(2.0, 1.0, COUNT)
    apart = compute_difference_error(ExampleMean(values), ExampleMean(np.roll(values, 1)))
    assert compute_difference_error(ExampleMean(values), ExampleMean(values + 0.01)) < 1e-9 < apart


@pytest.mark.parametrize("other", [0.5, ExampleMean(np.ones(3))])
def test_an_error_is_not_known_without_the_same_examples(other: float) -> None:
    assert np.isnan(compute_difference_error(ExampleMean(np.zeros(2)), other))
    assert np.isnan(compute_difference_error(other, ExampleMean(np.zeros(2))))


TASKS = {
    "classification": (torch.randint(0, 2, (60,)), nn.functional.cross_entropy),
    "regression": (torch.randn(60, 2), nn.functional.mse_loss),
    "multi_label": (torch.randint(0, 2, (60, 2)).float(), nn.functional.binary_cross_entropy_with_logits),
}


@pytest.mark.parametrize("task", TASKS)
def test_validation_keeps_the_figures_of_single_examples(task: str) -> None:
    torch.manual_seed(0)
    model, inputs, (labels, compute_loss) = nn.Linear(3, 2), torch.randn(60, 3), TASKS[task]
    result: Any = esper.Validation(task, [(inputs[:50], labels[:50]), (inputs[50:], labels[50:])])(model)
    loss = result[0] if isinstance(result, tuple) else result
    with torch.no_grad():
        alone = [float(compute_loss(model(inputs[i : i + 1]), labels[i : i + 1])) for i in range(60)]
    np.testing.assert_allclose(loss.examples, alone, rtol=1e-5)


def test_tokens_that_do_not_count_are_left_out_of_the_mean() -> None:
    torch.manual_seed(0)
    model, inputs, labels = nn.Linear(3, 5), torch.randn(6, 4, 3), torch.randint(0, 5, (6, 4))
    labels[0, 1:] = labels[3, :2] = -100
    loss, _ = esper.Validation("language_modelling", [(inputs, labels)])(model)  # pyright: ignore[reportGeneralTypeIssues]
    expected = nn.functional.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())
    assert loss == pytest.approx(float(expected.detach()), rel=1e-6)
    assert len(loss.examples) == 6


@pytest.mark.parametrize("form", ["pair", "mapping", "Validation"])
def test_a_grower_measures_errors_where_examples_are_known(form: str) -> None:
    inputs, labels = make_data(200)
    validate = esper.Validation("classification", [(inputs, labels)])

    @torch.no_grad()
    def evaluate(model: nn.Module) -> Any:
        if form == "Validation":
            return validate(model)
        outputs = model.eval()(inputs)
        losses = nn.functional.cross_entropy(outputs, labels, reduction="none")
        hits = outputs.argmax(1) == labels
        return (losses, hits) if form == "pair" else {"loss": losses, "accuracy": hits}

    loop = Loop("all_at_start", evaluate=evaluate)
    for _ in range(6):
        loop.epoch()
    history = loop.grower.engine.history
    now: Any = validate(loop.model)
    for place, slot in enumerate(loop.model.slots.values()):
        with slot.seed.temporary_alpha(0.0):
            without: Any = validate(loop.model)
        assert history.loss_contribution[0, place] == pytest.approx(without[0] - now[0], abs=1e-6)
        for error, part in ((history.loss_error, 0), (history.accuracy_error, 1)):
            differences = without[part].examples - now[part].examples
            assert error[0, place] == pytest.approx(differences.std(ddof=1) / 200**0.5, abs=1e-6)
            assert error[0, place] > 0


def test_a_grower_knows_no_error_of_means() -> None:
    loop = Loop("all_at_start")
    for _ in range(6):
        loop.epoch()
    history = loop.grower.engine.history
    assert np.isfinite(history.loss_contribution).all()
    assert np.isnan(history.loss_error).all()
