"""Wrappers of optimizers grow as the optimizer inside does, or are refused with a sentence."""

from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, distributed
from torch.nn import functional as F

import esper
from esper.errors import ConfigError, SlotError
from esper.grower.governor import ModelSnapshot
from esper.growth.links import unwrap_optimizer
from factories import HELD, make_data, make_growing, packed, validate

Groups = list[dict[str, Any]]
DECISIONS = 10


class Delegating(torch.optim.Optimizer):
    """Skips `Optimizer.__init__`, and calls what it wraps by a name of its own."""

    def __init__(self, inside: torch.optim.Optimizer) -> None:
        self.anything = inside

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["anything"], name)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.anything.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        return self.anything.step(closure)


class Shared(torch.optim.Optimizer):
    """Has a state of its own, and shares the groups: such as sharpness-aware minimisation."""

    def __init__(self, inside: torch.optim.Optimizer) -> None:
        super().__init__(inside.param_groups, {})
        self.inside = inside
        self.param_groups = inside.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.inside.step(closure)


class Several(torch.optim.Optimizer):
    """Steps several optimizers, whose groups are its own."""

    def __init__(self, inside: torch.optim.Optimizer) -> None:
        super().__init__(inside.param_groups, {})
        self.parts = [inside]

    def step(self, closure: Any = None) -> Any:
        return [part.step(closure) for part in self.parts]


def accelerated(inside: torch.optim.Optimizer) -> Any:
    accelerate = pytest.importorskip("accelerate")
    return accelerate.Accelerator(cpu=True).prepare(inside)


def fabric(inside: torch.optim.Optimizer) -> Any:
    lightning = pytest.importorskip("lightning.fabric")
    return lightning.Fabric(accelerator="cpu").setup_optimizers(inside)


def by_lightning(inside: torch.optim.Optimizer) -> Any:
    pytest.importorskip("lightning.pytorch")
    from lightning.pytorch.core.optimizer import LightningOptimizer  # noqa: PLC0415 (an extra)
    from lightning.pytorch.strategies import SingleDeviceStrategy  # noqa: PLC0415 (an extra)

    class Strategy(SingleDeviceStrategy):
        def optimizer_step(self, optimizer: Any, closure: Any, *_: Any, **__: Any) -> Any:
            return optimizer.step()

    wrapper = LightningOptimizer(inside)
    wrapper._strategy = Strategy()
    return wrapper


def local_sgd(inside: torch.optim.Optimizer) -> Any:
    from torch.distributed.optim import PostLocalSGDOptimizer  # noqa: PLC0415 (slow to import)

    class Averager:
        step = 0

        def average_parameters(self, *_: Any, **__: Any) -> None:
            pass

    return PostLocalSGDOptimizer(inside, cast(Any, Averager()))


WRAPPERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "delegating": Delegating,
    "shared": Shared,
    "several": Several,
    "accelerate": accelerated,
    "fabric": fabric,
    "lightning": by_lightning,
    "local_sgd": local_sgd,
    "nested": lambda inside: Delegating(accelerated(inside)),
}
TRANSPARENT = WRAPPERS.keys() - {"shared", "several"}
every_wrapper = pytest.mark.parametrize("name", WRAPPERS)


def loss_of(model: esper.GrowingModel) -> Tensor:
    inputs, labels = make_data()
    return F.cross_entropy(model(inputs), labels)


def train(wrap: Callable[[torch.optim.Optimizer], Any], **options: Any) -> tuple[esper.Grower, list[str]]:
    """By the wrapper, from its first step on; the decisions."""
    model = make_growing()
    optimizer = wrap(torch.optim.AdamW(model.parameter_groups(lr=1e-2)))
    settings = {"controller": "all_at_start", "horizon": DECISIONS, "evaluate": validate, **options}
    grower = esper.Grower(model, optimizer, loss=lambda: loss_of(model), **settings)
    decisions: list[str] = []
    for _ in range(DECISIONS):
        model.train()
        for _ in range(2):
            optimizer.zero_grad()
            loss = loss_of(model)
            grower.isolated_backward(loss)
            loss.backward()
            optimizer.step()
        decisions.append(str(grower.step(train_loss=loss)))
    return grower, decisions


@every_wrapper
@pytest.mark.parametrize("refit", [False, True])
@pytest.mark.few(2)
def test_growth_by_a_wrapper_is_that_by_the_optimizer_inside(name: str, refit: bool) -> None:
    options: dict[str, Any] = {"evaluate": esper.Refit(validate) if refit else validate, "seed": 3}
    if refit:
        if name in ("shared", "several"):
            pytest.skip("a fork of an optimizer without torch's constructor's arguments is that optimizer's matter")
        options["rules"] = HELD
    plain, expected = train(lambda optimizer: optimizer, **options)
    wrapped, decisions = train(WRAPPERS[name], **options)
    assert decisions == expected
    assert wrapped.model.seeds
    for mine, theirs in zip(wrapped.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    states = wrapped.state_dict(), plain.state_dict()
    mine, theirs = (state["memory"]["snapshot"] for state in states)
    assert theirs["moments"]
    if name not in TRANSPARENT:  # the groups are shared, but not the state, which is that of the wrapper
        assert (mine["optimizer"], mine["moments"]) == (name.capitalize(), {})
        mine |= {key: theirs[key] for key in ("optimizer", "moments")}
    assert torch.equal(*map(packed, states))


@every_wrapper
def test_seeds_planted_by_hand_learn_by_a_wrapper(name: str) -> None:
    model = make_growing()
    inside = torch.optim.AdamW(model.parameter_groups(lr=1e-2))
    optimizer = WRAPPERS[name](inside)
    model.link(optimizer)
    seed = model.slots["0"].germinate("mlp", alpha=1.0)
    before = [parameter.clone() for parameter in seed.parameters()]
    for _ in range(2):
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()
    assert not any(torch.equal(*pair) for pair in zip(seed.parameters(), before, strict=True))
    model.slots["0"].prune()
    assert not inside.param_groups[1]["params"]
    if name in TRANSPARENT:
        assert unwrap_optimizer(optimizer) is inside
        assert len(inside.state) == len(list(model.host.parameters()))


@pytest.mark.parametrize("name", sorted(TRANSPARENT))
def test_snapshots_take_the_optimizer_inside(name: str) -> None:
    model = make_growing()
    optimizer = WRAPPERS[name](torch.optim.AdamW(model.parameter_groups(lr=1e-2)))
    snapshot = ModelSnapshot(model, optimizer)
    snapshot.take()
    optimizer.zero_grad()
    loss_of(model).backward()
    optimizer.step()
    assert optimizer.state
    snapshot.restore()
    assert not optimizer.state


class Hollow(torch.optim.Optimizer):
    """Skips `Optimizer.__init__`, and copies the groups."""

    def __init__(self, inside: torch.optim.Optimizer) -> None:
        self.param_groups = [dict(group) for group in inside.param_groups]


@pytest.fixture
def process_group(tmp_path: Path) -> Generator[None]:
    distributed.init_process_group(
        "gloo", store=distributed.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    yield
    distributed.destroy_process_group()


def test_what_would_not_train_seeds_is_refused(process_group: None) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # noqa: PLC0415 (slow to import)

    model = make_growing()
    divided = ZeroRedundancyOptimizer(model.parameter_groups(lr=1e-2), torch.optim.AdamW, lr=1e-2)
    hollow = Hollow(torch.optim.AdamW(model.parameter_groups(lr=1e-2)))
    for optimizer, sentence in (
        (divided, "wraps a AdamW with its own parameter groups"),
        (hollow, "Hollow does not support step hooks"),
    ):
        with pytest.raises(SlotError, match=sentence):
            model.link(optimizer)
        with pytest.raises(SlotError, match=sentence):
            esper.Grower(model, optimizer, validate, horizon=DECISIONS)
    assert model.optimizer_link.optimizer is None


def test_what_is_no_optimizer_is_refused() -> None:
    model = make_growing()
    optimizer = torch.optim.AdamW(model.parameter_groups(lr=1e-2))
    for other in (torch.optim.lr_scheduler.LambdaLR(optimizer, float), optimizer.step, None):
        with pytest.raises(ConfigError, match=r"^optimizer is .*: give a torch.optim optimizer"):
            esper.Grower(model, cast(Any, other), validate, horizon=DECISIONS)
