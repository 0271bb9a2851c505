"""Whatever a grower is given that it cannot use is refused in a sentence: every argument of every public method."""

import copy
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from esper.control.rules import Heuristic
from esper.errors import CheckpointError, ConfigError
from esper.grower import Constrained, Grower, GrowerConfig, Metric, Refit, RunRecorder
from factories import Loop, make_growing, validate
from strangers import (
    CALLABLE,
    FRACTION,
    LIST,
    MAPPING,
    NAN,
    NEGATIVE,
    NONE,
    NUMBER,
    TEXT,
    TRUTH,
    VECTOR,
    ZERO,
    Fits,
    named,
    require_refused,
)

NUMBERS = (ZERO, NEGATIVE, NUMBER, FRACTION, NAN, "infinity", "a huge number")
"""A loss may be any: training may have blown up."""
SCRIPTED = "a scripted module"
FITS: dict[str, dict[str, Fits]] = {
    "__init__": {
        "model": (),
        "optimizer": (),
        "controller": (),
        "evaluate": (*CALLABLE, SCRIPTED),
        "config": (MAPPING,),
        "callbacks": (LIST,),
        "classes": (NONE, NUMBER),
        "horizon": (NONE, NUMBER),
        "rules": (NONE,),
        "growth": (MAPPING,),
        "rent": (ZERO, NUMBER, FRACTION),
        "rent_on": (),
        "train_size": (NUMBER,),
        "seed": (ZERO, NUMBER),
        "loss": (NONE, *CALLABLE, SCRIPTED),
        "scaler": (NONE,),
        "run": (NONE, TEXT),
        "verbose": (TRUTH,),
        "training_flops": (NONE, NUMBER, FRACTION),
        "seconds": (NONE, NUMBER, FRACTION),
    },
    "step": {
        "train_loss": NUMBERS,
        "val_loss": NUMBERS,
        "accuracy": (NONE, ZERO),
        "metrics": (NONE, MAPPING),
        "train_accuracy": (NONE, ZERO),
        "look": (NONE,),
    },
    "isolated_backward": {"loss": (VECTOR,)},
    "load_state_dict": {"state": ()},
    "close": {},
    "finish": {},
    "state_dict": {},
}
"""By method and argument, the strangers that fit."""


def given() -> dict[str, Any]:
    model = make_growing()
    optimizer = torch.optim.AdamW(model.parameter_groups(lr=1e-2))
    return {"model": model, "optimizer": optimizer, "controller": "none", "evaluate": validate}


def test_every_argument_of_every_method_is_looked_at() -> None:
    methods = {
        name: set(named(method))
        for name, method in inspect.getmembers(Grower, inspect.isfunction)
        if name == "__init__" or not name.startswith("_")
    }
    methods["__init__"] |= GrowerConfig.model_fields.keys()
    assert methods == {name: set(arguments) for name, arguments in FITS.items()}


@pytest.mark.parametrize("argument", FITS["__init__"])
def test_a_grower_refuses_what_does_not_fit(argument: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    require_refused(Grower, given(), argument, FITS["__init__"][argument])


EVALUATORS: dict[str, tuple[Callable[..., Any], dict[str, Any], dict[str, Fits]]] = {
    "Metric": (
        Metric,
        {"evaluate": validate, "name": "f1", "higher_is_better": True},
        {"evaluate": (*CALLABLE, SCRIPTED), "name": (TEXT,), "higher_is_better": (NONE, TRUTH)},
    ),
    "Constrained": (
        Constrained,
        {"evaluate": validate, "objective": "target", "limits": {"source": 0.1}},
        {"evaluate": (*CALLABLE, SCRIPTED), "objective": (NONE, TEXT), "limits": (NONE, MAPPING)},
    ),
    "Refit": (Refit, {"evaluate": validate}, {"evaluate": (*CALLABLE, SCRIPTED)}),
    "RunRecorder": (RunRecorder, {"path": "run"}, {"path": (TEXT,)}),
}


@pytest.mark.parametrize("kind", EVALUATORS)
def test_so_do_evaluators_and_callbacks(kind: str) -> None:
    make, right, fits = EVALUATORS[kind]
    assert set(named(make)) == fits.keys()
    for argument in fits:
        require_refused(make, right, argument, fits[argument])


CALLS: dict[str, tuple[Callable[[Grower], Any], dict[str, Any]]] = {
    "step": (lambda grower: grower.step, {"train_loss": 1.0, "val_loss": 0.9, "accuracy": 0.5}),
    "isolated_backward": (lambda grower: grower.isolated_backward, {}),
    "load_state_dict": (lambda grower: grower.load_state_dict, {}),
}


@pytest.mark.parametrize(("method", "argument"), [(method, argument) for method in CALLS for argument in FITS[method]])
def test_so_do_its_methods(method: str, argument: str) -> None:
    call, right = CALLS[method]
    require_refused(call(Loop("none").grower), right, argument, FITS[method][argument])


SENTENCES: list[tuple[dict[str, Any], str]] = [
    ({"classes": "10"}, r"^classes is a str, '10': give the number of classes"),
    ({"classes": 1}, r"^classes is 1: give the number"),
    ({"horizon": 20.5}, r"^horizon is a float, 20\.5: give a whole number of at least 1, or omit it$"),
    ({"rent": None}, r"^rent is None: give a number of at least 0$"),
    ({"rent": -0.5}, r"^rent is -0\.5: give"),
    ({"growth": 3}, r"^growth is an int, 3: give .* instance of GrowthConfig$"),
    ({"growth": {"plateu": 3}}, r"^unknown key `growth\.plateu`, did you mean `growth\.plateau`\?$"),
    ({"run": 123}, r"^run is an int, 123: give the path of a new folder"),
    ({"controller": Heuristic}, r"^controller is the class Heuristic: give the name of a rule"),
    ({"model": torch.nn.Linear(4, 4)}, r"^model is a Linear: give the model that esper\.attach returned"),
    ({"seed": 10**5000}, r"^seed is too large to be shown: give a whole number"),
]


@pytest.mark.parametrize(("wrong", "sentence"), SENTENCES)
def test_the_sentence_says_what_to_give(wrong: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        Grower(**{**given(), **wrong})


def test_numbers_of_numpy_and_torch_are_numbers(tmp_path: Path) -> None:
    grower = Grower(
        **given(),
        classes=np.int64(3),
        horizon=torch.tensor(20),
        rent=np.float64(0.02),
        train_size=np.int32(96),
        run=tmp_path / "run",
    )
    grower.step(train_loss=1.0)
    state = grower.state_dict()
    assert (grower.config.horizon, type(grower.config.horizon)) == (20, int)
    assert type(state["classes"]) is int
    Grower(**given(), classes=3).load_state_dict({**state, "run": None})


def test_a_saved_table_with_numbers_out_of_their_range_is_refused() -> None:
    grower = Grower(**given())
    state = grower.state_dict()
    grower.load_state_dict(copy.deepcopy(state))
    table = state["memory"]["network"]["table"]
    for name, numbers in table.items():
        wrong = {torch.bool: [], torch.float32: [float("nan"), float("inf"), -0.5, 7.0]}.get(numbers.dtype, [-9])
        for value in wrong:
            damaged = copy.deepcopy(state)
            damaged["memory"]["network"]["table"][name].fill_(value)
            with pytest.raises(CheckpointError, match=f"damaged: {name} is .* numbers are from"):
                Grower(**given()).load_state_dict(damaged)
