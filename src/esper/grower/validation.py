"""`esper.Validation`: measures a model on validation data for the usual tasks, as means that keep their examples."""

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Self, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper.config.arguments import describe_value
from esper.errors import ConfigError, did_you_mean
from esper.numerics.arrays import Floats
from esper.numerics.modules import keep_generators, keep_modes

_ROUNDING = 1e-3
"""Largest difference from 1 of a sum of probabilities, in half precision."""
IGNORED = -100
"""The label that is left out of the count, as in torch."""
MULTI_LABEL = "multi_label"
_CALLS_WITH_ONE_CLASS = 16
"""Calls in a row with the same predicted class for all examples after which there is a warning."""
_CLASS_AXES = {"classification": 1, "language_modelling": -1}
"""The axis of the outputs that has the classes, by task."""
_EXPECTED = {
    "classification": "outputs [N, classes, ...] and integer labels [N, ...], one class each",
    "language_modelling": "outputs [..., vocabulary] and integer labels [...], the next token each",
    MULTI_LABEL: "outputs and labels of the same shape [N, labels], with labels 0 or 1",
    "regression": "outputs and targets of the same shape",
}
"""By task, the outputs and labels that it takes."""


class ExampleMean(float):
    """The mean of one value per example, a float that keeps these values, so that differences have an error."""

    examples: Floats
    """The values, ``[N]``, N at least 1."""

    def __new__(cls, examples: Floats) -> Self:
        mean = super().__new__(cls, np.mean(examples))
        mean.examples = examples
        return mean

    def __getnewargs__(self) -> tuple[Any, ...]:
        # Measurements are sent between processes.
        return (self.examples,)

    @classmethod
    def read(cls, value: object) -> Self | None:
        """The mean of a tensor or array ``[N]``, N > 1, of real numbers or truth values; None for anything else."""
        if isinstance(value, Tensor) and not value.is_complex() and value.layout is torch.strided:
            value = value.detach().to("cpu", torch.float64).numpy()
        if not isinstance(value, np.ndarray) or value.ndim != 1 or value.size < 2:
            return None
        values = cast("np.ndarray[Any, np.dtype[Any]]", value)
        return cls(values.astype(np.float64)) if values.dtype.kind in "biuf" else None


def compute_difference_error(value: float, other: float, share: float = 0.0, *, noise: float = 0.0) -> float:
    """The standard error of ``(other - value) - share * other`` over examples, at least the ``noise``, if any.

    Without the examples of both it is not known but for the noise, and NaN if there is none.

    Both are of the same N examples, so this is the error of the mean of N differences. With the ``share`` that is the
    ratio ``(other - value) / other`` itself, and divided by ``|other|``, it is the error of that ratio by the delta
    method (Cochran, *Sampling Techniques*, 1977, section 6.3).
    """
    if not isinstance(value, ExampleMean) or not isinstance(other, ExampleMean):
        return noise or math.nan
    if len(value.examples) != len(other.examples):
        return noise or math.nan
    residuals = (1 - share) * other.examples - value.examples
    return max(float(residuals.std(ddof=1)) / math.sqrt(len(residuals)), noise)


class Validation:
    """Measures loss and accuracy of a model on validation data, for ``Grower(evaluate=...)`` or your own use.

    ```python
    validate = esper.Validation("classification", DataLoader(validation_data, batch_size=256))
    grower = esper.Grower(model, optimizer, evaluate=validate)
    loss, accuracy = validate(model)
    ```

    The model runs in evaluation mode without gradients; its mode and torch's random state are restored. Loss and
    accuracy are means over all labels, in at least float32, that keep the values of single examples: a grower computes
    standard errors from them. Of a dictionary or object with ``logits``, these are the outputs.

    Args:
        task: ``classification``: outputs ``[N, classes, ...]``, int64 labels ``[N, ...]``; cross-entropy in nats and
            accuracy.

            ``language_modelling``: outputs ``[..., vocabulary]``, int64 labels ``[...]``, the next token at each
            position; cross-entropy in nats per token and accuracy.

            ``multi_label``: outputs ``[N, labels]``, targets 0 or 1 of the same shape; binary cross-entropy in nats
            and the fraction of correct labels.

            ``regression``: outputs and targets of the same shape; only the mean squared error.

            The first two ignore labels of -100.
        batches: Pairs of inputs and labels, the same in every iteration, such as a list or a `DataLoader` without
            shuffling. Inputs are a tensor, a tuple of positional arguments or a dictionary of keyword arguments.
            Tensors are moved to the model's device.

    Raises:
        ConfigError: the task does not exist; the batches are an iterator, empty, or not pairs; or labels and outputs do
            not match.
    """

    def __init__(self, task: str, batches: Iterable[Any]) -> None:
        if not isinstance(task, str) or task not in _EXPECTED:  # pyright: ignore[reportUnnecessaryIsInstance]
            hint = did_you_mean(str(task), _EXPECTED) or f"; choose from {', '.join(_EXPECTED)}"
            raise ConfigError(f"unknown task {task!r}{hint}")
        if isinstance(batches, Iterator) or not isinstance(cast("object", batches), Iterable):
            raise ConfigError(
                f"batches is {describe_value(batches)}, which cannot be iterated repeatedly: give a DataLoader or a "
                "list"
            )
        self.task = task
        self.batches = batches
        self._outputs_checked = False
        """Whether the outputs for the first batch were compared with probabilities."""
        self._calls_with_one_class = 0

    def count_classes(self, output_shape: Sequence[int]) -> int | None:
        """Number of classes in outputs of this shape, if any."""
        known = self.task in _CLASS_AXES and len(output_shape) > 1
        return output_shape[_CLASS_AXES[self.task]] if known else None

    def resolve_classes(self, classes: int | None, output_shape: Sequence[int] = ()) -> int | None:
        """The number of classes, if known: that of the task, or else the configured ``classes``.

        It may be lower than that of the outputs: a vocabulary may be padded. More classes than outputs are refused.
        """
        if self.task == MULTI_LABEL:
            if classes not in (None, 2):
                raise ConfigError(
                    f"classes is {classes}, but {self.task} has labels 0 and 1: omit it, or give classes=2"
                )
            return 2
        found = self.count_classes(output_shape)
        if classes is not None and found is not None and classes > found:
            raise ConfigError(
                f"classes is {classes}, but the model's outputs {tuple(output_shape)} for {self.task} have {found}: "
                "omit it, or give the model more outputs"
            )
        return classes

    def __call__(self, model: nn.Module) -> float | tuple[float, float]:
        """The mean loss; for tasks with an accuracy, the mean loss and the accuracy in [0, 1]."""
        if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"{describe_value(model)} is not a model: give a torch.nn.Module")
        device = next((tensor.device for tensor in chain(model.parameters(), model.buffers())), torch.device("cpu"))
        # A DataLoader draws random numbers even if it does not shuffle.
        with keep_modes(model), keep_generators(model), torch.no_grad():
            model.eval()
            self._predicted, self._labels = set[int](), set[int]()
            sums = [self._measure(model, batch, device) for batch in self.batches]
        # One class for all examples is right as often as that class occurs, and teaches nothing.
        is_constant = len(self._predicted) == 1 and len(self._labels) > 1
        self._calls_with_one_class = self._calls_with_one_class + 1 if is_constant else 0
        if self._calls_with_one_class == _CALLS_WITH_ONE_CLASS:
            warnings.warn(
                f"in {_CALLS_WITH_ONE_CLASS} calls in a row the model predicted class {min(self._predicted)} for every "
                "example, so the accuracy is the share of that class: check labels and learning rate, or weight "
                "the classes in the loss",
                stacklevel=2,
            )
        count = sum(float(total.sum()) for *_, total in sums)
        if not count:
            raise ConfigError(f"the batches for {self.task} contain no labels: give at least one example")

        def compute_mean(parts: list[Tensor]) -> float:
            # Examples with more labels count for more, so that the mean is the one over all labels.
            values = torch.cat(parts).cpu().numpy()
            return ExampleMean(values * (len(values) / count))

        loss = compute_mean([loss for loss, _, _ in sums])
        correct = [correct for _, correct, _ in sums if correct is not None]
        return (loss, compute_mean(correct)) if correct else loss

    def _measure(self, model: nn.Module, batch: Any, device: torch.device) -> tuple[Tensor, Tensor | None, Tensor]:
        """Sums over the labels of each example, float64 ``[N]``: losses, correct predictions, and labels that count."""
        if not isinstance(batch, tuple | list) or len(cast("tuple[Any, ...]", batch)) != 2:
            what = describe_value(cast("object", batch))
            raise ConfigError(f"a batch for {self.task} is {what}: give pairs of inputs and labels")
        inputs, labels = (_move(part, device) for part in cast("tuple[Any, Any]", batch))
        # Call the model as its inputs are given, and take the logits of what it returns.
        match inputs:
            case Mapping():
                outputs = model(**inputs)
            case tuple():
                outputs = model(*inputs)
            case _:
                outputs = model(inputs)
        if isinstance(outputs, Mapping):
            outputs = cast("Mapping[str, Any]", outputs).get("logits", outputs)
        else:
            outputs = getattr(outputs, "logits", outputs)
        if not isinstance(outputs, Tensor) or not isinstance(labels, Tensor):
            raise ConfigError(
                f"{self.task} got {describe_value(outputs)} from the model and {describe_value(labels)} as labels, but "
                "both must be tensors: write your own evaluate function for other outputs"
            )
        # Other tensors would give a loss, but a wrong one.
        for tensor in (outputs, labels):
            if tensor.is_complex() or tensor.layout is not torch.strided or not tensor.ndim:
                raise ConfigError(
                    f"{self.task} needs dense real tensors with an axis for examples, not {describe_value(tensor)}"
                )
        measured = _measure_labels(self.task, outputs, labels)
        if measured is None:
            raise ConfigError(
                f"outputs {tuple(outputs.shape)} and labels {tuple(labels.shape)} of {labels.dtype} do not match for "
                f"{self.task}, which takes {_EXPECTED[self.task]}"
            )
        if self.task in _CLASS_AXES:
            self._check_classes(outputs.movedim(_CLASS_AXES[self.task], -1), labels, measured[2])
        size = len(labels), labels.numel() // max(len(labels), 1)
        losses, hits, counted = (
            None if values is None else values.reshape(size).sum(1, dtype=torch.float64) for values in measured
        )
        assert losses is not None
        assert counted is not None
        return losses, hits, counted

    def _check_classes(self, scores: Tensor, labels: Tensor, counted: Tensor) -> None:
        """Note which classes ``scores [..., C]`` predict and the ``labels`` have; warn if scores are probabilities."""
        if len(self._predicted) < 2 or len(self._labels) < 2:
            for seen, classes in ((self._predicted, scores.argmax(-1)[counted]), (self._labels, labels[counted])):
                if classes.numel():
                    seen |= {int(classes.min()), int(classes.max())}
        if self._outputs_checked:
            return
        self._outputs_checked = True
        sums_to_one = torch.allclose(scores.sum(-1), torch.ones_like(scores[..., 0]), atol=_ROUNDING)
        if sums_to_one and bool((scores >= 0).all()):
            warnings.warn(
                f"the outputs are at least 0 and add up to 1, so they are probabilities, but {self.task} takes logits: "
                "leave out the softmax, or return its logarithm",
                stacklevel=4,
            )


def _measure_labels(task: str, outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor | None, Tensor] | None:
    """The loss of each label, whether the prediction is right, None for regression, and whether the label counts.

    None if outputs and labels do not fit each other.
    """
    # Half precision cannot hold a sum over a batch.
    outputs = outputs if outputs.dtype is torch.float64 else outputs.float()
    counted = torch.ones_like(labels, dtype=torch.bool)
    if task in _CLASS_AXES:
        scores = outputs.movedim(_CLASS_AXES[task], -1) if outputs.ndim > 1 else outputs
        if scores.shape[:-1] != labels.shape or labels.is_floating_point() or labels.dtype is torch.bool:
            return None
        labels, classes = labels.long(), scores.shape[-1]
        if classes < 2:
            raise ConfigError(
                "the model has one output per example, but classification needs one per class: use multi_label for a "
                "yes/no output"
            )
        counted = labels != IGNORED
        if (counted & ((labels < 0) | (labels >= classes))).any():
            raise ConfigError(f"labels exceed the {classes} classes of the model's outputs: give 0 to {classes - 1}")
        losses = F.cross_entropy(scores.reshape(-1, classes), labels.reshape(-1), reduction="none")
        return losses, (scores.argmax(-1) == labels) & counted, counted
    if outputs.shape != labels.shape:
        return None
    if task == MULTI_LABEL:
        if ((labels != 0) & (labels != 1)).any():
            return None
        losses = F.binary_cross_entropy_with_logits(outputs, labels.to(outputs.dtype), reduction="none")
        return losses, (outputs > 0) == (labels > 0.5), counted
    return F.mse_loss(outputs, labels.to(outputs.dtype), reduction="none"), None, counted


def _move(value: Any, device: torch.device) -> Any:
    """``value`` with the tensors in tuples, lists and mappings on the device, and lists as tuples."""
    match value:
        case Tensor():
            return value.to(device, non_blocking=True)
        case Mapping():
            return {name: _move(part, device) for name, part in cast("Mapping[Any, Any]", value).items()}
        case tuple() | list():
            return tuple(_move(part, device) for part in cast("list[Any]", value))
        case _:
            return value
