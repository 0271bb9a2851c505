"""What users give that cannot be used is refused in a sentence: every argument of every public function."""

import copy
import inspect
import math
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import esper
from esper.control.rules import Heuristic
from esper.errors import CheckpointError, ConfigError, EsperError, SlotError
from esper.grower import Constrained, Grower, GrowerConfig, Metric, Refit, RunRecorder
from esper.growth.export import export
from esper.growth.hooks import find_attached
from esper.growth.model import GrowingModel
from esper.growth.slot import Slot
from factories import SLOTS, Loop, make_growing, make_host, plant, validate

INPUTS = torch.zeros(2, 4)
NONE, TRUTH, ZERO, NEGATIVE, NUMBER, FRACTION = "None", "truth", "zero", "a negative number", "a number", "a fraction"
NAN, TEXT, MAPPING, LIST, VECTOR, AVERAGE = "not a number", "text", "a mapping", "a list", "a vector", "an average"
CALLABLE = ("a class", "a module", "a scripted module", "a function", AVERAGE, "a module around the model")


def strangers() -> dict[str, Any]:
    """What users give by mistake, fresh, by name."""
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


def saved(folder: Path) -> Path:
    esper.save(make_growing(), folder / "saved")
    return folder / "saved"


def planted() -> Slot:
    slot = make_growing().slots["0"]
    slot.germinate("mlp")
    return slot


def given() -> dict[str, Any]:
    model = make_growing()
    optimizer = torch.optim.AdamW(model.parameter_groups(lr=1e-2))
    return {"model": model, "optimizer": optimizer, "controller": "none", "evaluate": validate}


def call_grower(method: str) -> Callable[..., Any]:
    return lambda **given: getattr(Loop("none").grower, method)(**given)  # noqa: PLW0108 (made when it is called)


Case = tuple[Callable[..., Any], Callable[[Path], dict[str, Any]], dict[str, Collection[str]]]
CASES: dict[str, Case] = {
    "attach": (
        esper.attach,
        lambda _: {"model": make_host(), "slots": SLOTS, "example_input": INPUTS},
        {"model": (), "slots": (), "example_input": (VECTOR,), "causal": (NONE, TRUTH), "freeze_host": (TRUTH, LIST)},
    ),
    "save": (esper.save, lambda folder: {"model": make_growing(), "folder": folder}, {"model": (), "folder": (TEXT,)}),
    "load": (
        esper.load,
        lambda folder: {"folder": saved(folder), "host": make_host(), "example_input": INPUTS},
        {"folder": (), "host": (), "example_input": (VECTOR,)},
    ),
    "export": (
        export,
        lambda folder: {"model": make_host(), "path": folder / "model.pt2", "example_input": INPUTS},
        {"model": ("a module", "a scripted module"), "path": (), "example_input": (VECTOR,)},
    ),
    "parameter_groups": (
        lambda **given: make_growing().parameter_groups(**given),
        lambda _: {},
        {"base": (NONE, LIST)},
    ),
    "link": (lambda **given: make_growing().link(**given), lambda _: {}, {"optimizer": ()}),
    "mirror": (
        lambda **given: make_growing().mirror(**given),
        lambda _: {},
        {"average": (AVERAGE, "a module around the model")},
    ),
    "look": (
        lambda **given: make_growing().look(**given),
        lambda _: {"loss": lambda model, batch: model(batch).sum(1), "batches": [INPUTS]},
        {
            "loss": CALLABLE,
            "batches": ("a list of none",),
            "examples": (NUMBER,),
            "draws": (NUMBER,),
            "layers": (TRUTH,),
            "seed": (NUMBER, ZERO),
        },
    ),
    "finalize": (lambda **given: make_growing().finalize(**given), lambda _: {}, {"unfinished": ()}),
    "germinate": (
        lambda **given: make_growing().slots["0"].germinate(**given),  # noqa: PLW0108 (made when it is called)
        lambda _: {"blueprint": "mlp"},
        {"blueprint": (), "generator": (NONE,), "blend": (), "alpha": (NUMBER, ZERO, FRACTION)},
    ),
    "set_alpha": (lambda **given: planted().set_alpha(**given), lambda _: {}, {"alpha": (NUMBER, ZERO, FRACTION)}),
    "Grower": (
        Grower,
        lambda _: given(),
        {
            "model": (),
            "optimizer": (),
            "controller": (),
            "evaluate": CALLABLE,
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
            "loss": (NONE, *CALLABLE),
            "scaler": (NONE,),
            "run": (NONE, TEXT),
            "verbose": (TRUTH,),
            "training_flops": (NONE, NUMBER, FRACTION),
            "seconds": (NONE, NUMBER, FRACTION),
        },
    ),
    "step": (
        call_grower("step"),
        lambda _: {"train_loss": 1.0, "val_loss": 0.9, "accuracy": 0.5},
        {
            # A loss may be any: training may have blown up.
            **dict.fromkeys(
                ("train_loss", "val_loss"), (ZERO, NEGATIVE, NUMBER, FRACTION, NAN, "infinity", "a huge number")
            ),
            "accuracy": (NONE, ZERO),
            "metrics": (NONE, MAPPING),
            "train_accuracy": (NONE, ZERO),
            "look": (NONE,),
        },
    ),
    "isolated_backward": (
        call_grower("isolated_backward"),
        lambda _: {},
        {"loss": (VECTOR,)},
    ),
    "load_state_dict": (call_grower("load_state_dict"), lambda _: {}, {"state": ()}),
    "Metric": (
        Metric,
        lambda _: {"evaluate": validate, "name": "f1", "higher_is_better": True},
        {"evaluate": CALLABLE, "name": (TEXT,), "higher_is_better": (NONE, TRUTH)},
    ),
    "Constrained": (
        Constrained,
        lambda _: {"evaluate": validate, "objective": "target", "limits": {"source": 0.1}},
        {"evaluate": CALLABLE, "objective": (NONE, TEXT), "limits": (NONE, MAPPING)},
    ),
    "Refit": (Refit, lambda _: {"evaluate": validate}, {"evaluate": CALLABLE}),
    "RunRecorder": (RunRecorder, lambda _: {"path": "run"}, {"path": (TEXT,)}),
}
"""How each is called rightly, and the strangers that fit its arguments all the same."""


def list_arguments(function: Callable[..., Any]) -> set[str]:
    """The arguments that the function names."""
    various = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    return {one.name for one in parameters if one.name != "self" and one.kind not in various}


def test_every_argument_is_looked_at() -> None:
    functions = {name: getattr(esper, name) for name in ("attach", "save", "load")}
    functions |= {"export": export, "germinate": Slot.germinate, "set_alpha": Slot.set_alpha}
    functions |= {one.__name__: one for one in (Metric, Constrained, Refit, RunRecorder)}
    for kind in (GrowingModel, Grower):
        methods = {name: one for name, one in vars(kind).items() if inspect.isfunction(one) and name[0] != "_"}
        functions |= {name: one for name, one in methods.items() if list_arguments(one)}
    del functions["train"]  # torch looks at that
    arguments = {name: list_arguments(one) for name, one in functions.items()}
    arguments["Grower"] = list_arguments(Grower) | GrowerConfig.model_fields.keys()
    assert arguments == {name: {*fits} for name, (_, _, fits) in CASES.items()}


@pytest.mark.parametrize(("name", "argument"), [(name, one) for name, case in CASES.items() for one in case[2]])
def test_what_does_not_fit_is_refused(
    name: str, argument: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    call, make_right, fits = CASES[name]
    right = make_right(tmp_path)
    assert {*fits[argument]} <= strangers().keys()
    for stranger, value in strangers().items():
        if stranger in fits[argument]:
            continue
        try:
            call(**{**right, argument: value})
        except EsperError as refusal:
            sentence = str(refusal)
        else:
            pytest.fail(f"{argument} took {stranger}")
        assert "\n" not in sentence


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
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
    ],
)
def test_the_sentence_says_what_to_give(wrong: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        Grower(**{**given(), **wrong})


def test_numbers_of_numpy_and_torch_are_numbers(tmp_path: Path) -> None:
    numbers = {"classes": np.int64(3), "horizon": torch.tensor(20), "rent": np.float64(0.02), "train_size": np.int32(9)}
    grower = Grower(**given(), **numbers, run=tmp_path / "run")
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


def test_names_may_come_as_they_like() -> None:
    for slots in (iter(["0", "2"]), ("0", "2"), {"0": ("mlp",), "2": "auto"}):
        model = esper.attach(make_host(), slots, example_input=[INPUTS])
        assert model.slots.keys() == ["0", "2"]
        model.release()


def test_a_scripted_part_takes_no_slot_and_hinders_none() -> None:
    scripted = torch.jit.script(nn.Linear(4, 4))
    net = nn.Sequential(nn.Linear(4, 4), scripted, nn.Linear(4, 4))
    with pytest.raises(SlotError, match="submodule '1' is scripted or traced"):
        esper.attach(net, ["1"], INPUTS)
    assert find_attached(net) is None
    model = esper.attach(net, {"0": ["mlp"], "2": ["mlp"]}, INPUTS).eval()
    for name in model.slots:
        plant(model, name, "mlp")
    outputs = model(INPUTS + 1)
    with model.slots["0"].disabled():
        assert not torch.equal(model(INPUTS + 1), outputs)


def test_a_missing_or_unknown_argument_is_refused_with_the_name_of_the_function() -> None:
    with pytest.raises(TypeError, match="attach: missing a required argument: 'example_input'"):
        esper.attach(make_host(), SLOTS)
    with pytest.raises(TypeError, match="attach: got an unexpected keyword argument 'slot'"):
        esper.attach(make_host(), SLOTS, INPUTS, slot=1)
