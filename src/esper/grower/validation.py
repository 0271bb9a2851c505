"""Measuring a model on validation data, for the usual tasks: what `Grower(evaluate=...)` may be given."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper.config.arguments import describe_value
from esper.errors import ConfigError, did_you_mean
from esper.growth.side_pass import keep_generators, keep_modes

IGNORED = -100
"""The label of what does not count, as torch has it."""


class Tally(NamedTuple):
    """Sums over what was counted in a batch; no ``right`` where a task has no right answers."""

    loss: Tensor
    right: Tensor | None
    counted: Tensor


def _tally_classes(outputs: Tensor, labels: Tensor, classes: int) -> Tally:
    """Class scores with ``classes`` as their dimension of classes, and a label for each of the others."""
    scores = outputs.movedim(classes, -1) if outputs.ndim > 1 else outputs
    if scores.shape[:-1] != labels.shape or labels.is_floating_point() or labels.dtype is torch.bool:
        raise ValueError
    labels, number = labels.long(), scores.shape[-1]
    if number < 2:
        raise ConfigError(
            "the model gives one score, and no class can be chosen by that: give one per class, or take multi_label "
            "for yes or no"
        )
    counted = labels != IGNORED
    if (counted & ((labels < 0) | (labels >= number))).any():
        raise ConfigError(f"labels are beyond the {number} classes of the model's outputs: give 0 to {number - 1}")
    loss = F.cross_entropy(_widen(scores.reshape(-1, number)), labels.reshape(-1), reduction="sum")
    return Tally(loss, ((scores.argmax(-1) == labels) & counted).sum(), counted.sum())


def _tally_labels(outputs: Tensor, labels: Tensor) -> Tally:
    """A score for each label of each example, and 1 or 0 for whether it holds."""
    if outputs.shape != labels.shape or ((labels != 0) & (labels != 1)).any():
        raise ValueError
    scores = _widen(outputs)
    loss = F.binary_cross_entropy_with_logits(scores, labels.to(scores.dtype), reduction="sum")
    return Tally(loss, ((outputs > 0) == (labels > 0.5)).sum(), torch.tensor(labels.numel()))


def _tally_values(outputs: Tensor, targets: Tensor) -> Tally:
    if outputs.shape != targets.shape:
        raise ValueError
    values = _widen(outputs)
    return Tally(F.mse_loss(values, targets.to(values.dtype), reduction="sum"), None, torch.tensor(targets.numel()))


def _widen(values: Tensor) -> Tensor:
    """In a precision that can hold a sum over a batch, which half precision cannot."""
    return values if values.dtype is torch.float64 else values.float()


MULTI_LABEL = "multi_label"
_TALLIES: dict[str, Callable[[Tensor, Tensor], Tally]] = {
    "classification": lambda outputs, labels: _tally_classes(outputs, labels, 1),
    "language_modelling": lambda outputs, labels: _tally_classes(outputs, labels, -1),
    MULTI_LABEL: _tally_labels,
    "regression": _tally_values,
}


class Validation:
    """Measures a model on validation data: for ``Grower(evaluate=...)``, and for you.

    ```python
    validate = esper.Validation("classification", DataLoader(validation_data, batch_size=256))
    grower = esper.Grower(model, optimizer, evaluate=validate)
    loss, accuracy = validate(model)
    ```

    The model is run in evaluation mode without gradients, and left in the modes it was in; torch's random numbers are
    left as they were, too, though a `DataLoader` draws some. Figures are means over all that was counted, whatever the
    sizes of batches, in float32 at least. Where the model returns a dictionary or an object with ``logits``, as those
    of Hugging Face do, these are its outputs.

    Args:
        task: What the model does.

            ``classification``: outputs ``[N, classes, ...]``, labels int64 ``[N, ...]``; gives the cross-entropy in
            nats and the accuracy.

            ``language_modelling``: outputs ``[..., vocabulary]``, labels int64 ``[...]``, the token that comes next at
            each position; gives the same, per token.

            ``multi_label``: outputs ``[N, labels]``, targets 0 or 1 of that shape; gives the binary cross-entropy in
            nats and the share of yes-or-no answers that are right, of which a grower knows that half are by guessing.

            ``regression``: outputs and targets of one shape; gives the mean squared error alone.

            The label -100 is left out of the count by the first two.
        batches: Pairs of what the model takes and its labels, the same whenever they are gone through, such as a
            `DataLoader` that does not shuffle or a list. What the model takes is a tensor, a tuple of positional
            arguments or a dictionary of keyword arguments. Tensors are moved to the device of the model.

    Raises:
        ConfigError: there is no such task; the batches can be gone through only once, are none, hold something else, or
            labels and outputs do not fit each other.
    """

    def __init__(self, task: str, batches: Iterable[Any]) -> None:
        if not isinstance(task, str) or task not in _TALLIES:  # pyright: ignore[reportUnnecessaryIsInstance]
            hint = did_you_mean(str(task), _TALLIES) or f"; choose from {', '.join(_TALLIES)}"
            raise ConfigError(f"no task is called {task!r}{hint}")
        if isinstance(batches, Iterator) or not isinstance(cast("object", batches), Iterable):
            raise ConfigError(
                f"batches is {describe_value(batches)}: give what can be gone through again, such as a DataLoader or a "
                "list"
            )
        self.task = task
        self.batches = batches
        self.classes = 2 if task == MULTI_LABEL else None
        """How many there are to choose from in each answer; None: as many as the model has outputs, if any."""

    def require_classes(self, told: int | None) -> int | None:
        """How many classes a grower that was ``told`` so many is to reckon with.

        Raises:
            ConfigError: the task has another number of them.
        """
        if None not in (told, self.classes) and told != self.classes:
            raise ConfigError(f"classes is {told}, but {self.task} asks for yes or no: leave it out, or say classes=2")
        return told or self.classes

    def __call__(self, model: nn.Module) -> float | tuple[float, float]:
        """The mean loss; with the accuracy, a fraction, where the task has one."""
        if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"{describe_value(model)} is no model: give a torch.nn.Module")
        device = next((tensor.device for tensor in chain(model.parameters(), model.buffers())), torch.device("cpu"))
        with keep_modes(model), keep_generators(model), torch.no_grad():
            model.eval()
            tallies = [self._measure(model, batch, device) for batch in self.batches]
        counted = sum(int(one.counted) for one in tallies)
        if not counted:
            raise ConfigError(f"the batches for {self.task} hold nothing to count: give at least one example")
        loss = sum(float(one.loss) for one in tallies) / counted
        right = [int(one.right) for one in tallies if one.right is not None]
        return (loss, sum(right) / counted) if right else loss

    def _measure(self, model: nn.Module, batch: Any, device: torch.device) -> Tally:
        if not isinstance(batch, tuple | list) or len(cast("tuple[Any, ...]", batch)) != 2:
            what = describe_value(cast("object", batch))
            raise ConfigError(f"a batch for {self.task} is {what}: give pairs of inputs and labels")
        inputs, labels = (_move(part, device) for part in cast("tuple[Any, Any]", batch))
        match inputs:
            case Mapping():
                output = model(**inputs)
            case tuple() | list():
                output = model(*inputs)
            case _:
                output = model(inputs)
        outputs = _logits_of(output)
        if not isinstance(outputs, Tensor) or not isinstance(labels, Tensor):
            raise ConfigError(
                f"{self.task} compares {describe_value(outputs)} of the model with {describe_value(labels)}: "
                "both have to be "
                "tensors; write a function of your own for other outputs"
            )
        odd = [one for one in (outputs, labels) if one.is_complex() or one.layout is not torch.strided or not one.ndim]
        if odd:
            raise ConfigError(
                f"{self.task} compares dense tensors of real numbers with an axis for the examples, and none like "
                f"{describe_value(odd[0])}"
            )
        try:
            return _TALLIES[self.task](outputs, labels)
        except ValueError:
            raise ConfigError(
                f"outputs {tuple(outputs.shape)} and labels {tuple(labels.shape)} of {labels.dtype} do not fit each "
                f"other in {self.task}: help(esper.Validation) says what does"
            ) from None


def _logits_of(output: Any) -> Any:
    """Those of a dictionary or an object that has any; otherwise what was found."""
    if isinstance(output, Mapping):
        return cast("Mapping[str, Any]", output).get("logits", output)
    return getattr(output, "logits", output)


def _move(value: Any, device: torch.device) -> Any:
    """Tensors in tuples, lists and dictionaries on that device."""
    match value:
        case Tensor():
            return value.to(device, non_blocking=True)
        case Mapping():
            return {name: _move(one, device) for name, one in cast("Mapping[Any, Any]", value).items()}
        case tuple() | list():
            return tuple(_move(one, device) for one in cast("list[Any]", value))
        case _:
            return value
