"""Whatever would let seeds grow in vain is refused in a sentence, by a model or its grower; averages follow both."""

import copy
import math
import pickle
import shutil
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from esper.errors import CheckpointError, ConfigError, ExportError, SlotError
from esper.grower.grower import Grower
from esper.growth.attach import attach
from esper.growth.export import export
from esper.growth.model import GrowingModel
from esper.growth.persist import save
from factories import Loop, validate

# Whatever would let seeds grow in vain is refused in a sentence: foreign optimizers, lost hooks, shards, traces.


INPUTS = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "momentum": lambda groups: torch.optim.SGD(groups, momentum=0.9),
    "adamw": torch.optim.AdamW,
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
}


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))


def growing() -> GrowingModel:
    return attach(network(), ["0", "1"], INPUTS)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor = INPUTS) -> None:
    optimizer.zero_grad()
    model(inputs).square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize("whose", ["another model", "a copy"])
def test_an_optimizer_of_another_model_is_refused(whose: str) -> None:
    model = growing()
    other = growing() if whose == "another model" else copy.deepcopy(model)
    with pytest.raises(SlotError, match="has no parameter of this model: it was made for another model"):
        model.link(torch.optim.AdamW(other.parameter_groups(lr=1e-3)))


def test_an_optimizer_that_lost_a_seed_is_refused_at_its_next_step() -> None:
    model = growing()
    optimizer = torch.optim.SGD(model.parameter_groups(lr=1e-3))
    model.link(optimizer)
    train(model, optimizer)
    model.slots["1"].germinate("mlp", alpha=1.0)
    optimizer.param_groups[2]["params"].clear()
    with pytest.raises(SlotError, match=r"lacks 'slots\.1\.occupant\.\w+.*' of a seed, which would never learn"):
        train(model, optimizer)


def test_slots_are_attached_once() -> None:
    model = growing()
    with pytest.raises(SlotError, match=r"already has growth slots, one behind '0': use what esper\.attach"):
        attach(model.host, ["1"], INPUTS)
    with pytest.raises(SlotError, match="already has growth slots"):
        attach(nn.Sequential(model, nn.Linear(3, 3)), ["1"], INPUTS)
    model.release()
    again = attach(model.host, ["1"], INPUTS)
    again.slots["1"].germinate("mlp")
    again.slots["1"].fossilize()
    assert list(attach(again.finalize(), ["0", "1"], INPUTS).slots) == ["0", "1"]


def replaced(model: GrowingModel) -> None:
    model.host.add_module("0", nn.Linear(5, 8))


def lost(model: GrowingModel) -> None:
    del model.host[0]


LOSSES: dict[str, Callable[[GrowingModel], None]] = {
    "replaced": replaced,
    "rebuilt": lambda model: model.host.add_module("0", nn.Sequential(nn.Linear(5, 8), model.host[1])),
    "deleted": lost,
    "released": GrowingModel.release,
}
KEEPING: dict[str, Callable[[GrowingModel, nn.Module, Path], Any]] = {
    "finalize": lambda model, average, folder: model.finalize(),
    "deepcopy": lambda model, average, folder: copy.deepcopy(model),
    "deepcopy around": lambda model, average, folder: copy.deepcopy(nn.Sequential(model)),
    "pickle": lambda model, average, folder: pickle.dumps(model),
    "save": lambda model, average, folder: save(model, folder / "saved"),
    "mirror": lambda model, average, folder: model.mirror(average),
    "state_dict": lambda model, average, folder: model.state_dict(),
    "state_dict around": lambda model, average, folder: nn.Sequential(model).state_dict(),
}


@pytest.mark.parametrize("keep", KEEPING.values(), ids=KEEPING)
@pytest.mark.parametrize("lose", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("grown", [True, False])
def test_what_would_keep_slots_that_are_called_no_more_is_refused(
    keep: Callable[[GrowingModel, nn.Module, Path], Any],
    lose: Callable[[GrowingModel], None],
    grown: bool,
    tmp_path: Path,
) -> None:
    model = growing()
    if grown:
        model.slots["0"].germinate("mlp", alpha=1.0)
    average = copy.deepcopy(model)
    keep(model, average, tmp_path)  # as it is, it can be kept
    shutil.rmtree(tmp_path / "saved", ignore_errors=True)
    lose(model)
    with pytest.raises(SlotError, match=r"slot '0' is no longer called: .* change the host first, then attach"):
        keep(model, average, tmp_path)
    assert not list(tmp_path.iterdir())


def by_onnx(model: nn.Module, folder: Path) -> None:
    pytest.importorskip("onnxscript")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(model, (INPUTS,), folder / "model.onnx", dynamo=True, verbose=False)


TRACES: dict[str, Callable[[nn.Module, Path], Any]] = {
    "export": lambda model, folder: torch.export.export(model, (INPUTS,)),
    "strict export": lambda model, folder: torch.export.export(model, (INPUTS,), strict=True),
    "jit": lambda model, folder: torch.jit.trace(model, INPUTS),
    "onnx": by_onnx,
}


@pytest.mark.landing
@pytest.mark.parametrize("trace", TRACES.values(), ids=TRACES)
@pytest.mark.parametrize("part", ["model", "host"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_growing_model_is_not_traced(trace: Callable[[nn.Module, Path], object], part: str, tmp_path: Path) -> None:
    model = growing()
    model.slots["0"].germinate("mlp", alpha=1.0)
    model(INPUTS)
    # The strict tracer makes an error of its own of it, or of the hooks that run uncompiled.
    with pytest.raises(Exception, match=r"cannot be exported or traced|torch\.compiler\.disable"):
        trace(model if part == "model" else model.host, tmp_path)
    trace(model.finalize(), tmp_path)


@pytest.mark.parametrize("part", ["model", "host"])
def test_a_growing_model_is_not_exported(part: str, tmp_path: Path) -> None:
    model = growing()
    model.slots["0"].germinate("mlp", alpha=1.0)
    with pytest.raises(ExportError, match="cannot be exported"):
        export(model if part == "model" else model.host, tmp_path / "net.pt2", INPUTS)
    assert not list(tmp_path.iterdir())


NEEDS_WHOLE: dict[str, Callable[[GrowingModel, Path], object]] = {
    "attach": lambda model, _: (model.release(), attach(model.host, ["0"], INPUTS)),
    "parameter_groups": lambda model, _: model.parameter_groups(lr=0.1),
    "link": lambda model, _: model.link(torch.optim.SGD(model.parameters())),
    "Grower": lambda model, _: Grower(model, torch.optim.SGD(model.parameters()), lambda _: 1.0),
    "germinate": lambda model, _: model.slots["0"].germinate("mlp"),
    "mirror": lambda model, _: model.mirror(nn.Identity()),
    "finalize": lambda model, _: model.finalize(),
    "save": lambda model, folder: save(model, folder / "saved"),
    "state_dict": lambda model, _: model.state_dict(),
}
"""What takes whole parameters."""


@pytest.mark.parametrize("sharding", ["all", "one layer, gathered by a pass"])
@pytest.mark.parametrize("what", NEEDS_WHOLE)
def test_sharded_parameters_are_refused(what: str, sharding: str, tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    try:
        model, mesh = growing(), init_device_mesh("cpu", (1,))
        if sharding == "all":
            fully_shard(model.host, mesh=mesh)
        else:
            fully_shard(model.host[0], mesh=mesh, reshard_after_forward=False)
            model(INPUTS)
        assert any(isinstance(parameter, DTensor) for parameter in model.parameters()) == (sharding == "all")
        with pytest.raises(SlotError, match=r"only a part of the model's parameters.*use DistributedDataParallel"):
            NEEDS_WHOLE[what](model, tmp_path)
    finally:
        torch.distributed.destroy_process_group()


def test_a_process_that_is_alone_in_its_group_plants_by_hand(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    try:
        assert growing().slots["0"].germinate("mlp")
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_a_model_with_seeds_is_converted_and_learns_on(
    make: Callable[..., torch.optim.Optimizer], dtype: torch.dtype
) -> None:
    model = growing()
    optimizer = make(model.parameter_groups(lr=1e-3))
    model.link(optimizer)
    model.slots["0"].germinate("mlp", alpha=1.0)
    train(model, optimizer)
    model.to(dtype)
    model.slots["1"].germinate("mlp", alpha=1.0)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for _ in range(3):
        train(model, optimizer, INPUTS.to(dtype))
    assert all(parameter.dtype is dtype for parameter in model.parameters())
    assert sum(not torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True)) > len(before) / 2


def test_a_host_converted_without_its_slots_is_one_sentence() -> None:
    model = growing()
    model.slots["0"].germinate("mlp", alpha=1.0)
    with torch.autocast("cpu", torch.bfloat16):
        model(INPUTS)
    model.host.double()
    with pytest.raises(SlotError, match=r"is torch\.float32, but its host became torch\.float64: convert the whole"):
        model(INPUTS.double())
    model.double()
    assert model(INPUTS.double()).dtype is torch.float64


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("nested", [True, False])
def test_a_state_dict_with_seeds_that_are_not_there_names_what_does_it(strict: bool, nested: bool) -> None:
    model, bare = growing(), growing()
    model.slots["1"].germinate("mlp")
    source, target = (nn.Sequential(model), nn.Sequential(bare)) if nested else (model, bare)
    with pytest.raises(CheckpointError, match=r"of a seed that this model does not have.*load them with esper\.load"):
        target.load_state_dict(source.state_dict(), strict=strict)
    target.load_state_dict(target.state_dict())
    copy.deepcopy(target).load_state_dict(target.state_dict())


def network_with_seed(blueprint: str | None, seed: int) -> GrowingModel:
    """A network with values of its own, perhaps with a seed, and an optimizer with moments."""
    torch.manual_seed(seed)
    model = attach(network(), {"0": ["mlp", "lowrank", "lora_2", "lora_4"], "1": ["mlp"]}, INPUTS)
    optimizer = torch.optim.AdamW(model.parameter_groups(lr=0.01))
    model.link(optimizer)
    if blueprint is not None:
        model.slots["0"].germinate(blueprint, alpha=1.0)
    train(model, optimizer)
    return model


UNFIT: dict[str, tuple[str, str | None]] = {
    "a slot that is free": ("mlp", None),
    "another blueprint": ("mlp", "lowrank"),
    "another size": ("lora_2", "lora_4"),
    "a seed that is hidden": ("mlp", "mlp"),
}
"""The blueprint in a state dict, and in the model that is to load it."""


@pytest.mark.parametrize("wrap", ["itself", "in a container", "in an average"])
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("case", UNFIT)
def test_a_state_dict_that_is_refused_changes_nothing(case: str, strict: bool, wrap: str) -> None:
    there, here = UNFIT[case]
    saved, model = network_with_seed(there, 1), network_with_seed(here, 2)

    def wrapped(model: GrowingModel) -> nn.Module:
        wrappers = {"in a container": nn.Sequential, "in an average": torch.optim.swa_utils.AveragedModel}
        return wrappers[wrap](model) if wrap in wrappers else model

    target, state = wrapped(model), wrapped(saved).state_dict()
    inner = next(part for part in target.modules() if isinstance(part, GrowingModel))
    before = copy.deepcopy(inner.state_dict())
    block = inner.without_growth() if case == "a seed that is hidden" else nullcontext()
    with block, pytest.raises((CheckpointError, SlotError), match=r"that this model does not have|leave that block"):
        target.load_state_dict(state, strict=strict)
    after = inner.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_host_values_can_be_loaded_while_growth_is_switched_off() -> None:
    model, other = network_with_seed("mlp", 1), network_with_seed(None, 2)
    with model.without_growth():
        model.load_state_dict(other.state_dict())
    assert torch.equal(model.host[0].weight, other.host[0].weight)
    assert set(model.seeds) == {"0"}


# A grower notices when the model is trained or changed behind its back; averages go through all that it does.


@pytest.mark.parametrize("when", [0, 3])
def test_a_replaced_optimizer_is_refused_and_a_grower_with_the_new_one_goes_on(when: int) -> None:
    loop = Loop("all_at_start")
    for _ in range(when):
        loop.epoch()
    loop.optimizer = torch.optim.AdamW(loop.model.parameter_groups(lr=1e-2))  # as loops do in a new phase
    loop.scheduler = torch.optim.lr_scheduler.ConstantLR(loop.optimizer)
    with pytest.raises(ConfigError, match="the grower's optimizer made no step, so another optimizer trains it"):
        loop.epoch()
    state = loop.grower.state_dict()
    loop.grower = Grower(loop.model, loop.optimizer, controller="all_at_start", evaluate=validate, horizon=20)
    loop.grower.load_state_dict(state)
    for _ in range(6):
        loop.epoch()
    owned = {parameter for group in loop.optimizer.param_groups for parameter in group["params"]}
    assert owned == set(loop.model.parameters())


IDLE: dict[str, Callable[[Loop], Any]] = {
    "nothing learned": lambda loop: None,
    "frozen": lambda loop: loop.model.requires_grad_(False),
    "loaded": lambda loop: loop.model.load_state_dict({k: v + 1 for k, v in loop.model.state_dict().items()}),
}


@pytest.mark.parametrize("idle", IDLE.values(), ids=IDLE)
def test_without_training_nothing_is_wrong(idle: Callable[[Loop], Any]) -> None:
    loop = Loop("none")
    idle(loop)
    loop.grower.step(train_loss=1.0)
    loop.grower.step(train_loss=1.0)


def test_a_decision_without_training_is_warned_of_once() -> None:
    loop = Loop("none")
    loop.epoch()
    with pytest.warns(UserWarning, match="the optimizer made no step since the last decision") as caught:
        loop.grower.step(train_loss=1.0)
    assert [warning.filename for warning in caught] == [__file__]
    with warnings.catch_warnings(action="error"):
        loop.grower.step(train_loss=1.0)


def test_decisions_beyond_the_horizon_are_warned_of_once() -> None:
    loop = Loop("none", horizon=3)
    with warnings.catch_warnings(action="error"):
        for _ in range(3):
            loop.epoch()
    with pytest.warns(UserWarning, match="this decision is beyond the horizon of 3"):
        loop.epoch()
    with warnings.catch_warnings(action="error"):
        loop.epoch()


def exchanged(loop: Loop) -> None:
    layers = loop.model.host
    layers[2] = nn.Linear(8, 8)


LOST: dict[str, Callable[[Loop], None]] = {"replaced": exchanged, "released": lambda loop: loop.model.release()}


@pytest.mark.parametrize("lose", LOST.values(), ids=LOST)
def test_slots_that_are_called_no_more_are_refused(lose: Callable[[Loop], None]) -> None:
    loop = Loop("all_at_start")
    loop.epoch()
    lose(loop)
    with pytest.raises(SlotError, match=r"slot '\d' is no longer called: the model was released, or its submodule"):
        loop.epoch()


@pytest.mark.parametrize("use_buffers", [False, True])
def test_an_average_goes_through_all_that_a_grower_does(use_buffers: bool) -> None:
    """Rollbacks included: it begins anew with what was restored, and with no seed that was pruned."""
    loop = Loop("periodic")
    average = AveragedModel(loop.model, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=use_buffers)
    loop.model.mirror(average)
    grown: set[int] = set()
    rolled_back: list[int] = []
    for number in range(14):
        if number == 9:
            with torch.no_grad():
                loop.model.host.get_parameter("0.weight").fill_(math.nan)
            average.update_parameters(loop.model)
        if loop.epoch().rollback is not None:
            rolled_back.append(number)
        for (name, mine), (other, theirs) in zip(
            loop.model.state_dict().items(), average.module.state_dict().items(), strict=True
        ):
            assert name == other
            assert mine.shape == theirs.shape
            assert theirs.isfinite().all()
            assert not name.endswith("alpha") or torch.equal(mine, theirs)
        grown.add(len(loop.model.seeds))
        average.update_parameters(loop.model)
    assert len(grown) > 1
    assert rolled_back == [9]


def test_one_class_is_refused_with_what_to_say_instead() -> None:
    model = attach(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)), ["0"], torch.zeros(2, 4))
    optimizer = torch.optim.SGD(model.parameter_groups(lr=1e-2))
    with pytest.raises(ConfigError, match=r"^classes is 1: .*\(classes=2 for one yes/no output\)"):
        Grower(model, optimizer, evaluate=validate, classes=1)
    Grower(model, optimizer, evaluate=validate, classes=2)
