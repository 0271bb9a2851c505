"""What users give by mistake, and whether a function refuses it with a sentence."""

import copy
import inspect
import math
from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from esper.errors import EsperError
from factories import make_growing

NONE, TRUTH, ZERO, NEGATIVE, NUMBER, FRACTION = "None", "truth", "zero", "a negative number", "a number", "a fraction"
NAN, TEXT, MAPPING, LIST, VECTOR, AVERAGE = "not a number", "text", "a mapping", "a list", "a vector", "an average"
CALLABLE = ("a class", "a module", "a function", AVERAGE, "a module around the model")

Fits = Collection[str]


def strangers() -> dict[str, Any]:
    """Fresh ones, by name."""
    model = make_growing()
    return {
        NONE: None,
        TRUTH: True,
        ZERO: 0,
        NEGATIVE: -1,
        NUMBER: 3,
        FRACTION: 20.5,
        NAN: math.nan,
        "infinity": math.inf,
        "a huge number": 10**5000,
        "a complex number": 1j,
        TEXT: "10",
        "no text": "",
        "bytes": b"10",
        LIST: [],
        "a list of none": [None],
        MAPPING: {},
        "a mapping of none": {"0": None},
        "a mapping of numbers": {0: 3},
        "an object": object(),
        "a class": int,
        "a module": nn.Linear(4, 4),
        "a scripted module": torch.jit.script(nn.Sequential(nn.Linear(4, 4))),
        "a function": lambda *_: None,
        VECTOR: torch.ones(2),
        AVERAGE: AveragedModel(copy.deepcopy(model)),
        "a module around the model": nn.DataParallel(model),
        "a scheduler": torch.optim.lr_scheduler.StepLR(torch.optim.SGD(model.parameters(), lr=0.1), 1),
    }


NAMES = list(strangers())


def named(function: Callable[..., Any]) -> list[str]:
    """The arguments that the function names."""
    various = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    return [one.name for one in parameters if one.name != "self" and one.kind not in various]


def require_refused(call: Callable[..., Any], right: dict[str, Any], argument: str, fits: Fits) -> None:
    """Every stranger that does not fit is refused in a sentence where all other arguments are right."""
    assert {*fits} <= {*NAMES}
    for name, stranger in strangers().items():
        if name in fits:
            continue
        try:
            call(**{**right, argument: stranger})
        except EsperError as refusal:
            sentence = str(refusal)
        else:
            pytest.fail(f"{argument} took {name}")
        assert "\n" not in sentence
