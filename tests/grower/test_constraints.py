"""Growth on a frozen host: one set of data is to be learned, another must not be forgotten."""

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import esper
from esper.control.rules import Never
from esper.errors import ConfigError
from esper.grower.scores import PENALTY, ConstraintSet, Score
from esper.growth.model import GrowingModel
from esper.lifecycle.actions import Blend, Op
from esper.lifecycle.rules import Rules
from train.runs import create_untrained_run

CLASSES, WIDTH = 3, 8


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x).relu())


def data(sign: float) -> tuple[Tensor, Tensor]:
    """What tells the classes apart has another sign in the target than in the source."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 4, generator=generator)
    return sign * x, x[:, :CLASSES].argmax(1)


def trained() -> Net:
    torch.manual_seed(0)
    host, (x, y) = Net(), data(1)
    optimizer = torch.optim.Adam(host.parameters(), lr=0.02)
    for _ in range(100):
        optimizer.zero_grad()
        F.cross_entropy(host(x), y).backward()
        optimizer.step()
    return host


def measure(model: GrowingModel, sign: float) -> Score:
    x, y = data(sign)
    with torch.no_grad():
        answers = model(x)
    return Score(F.cross_entropy(answers, y), (answers.argmax(1) == y).float().mean())


def both(model: GrowingModel) -> dict[str, Score]:
    return {"target": measure(model, -1), "source": measure(model, 1)}


def adapting(controller: Any = "look", **options: Any) -> tuple[GrowingModel, torch.optim.Optimizer, esper.Grower]:
    x, _ = data(-1)
    model = esper.attach(trained(), {"inner": ["lora", "mlp"], "head": ["lora_4"]}, x, freeze_host=True)
    optimizer = torch.optim.Adam(model.parameter_groups(lr=0.02))
    parts: dict[str, Any] = {"evaluate": both, "objective": "target", "constraints": {"source": 0.01}, **options}
    evaluate = esper.Constrained(parts.pop("evaluate"), parts.pop("objective"), parts.pop("constraints"))
    return model, optimizer, esper.Grower(model, optimizer, evaluate, controller=controller, classes=CLASSES, **parts)


def go(model: GrowingModel, optimizer: torch.optim.Optimizer, steps: int = 20) -> float:
    x, y = data(-1)
    model.train()
    loss = torch.zeros(())
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    return float(loss)


@pytest.mark.landing
@pytest.mark.filterwarnings("ignore:the policy was trained on")
@pytest.mark.parametrize("controller", ["look", "heuristic", "all_at_start", "random", "a run"])
def test_what_would_forget_is_pruned_and_the_source_is_kept(controller: str, tmp_path: Path) -> None:
    name = create_untrained_run(tmp_path / "run") if controller == "a run" else controller
    model, optimizer, grower = adapting(name, horizon=16)
    before = both(model)["source"]
    pruned = 0
    for _ in range(16):
        decision = grower.step(train_loss=go(model, optimizer))
        pruned += bool(decision.broken) and decision.op is Op.PRUNE
        assert not decision.broken or decision.op is not Op.FOSSILIZE
    grower.finish()
    assert pruned
    assert float(both(model)["source"].loss) <= 1.01 * float(before.loss) + 1e-6


def test_without_a_constraint_the_source_is_forgotten() -> None:
    model, optimizer, grower = adapting("look", constraints=None, horizon=16)
    before = both(model)
    for _ in range(16):
        assert not grower.step(train_loss=go(model, optimizer)).broken
    grower.finish()
    after = both(model)
    assert float(after["target"].loss) < 0.5 * float(before["target"].loss)
    assert float(after["source"].loss) > 2 * float(before["source"].loss)


def test_the_worst_seed_goes_though_training_is_unusual(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise nothing is pruned then, since what is measured may soon be another."""
    model, optimizer, grower = adapting("all_at_start", constraints={"source": 0.0}, horizon=16)
    disallowed = {Op.PRUNE, Op.FOSSILIZE}
    monkeypatch.setattr(grower.backend.learning, "find_disallowed_operations", lambda *_, **__: {*disallowed})
    decisions = [grower.step(train_loss=go(model, optimizer)) for _ in range(8)]
    assert Op.PRUNE in [decision.op for decision in decisions if decision.broken]
    assert Op.PRUNE not in [decision.op for decision in decisions if not decision.broken]


def test_what_breaks_a_constraint_goes_at_once_though_its_turn_to_be_measured_is_later() -> None:
    growth = esper.GrowthConfig(counterfactual_every=5)
    model, optimizer, grower = adapting("all_at_start", horizon=30, growth=growth)
    decisions = [grower.step(train_loss=go(model, optimizer)) for _ in range(6)]
    broken = [decision.op for decision in decisions if decision.broken]
    assert broken[:1] == [Op.PRUNE]
    assert set(broken) == {Op.PRUNE}
    assert "source loss up" in str(next(decision for decision in decisions if decision.broken))


def test_only_what_breaks_a_constraint_is_measured_out_of_turn() -> None:
    calls: list[float] = []

    def counted(model: GrowingModel) -> dict[str, Score]:
        calls.append(0.0)
        return both(model)

    growth = esper.GrowthConfig(counterfactual_every=10)
    told = {"horizon": 30, "growth": growth, "evaluate": counted, "constraints": {"source": 1e9}}
    model, optimizer, grower = adapting("all_at_start", **told)
    while not all(slot.seed is not None and float(slot.seed.alpha) > 0 for slot in model.slots.values()):
        grower.step(train_loss=go(model, optimizer, 1))
    calls.clear()
    for _ in range(10):
        grower.step(train_loss=go(model, optimizer, 1))
    assert len(calls) < 20, "some decisions measured no seed"


def test_a_reference_is_the_model_before_growth_and_survives_resumption() -> None:
    model, optimizer, grower = adapting(Never())
    assert grower.backend.constraints.references == {"source": float(both(model)["source"].loss)}
    grower.step(train_loss=go(model, optimizer, 1))
    state = grower.state_dict()
    again, _other, resumed = adapting(Never())
    with torch.no_grad():
        again.host.head.bias += 1
    resumed.load_state_dict(state)
    assert resumed.backend.constraints.references == grower.backend.constraints.references


def test_known_figures_spare_a_call_if_they_hold_what_is_constrained() -> None:
    model, _optimizer, grower = adapting(Never())
    found = both(model)
    with pytest.raises(ConfigError, match="'source loss'"):
        grower.step(train_loss=1.0, val_loss=found["target"].loss, accuracy=found["target"].accuracy)
    decision = grower.step(
        train_loss=1.0,
        val_loss=found["target"].loss,
        accuracy=found["target"].accuracy,
        metrics={"source loss": 2 * found["source"].loss},
    )
    assert "source loss up 100.0%, at most 1.0%" in decision.broken


def test_losses_alone_will_do() -> None:
    def losses(model: GrowingModel) -> dict[str, Score]:
        return {name: Score(found.loss) for name, found in both(model).items()}

    model, optimizer, grower = adapting("look", evaluate=losses, constraints={"source": 1e9}, horizon=12)
    for _ in range(12):
        decision = grower.step(train_loss=go(model, optimizer))
    assert decision.metric == "loss"
    assert decision.score > 0.2


def test_finish_keeps_nothing_that_breaks_a_constraint_however_far_beyond_it_is() -> None:
    """Seeds of which one alone breaks it as much: taking any of them off relieves nothing."""

    ended = False

    def told(model: GrowingModel) -> dict[str, Score]:
        rise = 2.0 * (ended and any(float(seed.alpha) > 0 for seed in model.seeds.values()))
        return {"target": Score(1.0, 0.5), "source": Score(1.0 + rise)}

    model, optimizer, grower = adapting("all_at_start", evaluate=told, constraints={"source": 0.1}, horizon=40)
    for _ in range(3):
        grower.step(train_loss=go(model, optimizer, 1))
    assert len(model.seeds) == 2
    ended = True
    grower.finish()
    assert not model.seeds


def test_excess_has_no_limit_and_whatever_breaks_a_constraint_loses_a_whole_accuracy_at_least() -> None:
    constraints = ConstraintSet("target", {"source": 0.1})
    constraints.set_references({"loss": 1.0, "source loss": 2.0})
    losses = (2.2, 2.2002, 2.4, 8.0, 20.0, float("nan"))
    found = [{"loss": 1.0, "source loss": loss} for loss in losses]
    excess = [constraints.compute_excess(one) for one in found]
    assert excess == [0.0, *map(pytest.approx, (0.0001, 0.1, 2.9, 8.9)), float("inf")]
    assert [constraints.compute_penalty(one) >= PENALTY for one in found] == [False, *[True] * 5]
    assert constraints.compute_penalty(found[0]) == 0
    broken = [constraints.find_broken(one) for one in found]
    assert broken[:-1] == [{}, *({"source": pytest.approx(loss / 2 - 1)} for loss in losses[1:-1])]
    assert broken[-1], "not a number is the largest"


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no objective": ({"objective": None}, "objective is None: give the name of a set"),
    "the objective itself": ({"constraints": {"target": 0.1}}, "is the objective"),
    "not measured": ({"constraints": {"other": 0.1}}, "target, other"),
    "no scores": (
        {"evaluate": lambda model: {"target": (1.0, 0.5), "source": (1.0, 0.5)}},
        "give an esper.grower.scores.Score",
    ),
    "a pair as a loss": (
        {"evaluate": lambda model: {"target": Score((1.0, 0.5)), "source": Score(1.0)}},  # pyright: ignore[reportArgumentType]
        "the loss of 'target' is a tuple",
    ),
    "figures as a loss": (
        {"evaluate": lambda model: {"target": Score(1.0), "source": Score({"loss": 1.0})}},  # pyright: ignore[reportArgumentType]
        "the loss of 'source' is a mapping",
    ),
    "one figure": ({"evaluate": lambda model: 1.0}, "mapping from target, source"),
    "negative": ({"constraints": {"source": -0.1}}, "limits is"),
    "no number": ({"constraints": {"source": "1%"}}, "limits is"),
    "no mapping": ({"constraints": ["source"]}, "limits is"),
    "no loss to rise": (
        {"evaluate": lambda model: {"target": Score(1.0), "source": Score(0.0)}},
        "before growth",
    ),
    "nothing can be pruned": (
        {"rules": Rules(operations=(Op.WAIT, Op.GERMINATE, Op.FOSSILIZE))},
        "need pruning",
    ),
    "blends": ({"rules": Rules(blends=(Blend.ADD, Blend.GATE))}, "only adds"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_cannot_be_is_refused(wrong: str) -> None:
    options, sentence = WRONG[wrong]
    with pytest.raises(ConfigError, match=sentence):
        adapting(Never(), **options)


@pytest.mark.parametrize("limit", [np.float32(0.25), torch.tensor(0.25), Fraction(1, 4), np.int64(0)])
def test_limits_are_any_real_numbers(limit: Any) -> None:
    _model, _optimizer, grower = adapting(Never(), constraints={"source": limit})
    assert grower.backend.constraints.limits == {"source": float(limit)}


def test_a_host_that_learned_something_else_may_begin_worse_than_guessing() -> None:
    host, (x, _) = trained(), data(-1)
    with torch.no_grad():
        host.head.weight *= 4
    model = esper.attach(host, {"inner": ["mlp"], "head": ["lora"]}, x, freeze_host=True)
    optimizer = torch.optim.Adam(model.parameter_groups(lr=1e-3))

    def evaluate(model: GrowingModel) -> Score:
        return measure(model, -1)

    grower = esper.Grower(model, optimizer, controller="all_at_start", evaluate=evaluate, classes=CLASSES)
    for _ in range(10):
        go(model, optimizer, 1)
        assert grower.step(train_loss=float(evaluate(model).loss)).rollback is None
