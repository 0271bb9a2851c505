"""What a controller sees and what it may do, as tensors: every feature with its name, its range and its formula.

All features are scale-free, so that one policy serves any host: losses are relative to that of guessing, sizes to the
host's, times to the episode's. Values are clipped to the stated range.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.engine.budget import Charge, Costs
from esper.engine.history import LOOKBACK, History
from esper.engine.promises import PromiseRecord, largest
from esper.growth.blueprints.registry import Blueprint, Family
from esper.growth.site import Layout
from esper.lifecycle.actions import Op
from esper.lifecycle.legality import ActionMasks
from esper.lifecycle.stages import Stage
from esper.lifecycle.table import Evidence, SeedTable
from esper.numerics.arrays import Bools, Float32s, Floats, Ints


class Offers(Protocol):
    """What E networks are, and the K blueprints on offer at each of their S slots."""

    @property
    def kinds(self) -> Sequence[type[Blueprint]]:
        """The K blueprints."""
        ...

    @property
    def costs(self) -> Costs:
        """What seeds would cost."""
        ...

    @property
    def compatible(self) -> Bools:
        """Whether a blueprint serves a slot, ``[E, S, K]``."""
        ...

    @property
    def widths(self) -> Ints:
        """Channels at each slot, ``[E, S]``."""
        ...

    @property
    def learning_rates(self) -> Floats:
        """``[E]``."""
        ...


class GrowingNetworks(Protocol):
    """E networks that grow."""

    @property
    def specs(self) -> Offers:
        """Blueprints, costs and compatibility of each slot."""
        ...

    @property
    def table(self) -> SeedTable:
        """The state of every slot."""
        ...

    @property
    def evidence(self) -> Evidence:
        """What was measured of the seeds."""
        ...

    @property
    def host_parameters(self) -> Ints:
        """Parameters before any growth, ``[E]``."""
        ...

    @property
    def budget_left(self) -> Floats:
        """The share of the scarcest cap that is not spent yet, ``[E]``."""
        ...

    def slots_of_layout(self, layout: Layout) -> Bools:
        """Whether the slot's features have this layout, ``[E, S]``."""
        ...

    @property
    def charge(self) -> Charge:
        """What rent is paid on."""
        ...


class ObservationSpec(NamedTuple):
    """Feature counts of an observation: they fix a policy's input layers; slots and blueprints may vary in number."""

    globals: int
    slots: int
    blueprints: int


class Observation(NamedTuple):
    """What the controller sees. ``*`` is ``[E]`` when acting and ``[T, E]`` in an update; all float32."""

    globals: Tensor
    """``[*, G]`` features of the whole network."""
    slots: Tensor
    """``[*, S, F]`` one token per slot."""
    blueprints: Tensor
    """``[*, S, K, D]`` what each blueprint would be in each slot."""

    def to(self, device: torch.device) -> Observation:
        """The same on ``device``."""
        return Observation(*(_move(part, device) for part in self))


class MaskTensors(NamedTuple):
    """Conditional legality, as `ActionMasks` but in bool tensors. ``*`` as in `Observation`."""

    op: Tensor
    """``[*, 6]``."""
    slot: Tensor
    """``[*, 6, S]`` given the operation."""
    blueprint: Tensor
    """``[*, S, K]`` for GERMINATE, given the slot."""
    blend: Tensor
    """``[*, 3]`` for GERMINATE."""
    tempo: Tensor
    """``[*, 3]``."""
    alpha_target: Tensor
    """``[*, S, 3]`` for GERMINATE or SET_ALPHA, given the slot: no slot ever allows both."""
    alpha_speed: Tensor
    """``[*, 4]``."""
    alpha_curve: Tensor
    """``[*, 3]``."""

    def to(self, device: torch.device) -> MaskTensors:
        """The same on ``device``."""
        return MaskTensors(*(_move(part, device) for part in self))


def make_mask_tensors(masks: ActionMasks, device: torch.device) -> MaskTensors:
    """The lifecycle's masks of E environments as tensors on ``device``."""
    arrays: list[Bools] = [getattr(masks, name) for name in MaskTensors._fields]
    return MaskTensors(*(_move(torch.from_numpy(np.ascontiguousarray(array)), device) for array in arrays))


def _move(tensor: Tensor, device: torch.device) -> Tensor:
    # Nobody has to wait for what leaves the CPU; whoever reads what comes there has to.
    return tensor.to(device, non_blocking=tensor.device.type == "cpu")


TINY = 1e-8
LOG_LIMIT = 5.0
"""Range of logarithmic features: e^5 either way."""
LONGEST_PLATEAU = 10.0
MOST_TRIES = 4.0
OUTCOME_GAIN = 5.0
"""Contributions in units of ln(classes) are stretched so that a fifth of it is 1."""


@dataclass(frozen=True)
class FeatureInputs:
    """What features are computed from."""

    subject: GrowingNetworks
    history: History
    progress: Floats
    """Share of the episode that is over, ``[E]``."""
    horizon: int
    """Decisions in an episode."""
    rent: Floats
    """``[E]``."""
    train_size: Floats
    """``[E]``."""
    rollbacks: Floats
    """Share of the allowed rollbacks that the episode has had, ``[E]``."""
    promises: PromiseRecord | None = None
    """What blueprints promise; None where nobody measures it."""

    @property
    def promised(self) -> PromiseRecord:
        """What blueprints promise, where it is measured."""
        assert self.promises is not None, "features of promise are computed where it is measured"
        return self.promises

    @property
    def chance_loss(self) -> np.float64:
        """The size of a loss that tells nothing: that of guessing."""
        return np.float64(max(abs(self.history.chance_loss), TINY))

    @property
    def added(self) -> Floats:
        """What the seeds that count in the forward pass add, relative to the host, ``[E]``."""
        return self.subject.charge.added(self.subject.table, self.subject.table.blended)

    @property
    def resident(self) -> Ints:
        """Blueprint index of each slot's seed, 0 where there is none, ``[E, S]``."""
        return np.maximum(self.subject.table.blueprint, 0).astype(np.int64)

    def of_resident(self, per_blueprint: Floats) -> Floats:
        """Pick the resident seed's entry from ``[E, S, K]``; 0 in slots without a seed; ``[E, S]``."""
        picked = np.take_along_axis(per_blueprint, self.resident[..., None], axis=2)[..., 0]
        return np.where(self.subject.table.owning, picked, 0.0)


@dataclass(frozen=True)
class Feature:
    """One number per network, slot or blueprint."""

    name: str
    low: float
    high: float
    compute: Callable[[FeatureInputs], Floats | Bools]


def _log_loss(view: FeatureInputs, losses: Floats) -> Floats:
    return np.log(np.maximum(_nan_to_inf(losses), TINY) / view.chance_loss)


def _nan_to_inf(measured: Floats) -> Floats:
    """Infinity in place of what is not a number: a network that diverged must not look like one that guesses."""
    return np.where(np.isnan(measured), np.inf, measured)


def _is(value: int, of: Callable[[FeatureInputs], NDArray[np.integer]]) -> Callable[[FeatureInputs], Bools]:
    return lambda view: of(view) == value


def _log_of_ratio(numerator: Floats, denominator: Floats) -> Floats:
    with np.errstate(divide="ignore"):  # of what is infinitely larger, in a network that diverged
        return np.log(np.maximum(numerator, TINY) / np.maximum(denominator, TINY))


def _log_learning_rate(view: FeatureInputs) -> Floats:
    """Schedules may end at zero."""
    return np.log(np.maximum(view.subject.specs.learning_rates / 0.01, TINY))


GLOBAL_FEATURES: tuple[Feature, ...] = (
    Feature("progress", 0, 1, lambda v: v.progress),
    Feature("log_train_loss", -LOG_LIMIT, 2, lambda v: _log_loss(v, v.history.training.loss)),
    Feature("log_validation_loss", -LOG_LIMIT, 2, lambda v: _log_loss(v, v.history.losses[:, 0])),
    Feature("train_accuracy", 0, 1, lambda v: v.history.training.accuracy),
    Feature("validation_accuracy", 0, 1, lambda v: v.history.accuracies[:, 0]),
    Feature("accuracy_change", -1, 1, lambda v: v.history.accuracies[:, 0] - v.history.accuracies[:, 1]),
    Feature("accuracy_trend", -1, 1, lambda v: v.history.accuracies[:, 0] - v.history.accuracies[:, LOOKBACK]),
    Feature("loss_change", -2, 2, lambda v: _log_of_ratio(v.history.losses[:, 0], v.history.losses[:, 1])),
    Feature("loss_trend", -2, 2, lambda v: _log_of_ratio(v.history.losses[:, 0], v.history.losses[:, LOOKBACK])),
    Feature("accuracy_gap", -1, 1, lambda v: v.history.training.accuracy - v.history.accuracies[:, 0]),
    Feature(
        "loss_gap", -LOG_LIMIT, LOG_LIMIT, lambda v: _log_of_ratio(v.history.losses[:, 0], v.history.training.loss)
    ),
    Feature("plateau_age", 0, 1, lambda v: v.history.plateau_age / LONGEST_PLATEAU),
    Feature("rollbacks", 0, 1, lambda v: v.rollbacks),
    Feature("budget_left", 0, 1, lambda v: v.subject.budget_left),
    Feature("log_added_parameters", 0, 3, lambda v: np.log1p(v.added)),
    Feature("rent_paid", 0, 1, lambda v: v.rent * np.log1p(v.added)),
    Feature("rent", 0, 1, lambda v: v.rent),
    Feature("log_host_parameters", -LOG_LIMIT, LOG_LIMIT, lambda v: np.log(v.subject.host_parameters / 1000)),
    Feature("log_train_size", -LOG_LIMIT, LOG_LIMIT, lambda v: np.log(v.train_size / 1000)),
    Feature("log_learning_rate", -LOG_LIMIT, LOG_LIMIT, _log_learning_rate),
    Feature(
        "log_host_gradient",
        -LOG_LIMIT,
        LOG_LIMIT,
        lambda v: np.log(_nan_to_inf(v.history.training.host_gradient) + TINY),
    ),
    *(Feature(f"last_op_{op.name.lower()}", 0, 1, _is(op, lambda v: v.history.last_op)) for op in Op),
)
"""``[E]`` each."""


def _divide_by_horizon(view: FeatureInputs, ages: NDArray[np.integer]) -> Floats:
    return ages / float(view.horizon)


def _loss_contribution(view: FeatureInputs) -> Floats:
    return _scale_contribution(view, np.nan_to_num(view.history.loss_contribution))


def _contribution_velocity(view: FeatureInputs) -> Floats:
    change = view.history.loss_contribution - view.history.loss_contribution_before
    return _scale_contribution(view, np.nan_to_num(change))


def _scale_contribution(view: FeatureInputs, contribution: Floats) -> Floats:
    return np.arcsinh(contribution * (OUTCOME_GAIN / view.chance_loss))


def _gradient_ratio(view: FeatureInputs) -> Floats:
    ratio = _log_of_ratio(view.history.training.seed_gradient, view.history.training.host_gradient[:, None])
    return np.where(view.history.training.seed_gradient > 0, ratio, 0.0)


def _relative_cost(view: FeatureInputs) -> Floats:
    """``[E, S, K]``: log1p of what each blueprint adds, relative to the host."""
    return np.log1p(view.subject.charge.of_blueprints)


def _resident_cost(view: FeatureInputs) -> Floats:
    """``[E, S]``: log1p of what the seed adds, its blend included, relative to the host."""
    return np.log1p(view.subject.charge.of_residents(view.subject.table))


def _ramp_left(view: FeatureInputs) -> Floats:
    table = view.subject.table
    duration = np.maximum(table.alpha_duration, 1)
    return np.where(table.stage == Stage.BLENDING, 1 - table.alpha_elapsed / duration, 0.0)


def _depth(view: FeatureInputs) -> Floats:
    environments, slots = view.subject.table.stage.shape
    depths: Floats = np.linspace(0.0, 1.0, slots)
    return np.tile(depths, (environments, 1))


SLOT_FEATURES: tuple[Feature, ...] = (
    *(Feature(f"stage_{stage.name.lower()}", 0, 1, _is(stage, lambda v: v.subject.table.stage)) for stage in Stage),
    Feature("alpha", 0, 1, lambda v: v.subject.table.alpha.astype(np.float64)),
    Feature("alpha_target", 0, 1, lambda v: v.subject.table.alpha_target.astype(np.float64)),
    Feature("ramp_left", 0, 1, _ramp_left),
    Feature("pruning", 0, 1, lambda v: v.subject.table.pruning),
    Feature("stage_age", 0, 1, lambda v: _divide_by_horizon(v, v.subject.table.stage_age)),
    Feature("seed_age", 0, 1, lambda v: _divide_by_horizon(v, v.subject.table.seed_age)),
    Feature("measured", 0, 1, lambda v: np.isfinite(v.history.loss_contribution)),
    Feature("evidence_age", 0, 1, lambda v: _divide_by_horizon(v, v.subject.evidence.contribution_age)),
    Feature("accuracy_contribution", -1, 1, lambda v: np.nan_to_num(v.history.accuracy_contribution)),
    Feature("loss_contribution", -LOG_LIMIT, LOG_LIMIT, _loss_contribution),
    Feature("contribution_velocity", -LOG_LIMIT, LOG_LIMIT, _contribution_velocity),
    Feature("gradient_ratio", -LOG_LIMIT, LOG_LIMIT, _gradient_ratio),
    Feature("gradient_healthy", 0, 1, lambda v: v.subject.evidence.gradient_healthy),
    Feature("depth", 0, 1, _depth),
    Feature("log_width", -LOG_LIMIT, LOG_LIMIT, lambda v: np.log(v.subject.specs.widths / 10)),
    Feature("tries", 0, 1, lambda v: v.history.tries.sum(2) / MOST_TRIES),
    Feature("resident_cost", 0, 3, _resident_cost),
    *(
        Feature(f"layout_{layout}", 0, 1, lambda v, layout=layout: v.subject.slots_of_layout(layout))
        for layout in Layout
    ),
    *(
        Feature(f"resident_{family}", 0, 1, lambda v, family=family: v.of_resident(_of_family(v, family)))
        for family in Family
    ),
)
"""``[E, S]`` each."""


def _of_family(view: FeatureInputs, family: Family) -> Floats:
    members = np.array([kind.family is family for kind in view.subject.specs.kinds], float)
    return np.broadcast_to(members, view.subject.specs.compatible.shape)


BLUEPRINT_FEATURES: tuple[Feature, ...] = (
    Feature("cost", 0, 3, _relative_cost),
    Feature("rent_due", 0, 1, lambda v: v.rent[:, None, None] * _relative_cost(v)),
    Feature("compatible", 0, 1, lambda v: v.subject.specs.compatible),
    Feature("tries", 0, 1, lambda v: v.history.tries / MOST_TRIES),
    Feature("last_outcome", -LOG_LIMIT, LOG_LIMIT, lambda v: _scale_contribution(v, v.history.outcomes)),
    *(Feature(f"is_{family}", 0, 1, lambda v, family=family: _of_family(v, family)) for family in Family),
)
"""``[E, S, K]`` each."""


def compute_features(features: Sequence[Feature], view: FeatureInputs) -> Float32s:
    """All features, clipped to their ranges, along a new last axis."""
    columns = [np.clip(feature.compute(view), feature.low, feature.high) for feature in features]
    return np.stack(columns, axis=-1, dtype=np.float32, casting="unsafe")


class FeatureLists(NamedTuple):
    """The features of an observation's three parts."""

    globals: tuple[Feature, ...]
    slots: tuple[Feature, ...]
    blueprints: tuple[Feature, ...]

    @property
    def spec(self) -> ObservationSpec:
        """How many they are."""
        return ObservationSpec(*map(len, self))


_PLAIN = FeatureLists(GLOBAL_FEATURES, SLOT_FEATURES, BLUEPRINT_FEATURES)
_WITH_PROMISE = FeatureLists(
    (
        *GLOBAL_FEATURES,
        Feature("best_promise", 0, 1, lambda v: largest(v.promised.fitted, (1, 2))),
        Feature("best_promise_held_out", -1, 1, lambda v: largest(v.promised.held_out, (1, 2))),
        Feature("promise_change", -1, 1, lambda v: v.promised.change),
        Feature("promise_age", 0, 1, lambda v: v.promised.age / v.horizon),
    ),
    (
        *SLOT_FEATURES,
        Feature("best_promise", 0, 1, lambda v: largest(v.promised.fitted, 2)),
        Feature("best_promise_held_out", -1, 1, lambda v: largest(v.promised.held_out, 2)),
    ),
    (
        *BLUEPRINT_FEATURES,
        Feature("promise", 0, 1, lambda v: v.promised.fitted),
        Feature("promise_held_out", -1, 1, lambda v: v.promised.held_out),
    ),
)


def list_features(promise: bool) -> FeatureLists:
    """What controllers see where promise is measured, or is not: then the list ends sooner."""
    return _WITH_PROMISE if promise else _PLAIN


def observe(view: FeatureInputs) -> Observation:
    """What controllers see of E networks, on the CPU.

    Of a diverged network: the worst loss and gradient, 0 for comparisons of them and for promises.
    """
    parts = (compute_features(features, view) for features in list_features(view.promises is not None))
    return Observation(*(torch.from_numpy(part).nan_to_num(nan=0.0) for part in parts))


_PLACES = {
    lists.spec: [{feature.name: index for index, feature in enumerate(features)} for features in lists]
    for lists in (_PLAIN, _WITH_PROMISE)
}


class FeatureReader:
    """An observation of E networks as named arrays. A name that is not among its features is a KeyError."""

    def __init__(self, observation: Observation) -> None:
        self._globals, self._slots, self._blueprints = (part.cpu().numpy() for part in observation)
        spec = ObservationSpec(*(part.shape[-1] for part in observation))
        self.shows_promise = spec == _WITH_PROMISE.spec
        """Whether features of promise are among them."""
        self._places = _PLACES[spec]

    def network(self, name: str) -> Float32s:
        """A feature of the whole network, ``[E]``."""
        return self._globals[:, self._places[0][name]]

    def slot(self, name: str) -> Float32s:
        """A feature of each slot, ``[E, S]``."""
        return self._slots[:, :, self._places[1][name]]

    def blueprint(self, name: str) -> Float32s:
        """A feature of each blueprint in each slot, ``[E, S, K]``."""
        return self._blueprints[..., self._places[2][name]]
