"""Validation gives the figures that one would compute by hand, as means that keep the value of each example."""

import copy
import itertools
import math
import pickle
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import esper
from esper.errors import ConfigError
from esper.grower.validation import ExampleMean, compute_difference_error
from factories import Loop, make_data, make_growing, validate

CORRECT = torch.tensor([0, 1, 2, 1, 0])


def answers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def by_hand_classes(outputs: Tensor, labels: Tensor) -> tuple[float, float]:
    return F.cross_entropy(outputs, labels).item(), (outputs.argmax(1) == labels).float().mean().item()


def by_hand_tokens(outputs: Tensor, labels: Tensor) -> tuple[float, float]:
    return by_hand_classes(outputs.transpose(1, 2), labels)


def by_hand_labels(outputs: Tensor, labels: Tensor) -> tuple[float, float]:
    loss = F.binary_cross_entropy(outputs.sigmoid(), labels.float())
    return loss.item(), (outputs.sigmoid().round() == labels).float().mean().item()


CASES: dict[str, tuple[Tensor, Tensor, Callable[[Tensor, Tensor], Any]]] = {
    "classification": (answers(5, 3), CORRECT, by_hand_classes),
    "classification of pixels": (answers(5, 3, 2, 2), CORRECT[:, None, None].repeat(1, 2, 2), by_hand_classes),
    "language_modelling": (answers(5, 4, 3), CORRECT[:, None].repeat(1, 4), by_hand_tokens),
    "multi_label": (answers(5, 2), torch.tensor([[0, 1], [1, 1], [0, 0], [1, 0], [1, 1]]), by_hand_labels),
    "regression": (answers(5, 2), answers(5, 2) + 0.5, lambda outputs, targets: F.mse_loss(outputs, targets).item()),
}


@pytest.mark.parametrize("name", CASES)
def test_figures_are_means_over_everything_in_batches_of_any_size(name: str) -> None:
    outputs, labels, by_hand = CASES[name]
    batches = [(outputs[:2], labels[:2]), (outputs[2:], labels[2:])]
    found: Any = esper.Validation(name.split()[0], batches)(nn.Identity())
    assert found == pytest.approx(by_hand(outputs, labels))
    # Each figure keeps those of single examples.
    alone = [by_hand(outputs[one : one + 1], labels[one : one + 1]) for one in range(5)]
    examples = np.array([figure.examples for figure in (found if isinstance(found, tuple) else [found])]).T
    np.testing.assert_allclose(examples, np.reshape(alone, examples.shape), rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CASES)
def test_half_precision_is_summed_in_full(name: str, dtype: torch.dtype) -> None:
    outputs, labels, _ = CASES[name]
    many = [(part.repeat(4000, *[1] * (part.dim() - 1))) for part in (outputs.to(dtype), labels)]
    validate = esper.Validation(name.partition(" ")[0], [(many[0], many[1])])
    full = esper.Validation(name.partition(" ")[0], [(many[0].float(), many[1])])
    assert validate(nn.Identity()) == pytest.approx(full(nn.Identity()), rel=1e-5)


def test_labels_that_do_not_count_are_left_out() -> None:
    outputs, labels = answers(2, 4, 3), torch.tensor([[0, 1, -100, -100], [2, 1, 0, -100]])
    loss, accuracy = esper.Validation("language_modelling", [(outputs, labels)])(nn.Identity())
    counted = labels != -100
    assert (loss, accuracy) == pytest.approx(by_hand_classes(outputs[counted], labels[counted]))


@pytest.mark.parametrize("kind", [SimpleNamespace, dict])
def test_inputs_may_be_keywords_and_outputs_have_logits(kind: Callable[..., Any]) -> None:
    class Model(nn.Module):
        def forward(self, *, scores: Tensor, scale: Tensor) -> Any:
            return kind(logits=scores * scale)

    outputs = answers(5, 3)
    batches = [({"scores": outputs, "scale": torch.tensor(2.0)}, CORRECT)]
    assert esper.Validation("classification", batches)(Model()) == pytest.approx(by_hand_classes(outputs * 2, CORRECT))


def test_the_model_is_evaluated_and_modes_and_random_numbers_are_left_as_they_were() -> None:
    model = nn.Sequential(nn.Dropout(0.9), nn.Dropout(0.9))
    model[1].eval()
    outputs, before = answers(5, 3), torch.get_rng_state()
    found = esper.Validation("classification", DataLoader(TensorDataset(outputs, CORRECT), batch_size=2))(model)
    assert torch.equal(torch.get_rng_state(), before)
    assert found == pytest.approx(by_hand_classes(outputs, CORRECT))
    assert [module.training for module in model.modules()] == [True, True, False]


@pytest.mark.parametrize(
    ("task", "batches", "words"),
    [
        ("clasification", [], "did you mean 'classification'"),
        ("classification", iter([]), "cannot be iterated repeatedly"),
        ("classification", 3, "cannot be iterated repeatedly"),
        ("classification", [], "contain no labels"),
        ("classification", [answers(5, 3)], "give pairs"),
        ("classification", [(answers(5, 3), "labels")], "must be tensors"),
        ("classification", [(answers(5, 3), CORRECT[:4])], r"outputs \(5, 3\) and labels \(4,\)"),
        ("classification", [(answers(5), CORRECT)], "do not match"),
        ("classification", [(answers(5, 3), CORRECT.float())], r"torch\.float32 do not match"),
        ("regression", [(answers(5, 1), answers(5))], "do not match"),
        ("multi_label", [(answers(5, 1), answers(5))], "do not match"),
        # Figures that would be silently wrong:
        ("regression", [(torch.ones(3, dtype=torch.complex64), torch.ones(3))], "dense real tensors"),
        ("classification", [(torch.ones(3, 2), torch.ones(3, dtype=torch.complex64))], "dense real tensors"),
        ("multi_label", [(torch.ones(3, 2), torch.ones(3, 2).to_sparse())], "dense real tensors"),
        ("classification", [(torch.tensor(1.0), torch.tensor(1))], "an axis for examples"),
        ("classification", [(torch.ones(5, 1), CORRECT * 0)], "use multi_label for a yes/no output"),
    ],
)
def test_what_cannot_be_measured_is_a_sentence(task: str, batches: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        esper.Validation(task, batches)(nn.Identity())


@pytest.mark.parametrize(
    ("task", "shape", "classes"),
    [
        ("classification", (2, 4, 16), 4),
        ("classification", (2, 4, 8, 8), 4),
        ("language_modelling", (2, 16, 4), 4),
        ("regression", (2, 4), None),
    ],
)
def test_the_classes_are_counted_on_the_axis_of_the_task(
    task: str, shape: tuple[int, ...], classes: int | None
) -> None:
    validate = esper.Validation(task, [(torch.zeros(2), torch.zeros(2))])
    assert validate.count_classes(shape) == classes
    if classes is not None:
        assert validate.resolve_classes(3, shape) == 3  # a vocabulary may be padded
        with pytest.raises(ConfigError, match=r"classes is 9, but the model's outputs .* have 4: omit it"):
            validate.resolve_classes(9, shape)


@pytest.mark.parametrize("model", [None, lambda inputs: inputs])
def test_what_is_no_model_is_refused(model: Any) -> None:
    with pytest.raises(ConfigError, match=r"is not a model: give a torch\.nn\.Module"):
        esper.Validation("classification", [(answers(5, 3), CORRECT)])(model)


def test_a_grower_knows_that_yes_or_no_is_guessed_half_of_the_time() -> None:
    batches = [(torch.randn(6, 4), torch.randint(2, (6, 3)))]
    chances = dict[int | None, float]()
    for told in (None, 2):
        model = esper.attach(nn.Sequential(nn.Linear(4, 3)), {"0": ["lowrank"]}, batches[0][0])
        optimizer = torch.optim.SGD(model.parameter_groups(lr=0.1))
        grower = esper.Grower(
            model, optimizer, controller="none", evaluate=esper.Validation("multi_label", batches), classes=told
        )
        grower.step(train_loss=1.0)
        chances[told] = grower.backend.scores.chance_score
        assert grower.config.classes == 2
    assert chances == {None: 0.5, 2: 0.5}
    with pytest.raises(ConfigError, match="classes is 3, but multi_label has labels 0 and 1"):
        esper.Grower(model, optimizer, controller="none", evaluate=esper.Validation("multi_label", batches), classes=3)


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


def test_a_grower_knows_no_error_of_means_before_three_decisions() -> None:
    loop = Loop("all_at_start")
    known: list[bool] = []
    for _ in range(4):
        loop.epoch()
        known.append(bool(np.isfinite(loop.grower.engine.history.loss_error).any()))
    assert np.isfinite(loop.grower.engine.history.loss_contribution).all()
    assert not any(known[:3])


@pytest.mark.parametrize("how", ["left in training mode", "turns it on", "turns it on at the end"])
def test_a_measurement_changes_neither_modes_nor_buffers(how: str) -> None:
    """It runs in eval mode, whatever mode the loop left, and warns of a function that turns on training mode."""
    host = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.5), nn.Linear(6, 3))
    model = esper.attach(host, {"0": ["mlp"]}, torch.zeros(2, 4))
    inputs, labels = torch.randn(60, 4, generator=torch.Generator().manual_seed(0)), torch.arange(60) % 3
    measured: list[torch.Tensor] = []

    def evaluate(network: nn.Module) -> tuple[float, float]:
        if how == "turns it on":
            network.train()
        outputs = network(inputs)
        measured.append(outputs)
        if how == "turns it on at the end":
            network.train()
        return F.cross_entropy(outputs, labels).item(), (outputs.argmax(1) == labels).float().mean().item()

    grower = esper.Grower(
        model, torch.optim.SGD(model.parameter_groups(lr=0.0)), controller="all_at_start", evaluate=evaluate, horizon=9
    )
    model.train()
    host[3].eval()
    before = {name: buffer.clone() for name, buffer in host[1].named_buffers()}
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(3):
            grower.step(train_loss=1.0)
    assert all(module.training is (module is not host[3]) for module in model.modules())
    for name, buffer in host[1].named_buffers():
        assert torch.equal(buffer, before[name]), name
    assert not measured[0].requires_grad
    assert torch.equal(measured[0], measured[1]) is (how != "turns it on")
    messages = [str(one.message) for one in found if "training mode" in str(one.message)]
    assert len(messages) == (how == "turns it on")


def drawn_again(rows: bool) -> Callable[[nn.Module], Any]:
    """The loss of 64 examples that are drawn anew at every call."""
    generator = torch.Generator().manual_seed(0)

    def evaluate(model: nn.Module) -> Any:
        losses = torch.rand(64, generator=generator)
        return {"loss": losses} if rows else losses.mean().item()

    return evaluate


@pytest.mark.parametrize("rows", [True, False])
def test_measurements_that_differ_for_the_same_model_are_named_once_and_count_as_error(rows: bool) -> None:
    model = make_growing()
    evaluate = drawn_again(rows)
    optimizer = torch.optim.SGD(model.parameter_groups(lr=0.0))
    grower = esper.Grower(model, optimizer, controller="all_at_start", evaluate=evaluate, horizon=20)
    message = r"evaluate gave loss 0\.\d+ and then 0\.\d+ for the same model, .*: use the same examples"
    with pytest.warns(UserWarning, match=message) as found:
        grower.step(train_loss=1.0)
    assert {warning.filename for warning in found} == {__file__}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message="the optimizer made no step")
        for _ in range(6):
            grower.step(train_loss=1.0)
    errors = grower.engine.history.accuracy_error[0]
    assert (errors[np.isfinite(grower.engine.history.accuracy_contribution[0])] > 0.005).all()
    assert np.isfinite(errors).any()


def test_a_figure_that_decides_nothing_may_differ() -> None:
    seconds = itertools.count(1.0)
    others = {"precision": math.nan}
    loop = Loop("none", evaluate=lambda model: {"loss": validate(model)[0], "seconds": next(seconds), **others})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loop.epoch()
    assert loop.grower.backend.learning.checks_without_figures == 0


def test_a_first_measurement_that_is_not_finite_is_not_called_unrepeatable() -> None:
    loop = Loop("none", evaluate=lambda _: math.nan)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        loop.epoch()
    assert [str(warning.message).partition(":")[0] for warning in found] == [
        "loss not finite, although all parameters are finite"
    ]
    assert loop.grower.backend.scores.noise == 0


def test_a_loader_that_draws_its_own_order_is_named() -> None:
    inputs = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(inputs, torch.arange(60) % 3)
    loader = DataLoader(data, 20, shuffle=True, generator=torch.Generator().manual_seed(1))
    model = make_growing()
    grower = esper.Grower(
        model, torch.optim.SGD(model.parameter_groups(lr=0.1)), evaluate=esper.Validation("classification", loader)
    )
    with pytest.warns(UserWarning, match="or other examples: use the same examples in the same order"):
        grower.step(train_loss=1.0)


@pytest.mark.parametrize(("task", "shape"), [("classification", (64, 3)), ("language_modelling", (16, 4, 3))])
def test_probabilities_are_named_once_and_logits_never(task: str, shape: tuple[int, ...]) -> None:
    outputs = answers(*shape)
    labels = torch.arange(outputs[..., 0].numel()).reshape(shape[:-1]) % 3
    for given in (outputs, outputs.log_softmax(-1), outputs.abs()):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            esper.Validation(task, [(given, labels)])(nn.Identity())
    measure = esper.Validation(task, [(outputs.softmax(-1), labels)] * 2)
    with pytest.warns(UserWarning, match="they are probabilities, but .* takes logits: leave out the softmax") as found:
        measure(nn.Identity())
    assert len(found) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        measure(nn.Identity())


@pytest.mark.parametrize(("classes", "varies", "named"), [(2, False, True), (2, True, False), (1, False, False)])
def test_one_class_for_all_examples_is_named_once_it_lasts(classes: int, varies: bool, named: bool) -> None:
    labels = torch.arange(64) % classes
    outputs = torch.tensor([[2.0, 0.0]]).repeat(64, 1)
    if varies:
        outputs[:1] = -outputs[:1]
    measure = esper.Validation("classification", [(outputs[:32], labels[:32]), (outputs[32:], labels[32:])])
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(40):
            measure(nn.Identity())
    sentences = [str(one.message) for one in found]
    assert len(sentences) == named
    assert all("16 calls in a row the model predicted class 0 for every example" in sentence for sentence in sentences)


@pytest.mark.parametrize(("f1", "named"), [(lambda _: 0.0, True), (lambda loss: 1 / (1 + loss), False)])
def test_a_metric_that_never_changes_is_named_once(f1: Callable[[float], float], named: bool) -> None:
    def measure(model: esper.GrowingModel) -> dict[str, float]:
        loss, _ = validate(model)
        return {"loss": loss, "f1": f1(loss)}

    loop = Loop("none", evaluate=esper.Metric(measure, "f1", higher_is_better=True))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(12):
            loop.epoch()
    sentences = [str(one.message) for one in found if "f1 has been exactly" in str(one.message)]
    assert len(sentences) == named
    assert all("exactly 0 at all 8 decisions" in sentence for sentence in sentences)
