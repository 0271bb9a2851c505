"""Whatever functions around growing models cannot use is refused in a sentence: every argument of each."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import esper
from esper.errors import SlotError
from esper.growth.export import export
from esper.growth.hooks import find_attached
from esper.growth.model import GrowingModel
from esper.growth.slot import Slot
from factories import SLOTS, make_growing, make_host
from strangers import (
    AVERAGE,
    CALLABLE,
    FRACTION,
    LIST,
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

INPUTS = torch.zeros(2, 4)

Case = tuple[Callable[..., Any], Callable[[Path], dict[str, Any]], dict[str, Fits]]


def saved(folder: Path) -> Path:
    esper.save(make_growing(), folder / "saved")
    return folder / "saved"


def planted() -> Slot:
    slot = make_growing().slots["0"]
    slot.germinate("mlp")
    return slot


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
            "loss": (*CALLABLE, "a scripted module"),
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
}
"""How each is called rightly, and the strangers that fit its arguments all the same."""


def test_every_argument_is_looked_at() -> None:
    free = {"forward", "summary", "preview", "release", "parameter_groups", "without_growth"}
    methods = {name: one for name, one in vars(GrowingModel).items() if inspect.isfunction(one) and name[0] != "_"}
    functions = {"attach": esper.attach, "save": esper.save, "load": esper.load, "export": export, **methods}
    functions |= {"germinate": Slot.germinate, "set_alpha": Slot.set_alpha}
    assert all(not named(functions.pop(name)) for name in free)
    functions.pop("train")  # torch looks at that
    assert {name: set(named(one)) for name, one in functions.items()} == {
        name: set(case[2]) for name, case in CASES.items()
    }


@pytest.mark.parametrize(("name", "argument"), [(name, one) for name, case in CASES.items() for one in case[2]])
def test_what_does_not_fit_is_refused(
    name: str, argument: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    call, right, fits = CASES[name]
    require_refused(call, right(tmp_path), argument, fits[argument])


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
    for slot in model.slots.values():
        slot.germinate("mlp", torch.Generator().manual_seed(1), alpha=1.0)
    with torch.no_grad():
        for parameter in model.slots.parameters():
            parameter.add_(0.1)

    @torch.no_grad()
    def measure(measured: nn.Module) -> float:
        return float(measured(INPUTS + 1).sum())

    with model.slots["0"].disabled():
        without = measure(model)
    assert measure(model) != without


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: esper.attach(make_host(), SLOTS), "attach: missing a required argument: 'example_input'"),
        (lambda: esper.attach(make_host(), SLOTS, INPUTS, slot=1), "attach: got an unexpected keyword argument 'slot'"),
    ],
    ids=["missing", "unknown"],
)
def test_a_missing_or_unknown_argument_is_refused_with_the_name_of_the_function(
    call: Callable[[], Any], words: str
) -> None:
    with pytest.raises(TypeError, match=words):
        call()
