"""MLPs that grow in width and by modules: hosts, data, growth by rules, and static networks of the same size.

What `gromo_mlp.py` and `width_search.py` share; `width_tables.py` prints it.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from zoo.data import Splits

import esper
from esper.control.controller import Actions, Controller, get_promise_settings
from esper.control.rules import LookRule, LookSettings
from esper.engine.observation import FeatureReader, Observation
from esper.grower.controllers import choose_controller
from esper.grower.network import ModelSpec
from esper.lifecycle.legality import ActionMasks

TASKS, SEEDS = ("mnist1d", "digits"), (0, 1, 2, 3, 4)
HIDDEN, LAYERS = 8, 3
EPOCHS, BATCH, RATE = 30, 64, 3e-3
MODULES = {f"{2 * layer + 1}": "auto" for layer in range(LAYERS)}
"""Behind every activation of the host."""
UNITS = {(f"{2 * layer}", f"{2 * layer + 2}"): ["units_4", "units_8"] for layer in range(LAYERS)}
"""Between every two layers of the host; the slot has the name of the second."""
WIDTH_SLOTS = {reader: int(maker) // 2 + 1 for maker, reader in UNITS}
"""Hidden layers, from 1, by the slot in which they widen."""
LOOKS = LookSettings().promise
GROWTHS = [decision for decision in range(EPOCHS) if LOOKS.is_due(np.array([decision]))[0]][:-1]
"""The last one would come when the rule plants nothing any more."""

BARE, GROMO, STATIC, UNIFORM = "bare", "gromo", "final shape from scratch", "uniform width"
GROMO_SHAPE = "gromo's final shape from scratch"
WITHOUT_UPDATE, RANDOM = "gromo, no update of weights", "gromo, random neurons"
RANDOM_WITHOUT_UPDATE = "gromo, random neurons and no update"
PARTS = (WITHOUT_UPDATE, RANDOM, RANDOM_WITHOUT_UPDATE)
"""gromo without parts of what it computes at a growth; random weights have the norms of those that it computes."""
ONLY_MODULES, ONLY_WIDTH, MORE_WIDTH, BOTH = "look, modules", "look, width", "look, more width", "look, both"
IN_TURN, THEN_BETTER = "one of each kind in turn", "one of each kind, then the better one"
OFFERS: dict[str, dict[Any, Any]] = {
    ONLY_MODULES: MODULES,
    ONLY_WIDTH: UNITS,
    MORE_WIDTH: {pair: ["units_8", "units_24"] for pair in UNITS},
    BOTH: {**MODULES, **UNITS},
    IN_TURN: {**MODULES, **UNITS},
    THEN_BETTER: {**MODULES, **UNITS},
}
"""What grows by rules."""
LIKE = (BOTH, ONLY_WIDTH)
"""Growth with which networks of the same size are compared."""


@dataclass(frozen=True)
class Arm:
    """One way to train a host."""

    task: str
    how: str
    seed: int
    like: str = ""
    """Growth whose final size it has."""
    equal_flops: bool = False
    """Whether it trains for as many FLOPs as that growth, instead of as many epochs."""


@dataclass(frozen=True)
class Result:
    """What became of it."""

    arm: Arm
    accuracy: float
    """On test data."""
    parameters: int
    flops: float
    epochs: int
    seconds: float
    grown: tuple[tuple[str, str], ...] = ()
    """Slots and blueprints, or hidden layers and numbers of neurons."""
    looks: tuple[dict[str, Any], ...] = ()
    """What the rule knew when it looked."""


def list_arms(task: str, seed: int) -> list[Arm]:
    """In an order in which what others are compared with comes first."""
    compared = [Arm(task, how, seed, like) for like in LIKE for how in (GROMO, STATIC, UNIFORM)]
    longer = [Arm(task, how, seed, LIKE[0], True) for how in (BARE, GROMO, STATIC, UNIFORM)]
    shape = Arm(task, GROMO_SHAPE, seed, LIKE[0])
    return [Arm(task, BARE, seed), *(Arm(task, how, seed) for how in OFFERS), *compared, shape, *longer]


def list_parts(task: str, seed: int) -> list[Arm]:
    """gromo without parts of what it computes."""
    return [Arm(task, how, seed, LIKE[0]) for how in PARTS]


# Hosts and their training


def make_mlp(features: int, widths: Sequence[int], classes: int) -> nn.Sequential:
    """Hidden layers of these widths; slot ``2 i + 1`` is behind the activation of layer ``i``."""
    sizes = [features, *widths]
    parts = [part for pair in itertools.pairwise(sizes) for part in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*parts, nn.Linear(sizes[-1], classes))


def make_host(splits: Splits, seed: int) -> nn.Sequential:
    """The host of all that grows."""
    torch.manual_seed(seed)
    return make_mlp(splits.train.inputs[0].numel(), [HIDDEN] * LAYERS, splits.classes)


def train_epoch(net: nn.Module, optimizer: torch.optim.Optimizer, splits: Splits, seed: int, epoch: int) -> float:
    """One pass; the last minibatch's loss."""
    net.train()
    order = torch.randperm(len(splits.train), generator=torch.Generator().manual_seed(1000 * seed + epoch))
    loss = torch.zeros(())
    for index in order.split(BATCH):
        optimizer.zero_grad()
        loss = F.cross_entropy(net(flat(splits.train.inputs[index])), splits.train.labels[index])
        loss.backward()
        optimizer.step()
    return loss.item()


def make_optimizer(parameters: Iterable[Any]) -> torch.optim.AdamW:
    """Of parameters or groups."""
    return torch.optim.AdamW(parameters, lr=RATE, fused=True)


def flat(inputs: Tensor) -> Tensor:
    """``[B, features]``."""
    return inputs.flatten(1)


@torch.no_grad()
def accuracy(net: nn.Module, inputs: Tensor, labels: Tensor) -> float:
    """Share of right answers."""
    net.eval()
    return (net(flat(inputs)).argmax(1) == labels).float().mean().item()


def train_static(net: nn.Module, splits: Splits, seed: int, flops: float | None = None) -> tuple[nn.Module, float, int]:
    """For all epochs, or for at least so many FLOPs; the network, its FLOPs and epochs."""
    # What torch counts when slots are attached.
    model = esper.attach(net, {"0": ["norm"]}, flat(splits.train.inputs[:2]))
    assert model.host_flops is not None
    per_epoch, plain = 3 * model.host_flops * len(splits.train), model.finalize()
    optimizer, epochs = make_optimizer(plain.parameters()), EPOCHS if flops is None else math.ceil(flops / per_epoch)
    for epoch in range(epochs):
        train_epoch(plain, optimizer, splits, seed, epoch)
    return plain, per_epoch * epochs, epochs


# Growth by rules


class KindRule:
    """A rule that records what it sees when it looks, and that may be limited to one kind of growth at a decision.

    The kinds are width and modules. `IN_TURN` offers the kind that was tried less often. `THEN_BETTER` offers each kind
    until one of it was planted, and after both were judged the one whose module lowered the validation loss more.
    """

    def __init__(self, rule: Controller, spec: ModelSpec, slots: Sequence[str], how: str) -> None:
        self.name, self.promise = how, get_promise_settings(rule)
        self._rule, self._how, self._slots = rule, how, slots
        self._blueprints = [kind.name for kind in spec.kinds]
        self._parameters = spec.costs.parameters.blueprints[0]
        self._widens = np.array([slot in WIDTH_SLOTS for slot in slots])
        self.looks: list[dict[str, Any]] = []

    def start(self, seeds: Sequence[int]) -> tuple[dict[bool, float], Any]:
        """What the first module of each kind was last seen to take off the loss, and the rule's state."""
        return {}, self._rule.start(seeds)

    def judge(self, observation: Observation) -> Any:
        """As the rule does."""
        return self._rule.judge(observation)

    def rate_candidates(self, observation: Observation) -> Any:
        """As the rule does."""
        return self._rule.rate_candidates(observation)

    def act(self, observation: Observation, masks: ActionMasks, state: Any) -> tuple[Actions, Any]:
        """What the rule decides where the other kind is illegal."""
        gains, rule_state = state
        features = FeatureReader(observation)
        if features.network("promise_age")[0] == 0:
            self._record(features)
        tries = features.blueprint("tries")[0].sum(1)
        tried = {kind: float(tries[self._widens == kind].sum()) for kind in (False, True)}

        # What the modules that are on trial take off the loss; a module that is gone leaves its last figure.
        judged = (features.slot("stage_holding")[0] > 0) & (features.slot("measured")[0] > 0)
        for slot in np.flatnonzero(judged):
            gains = {**gains, bool(self._widens[slot]): float(features.slot("loss_gain")[0, slot])}
        allowed = [kind for kind in (False, True) if tried[kind] == min(tried.values())]
        if self._how == THEN_BETTER and min(tried.values()) > 0:
            unfinished = sum(features.slot(f"stage_{stage}")[0].sum() for stage in ("blending", "holding", "training"))
            allowed = [] if unfinished or len(gains) < 2 else [max(gains, key=lambda kind: gains[kind])]
        if self._how in (IN_TURN, THEN_BETTER):
            offered = masks.blueprint & np.isin(self._widens, allowed)[None, :, None]
            masks = ActionMasks(**{**vars(masks), "blueprint": offered})
        actions, rule_state = self._rule.act(observation, masks, rule_state)
        return actions, (gains, rule_state)

    def _record(self, features: FeatureReader) -> None:
        fitted, held_out = (features.blueprint(name)[0] for name in ("promise", "promise_held_out"))
        self.looks.append(
            {
                f"{slot} {name}": [
                    round(float(fitted[place, kind]), 4),
                    round(float(held_out[place, kind]), 4),
                    int(self._parameters[place, kind]),
                ]
                for place, slot in enumerate(self._slots)
                for kind, name in enumerate(self._blueprints)
                if fitted[place, kind] or held_out[place, kind]
            }
        )


def grow(arm: Arm, splits: Splits) -> Result:
    """By a rule."""
    began, net = time.perf_counter(), make_host(splits, arm.seed)
    model = esper.attach(net, OFFERS[arm.how], flat(splits.train.inputs[:2]))
    optimizer = make_optimizer(model.parameter_groups(lr=RATE))
    spec = ModelSpec(model, optimizer)
    rule = choose_controller(LookRule.name, spec, EPOCHS, None).controller
    controller = KindRule(rule, spec, list(model.slots), arm.how)
    validation = [(flat(splits.validation.inputs), splits.validation.labels)]
    grower = esper.Grower(
        model,
        optimizer,
        esper.Validation("classification", validation),
        controller=controller,
        horizon=EPOCHS,
        classes=splits.classes,
        seed=arm.seed,
    )
    for epoch in range(EPOCHS):
        grower.step(train_loss=train_epoch(model, optimizer, splits, arm.seed, epoch))
    grower.finish()
    flops, grown = grower.spending.flops, tuple((slot, seed.blueprint.name) for slot, seed in model.seeds.items())
    looks = tuple(controller.looks) if arm.how == BOTH else ()
    return conclude(arm, model.finalize(), splits, (flops, EPOCHS, began), grown, looks)


def make_final_shape(grown: Sequence[tuple[str, str]], splits: Splits, seed: int) -> nn.Module:
    """The network that growth led to, with fresh weights: layers as torch draws them, modules as they are at birth."""
    model = esper.attach(make_host(splits, seed), OFFERS[BOTH], flat(splits.train.inputs[:2]))
    for slot, blueprint in grown:
        model.slots[slot].germinate(blueprint, alpha=1.0)
        model.slots[slot].fossilize()
    plain = model.finalize()
    torch.manual_seed(seed)
    for layer in range(LAYERS + 1):
        plain.get_submodule(f"{2 * layer}").reset_parameters()
    return plain


def conclude(
    arm: Arm,
    net: nn.Module,
    splits: Splits,
    cost: tuple[float, int, float],
    grown: tuple[tuple[str, str], ...] = (),
    looks: tuple[dict[str, Any], ...] = (),
) -> Result:
    """Read the test data; ``cost`` are FLOPs, epochs and when it began."""
    (flops, epochs, began), size = cost, count(net)
    seconds = time.perf_counter() - began
    right = accuracy(net, splits.test.inputs, splits.test.labels)
    return Result(arm, right, size, flops, epochs, round(seconds, 2), grown, looks)


def count(net: nn.Module) -> int:
    """Parameters."""
    return sum(parameter.numel() for parameter in net.parameters())
