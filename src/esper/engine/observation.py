"""Observations and legality as tensors: every feature with its name, its range and its formula.

All features are scale-free, so that one policy serves any host: losses are relative to the chance loss, sizes to the
host's, times to the episode's. Values are clipped to the stated range. The order of the features fixes the input layers
of trained policies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from esper.engine.budget import Charge, Costs
from esper.engine.history import LOOKBACK, History
from esper.growth.blueprints.registry import Blueprint, Family
from esper.growth.promise import PromiseRecord, find_largest
from esper.growth.site import Layout
from esper.lifecycle.actions import Op
from esper.lifecycle.rules import ActionMasks
from esper.lifecycle.table import SeedMeasurements, SeedTable, Stage
from esper.lifecycle.transitions import Step
from esper.numerics.arrays import Bools, Float32s, Floats, Ints
from esper.numerics.devices import move_together


class GrowthSpec(Protocol):
    """Blueprints, costs and compatibility per slot, of E networks with S slots and K blueprints."""

    @property
    def kinds(self) -> Sequence[type[Blueprint]]:
        """The K blueprints."""
        ...

    @property
    def costs(self) -> Costs:
        """Costs of a seed of each blueprint in each slot."""
        ...

    @property
    def compatible(self) -> Bools:
        """Whether a blueprint fits a slot, ``[E, S, K]``."""
        ...

    @property
    def widths(self) -> Ints:
        """Channels at each slot, ``[E, S]``."""
        ...

    @property
    def learning_rates(self) -> Floats:
        """Learning rates of the hosts, ``[E]``."""
        ...


class GrowingNetworks(Protocol):
    """E networks that grow: a population, or a single model."""

    @property
    def specs(self) -> GrowthSpec:
        """Blueprints, costs and compatibility per slot."""
        ...

    @property
    def table(self) -> SeedTable:
        """The state of every slot."""
        ...

    @property
    def measurements(self) -> SeedMeasurements:
        """Measurements of the seeds that gates go by; the engine sets them."""
        ...

    @measurements.setter
    def measurements(self, measured: SeedMeasurements) -> None: ...

    @property
    def host_parameters(self) -> Ints:
        """Parameters before any growth, ``[E]``."""
        ...

    @property
    def budget_left(self) -> Floats:
        """Unspent share of the scarcest cap, ``[E]``."""
        ...

    @property
    def charge(self) -> Charge:
        """The sizes that rent is paid on."""
        ...

    def slots_of_layout(self, layout: Layout) -> Bools:
        """Whether the slot's features have this layout, ``[E, S]``."""
        ...

    def legal_actions(self) -> ActionMasks:
        """The actions that rules, measurements and budget allow now."""
        ...

    def decide(self, actions: Ints) -> Step:
        """Take one action per network, int64 ``[E, 8]``, and let all other slots live on; all of it or nothing."""
        ...


# What a policy observes, and what is legal, as tensors


class ObservationSpec(NamedTuple):
    """Numbers of features: they fix a policy's input layers; slots and blueprints may vary in number."""

    globals: int
    slots: int
    blueprints: int


class Observation(NamedTuple):
    """Features of networks, slots and blueprints, float32. ``*`` is ``[E]`` when acting, ``[T, E]`` in an update."""

    globals: Tensor
    """``[*, G]`` features of the network."""
    slots: Tensor
    """``[*, S, F]`` features of each slot."""
    blueprints: Tensor
    """``[*, S, K, D]`` features of each blueprint in each slot."""

    def to(self, device: torch.device) -> Observation:
        """The observation on ``device``."""
        return Observation(*move_together(self, device))


class MaskTensors(NamedTuple):
    """`ActionMasks` as bool tensors: legality given the earlier heads. ``*`` as in `Observation`."""

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
        """The masks on ``device``."""
        return MaskTensors(*move_together(self, device))


def make_mask_tensors(masks: ActionMasks, device: torch.device) -> MaskTensors:
    """The lifecycle's masks of E environments as tensors on ``device``."""
    arrays: list[Bools] = [getattr(masks, name) for name in MaskTensors._fields]
    return MaskTensors(*(torch.from_numpy(np.ascontiguousarray(array)) for array in arrays)).to(device)


# Features: what they are computed from, and how


TINY = 1e-8
"""Least argument of a logarithm."""
LOG_LIMIT = 5.0
"""Range of logarithmic features: e^5 either way."""
LONGEST_PLATEAU = 10.0
"""Plateau age, in decisions, at which the feature is 1."""
MOST_TRIES = 4.0
"""Number of tries at which the feature is 1."""
OUTCOME_GAIN = 5.0
"""Contributions are multiplied by it: a fifth of the chance loss reads about 1."""


@dataclass(frozen=True)
class FeatureInputs:
    """State of E networks that features are computed from, and formulas that several of them share."""

    networks: GrowingNetworks
    history: History
    progress: Floats
    """Elapsed share of the episode, ``[E]``."""
    horizon: int
    """Decisions in an episode."""
    rent: Floats
    """Price of growth, ``[E]``."""
    train_size: Floats
    """Training examples, ``[E]``."""
    rollbacks: Floats
    """Used share of the allowed rollbacks, ``[E]``."""
    promises: PromiseRecord | None = None
    """Promise of every blueprint in every slot; None if it is not measured."""

    @property
    def measured_promises(self) -> PromiseRecord:
        """`promises`, for features that exist only where they are measured."""
        assert self.promises is not None, "features of promise are computed where it is measured"
        return self.promises

    @property
    def chance_loss(self) -> np.float64:
        """Size of the chance loss: the unit of losses and contributions."""
        return np.float64(max(abs(self.history.chance_loss), TINY))

    def log_loss(self, losses: Floats) -> Floats:
        """Losses relative to the chance loss."""
        return np.log(np.maximum(_nan_to_inf(losses), TINY) / self.chance_loss)

    def scale_contribution(self, contribution: Floats) -> Floats:
        """Contributions to the loss, relative to the chance loss."""
        return np.arcsinh(np.nan_to_num(contribution) * (OUTCOME_GAIN / self.chance_loss))

    def divide_by_loss(self, values: Floats) -> Floats:
        """``[E, S]``: values as shares of the present validation loss; 0 where they are not known."""
        return np.nan_to_num(values) / np.maximum(np.abs(self.history.losses[:, :1]), TINY)

    def log_added(self) -> Floats:
        """log1p of the size of the blended seeds relative to the host, in what rent is paid on, ``[E]``."""
        return np.log1p(self.networks.charge.added(self.networks.table, self.networks.table.blended))

    def log_costs(self) -> Floats:
        """``[E, S, K]``: log1p of what each blueprint adds, relative to the host."""
        return np.log1p(self.networks.charge.of_blueprints)

    def gradient_ratio(self) -> Floats:
        """``[E, S]``: log of the seeds' gradients over the hosts'; 0 where there is none."""
        training = self.history.training
        ratio = _compute_log_ratio(training.seed_gradient, training.host_gradient[:, None])
        return np.where(training.seed_gradient > 0, ratio, 0.0)

    def ramp_left(self) -> Floats:
        """``[E, S]``: the share of alpha's ramp that is left."""
        table = self.networks.table
        left = 1 - table.alpha_elapsed / np.maximum(table.alpha_duration, 1)
        return np.where(table.stage == Stage.BLENDING, left, 0.0)

    def mark_family(self, family: Family) -> Floats:
        """``[E, S, K]``: 1 for blueprints of this family."""
        specs = self.networks.specs
        return np.broadcast_to(np.array([kind.family is family for kind in specs.kinds], float), specs.compatible.shape)

    def mark_resident_family(self, family: Family) -> Floats:
        """``[E, S]``: 1 for seeds of this family; 0 in slots without a seed."""
        table = self.networks.table
        resident = np.maximum(table.blueprint, 0).astype(np.int64)
        picked = np.take_along_axis(self.mark_family(family), resident[..., None], axis=2)[..., 0]
        return np.where(table.owning, picked, 0.0)


def _nan_to_inf(values: Floats) -> Floats:
    """The values with infinity for NaN: a diverged network must not look like one at chance."""
    return np.where(np.isnan(values), np.inf, values)


def _compute_log_ratio(numerator: Floats, denominator: Floats) -> Floats:
    with np.errstate(divide="ignore"):  # in a diverged network the ratio may be infinite
        return np.log(np.maximum(numerator, TINY) / np.maximum(denominator, TINY))


@dataclass(frozen=True)
class Feature:
    """One number per network, slot or blueprint."""

    name: str
    low: float
    high: float
    compute: Callable[[FeatureInputs], Floats | Bools]


GLOBAL_FEATURES: tuple[Feature, ...] = (
    # How the episode and its training go.
    Feature("progress", 0, 1, lambda v: v.progress),
    Feature("log_train_loss", -LOG_LIMIT, 2, lambda v: v.log_loss(v.history.training.loss)),
    Feature("log_validation_loss", -LOG_LIMIT, 2, lambda v: v.log_loss(v.history.losses[:, 0])),
    Feature("train_accuracy", 0, 1, lambda v: v.history.training.accuracy),
    Feature("validation_accuracy", 0, 1, lambda v: v.history.accuracies[:, 0]),
    Feature("accuracy_change", -1, 1, lambda v: v.history.accuracies[:, 0] - v.history.accuracies[:, 1]),
    Feature("accuracy_trend", -1, 1, lambda v: v.history.accuracies[:, 0] - v.history.accuracies[:, LOOKBACK]),
    Feature("loss_change", -2, 2, lambda v: _compute_log_ratio(v.history.losses[:, 0], v.history.losses[:, 1])),
    Feature("loss_trend", -2, 2, lambda v: _compute_log_ratio(v.history.losses[:, 0], v.history.losses[:, LOOKBACK])),
    Feature("accuracy_gap", -1, 1, lambda v: v.history.training.accuracy - v.history.accuracies[:, 0]),
    Feature(
        "loss_gap", -LOG_LIMIT, LOG_LIMIT, lambda v: _compute_log_ratio(v.history.losses[:, 0], v.history.training.loss)
    ),
    Feature("plateau_age", 0, 1, lambda v: v.history.plateau_age / LONGEST_PLATEAU),
    # What was used up, and what growth costs.
    Feature("rollbacks", 0, 1, lambda v: v.rollbacks),
    Feature("budget_left", 0, 1, lambda v: v.networks.budget_left),
    Feature("log_added_parameters", 0, 3, lambda v: v.log_added()),
    Feature("rent_paid", 0, 1, lambda v: v.rent * v.log_added()),
    Feature("rent", 0, 1, lambda v: v.rent),
    # The problem: host, data and optimizer, whose learning rate may end at zero.
    Feature("log_host_parameters", -LOG_LIMIT, LOG_LIMIT, lambda v: np.log(v.networks.host_parameters / 1000)),
    Feature("log_train_size", -LOG_LIMIT, LOG_LIMIT, lambda v: np.log(v.train_size / 1000)),
    Feature(
        "log_learning_rate",
        -LOG_LIMIT,
        LOG_LIMIT,
        lambda v: np.log(np.maximum(v.networks.specs.learning_rates / 0.01, TINY)),
    ),
    Feature(
        "log_host_gradient",
        -LOG_LIMIT,
        LOG_LIMIT,
        lambda v: np.log(_nan_to_inf(v.history.training.host_gradient) + TINY),
    ),
    # The last decision.
    *(Feature(f"last_op_{op.name.lower()}", 0, 1, lambda v, op=op: v.history.last_op == op) for op in Op),
)
"""Features of the network, ``[E]`` each."""

SLOT_FEATURES: tuple[Feature, ...] = (
    *(
        Feature(f"stage_{stage.name.lower()}", 0, 1, lambda v, stage=stage: v.networks.table.stage == stage)
        for stage in Stage
    ),
    # The state of the slot.
    Feature("alpha", 0, 1, lambda v: v.networks.table.alpha.astype(np.float64)),
    Feature("alpha_target", 0, 1, lambda v: v.networks.table.alpha_target.astype(np.float64)),
    Feature("ramp_left", 0, 1, lambda v: v.ramp_left()),
    Feature("pruning", 0, 1, lambda v: v.networks.table.pruning),
    Feature("stage_age", 0, 1, lambda v: v.networks.table.stage_age / float(v.horizon)),
    Feature("seed_age", 0, 1, lambda v: v.networks.table.seed_age / float(v.horizon)),
    # The measurements of its seed.
    Feature("measured", 0, 1, lambda v: np.isfinite(v.history.loss_contribution)),
    Feature("measurement_age", 0, 1, lambda v: v.networks.measurements.contribution_age / float(v.horizon)),
    Feature("accuracy_contribution", -1, 1, lambda v: np.nan_to_num(v.history.accuracy_contribution)),
    Feature("loss_contribution", -LOG_LIMIT, LOG_LIMIT, lambda v: v.scale_contribution(v.history.loss_contribution)),
    Feature("loss_gain", -LOG_LIMIT, LOG_LIMIT, lambda v: v.divide_by_loss(v.history.loss_contribution)),
    Feature("loss_gain_error", 0, LOG_LIMIT, lambda v: v.divide_by_loss(v.history.loss_error)),
    Feature(
        "contribution_velocity",
        -LOG_LIMIT,
        LOG_LIMIT,
        lambda v: v.scale_contribution(v.history.loss_contribution - v.history.loss_contribution_before),
    ),
    Feature("gradient_ratio", -LOG_LIMIT, LOG_LIMIT, lambda v: v.gradient_ratio()),
    Feature("gradient_healthy", 0, 1, lambda v: v.networks.measurements.gradient_healthy),
    # The place, and what grew there.
    Feature("depth", 0, 1, lambda v: np.tile(np.linspace(0.0, 1.0, v.networks.table.slots), (len(v.progress), 1))),
    Feature("log_width", -LOG_LIMIT, LOG_LIMIT, lambda v: np.log(v.networks.specs.widths / 10)),
    Feature("tries", 0, 1, lambda v: v.history.tries.sum(2) / MOST_TRIES),
    Feature("resident_cost", 0, 3, lambda v: np.log1p(v.networks.charge.of_slots(v.networks.table))),
    *(
        Feature(f"layout_{layout}", 0, 1, lambda v, layout=layout: v.networks.slots_of_layout(layout))
        for layout in Layout
    ),
    *(
        Feature(f"resident_{family}", 0, 1, lambda v, family=family: v.mark_resident_family(family))
        for family in Family
    ),
)
"""Features of each slot, ``[E, S]`` each."""

BLUEPRINT_FEATURES: tuple[Feature, ...] = (
    Feature("cost", 0, 3, lambda v: v.log_costs()),
    Feature("rent_due", 0, 1, lambda v: v.rent[:, None, None] * v.log_costs()),
    Feature("compatible", 0, 1, lambda v: v.networks.specs.compatible),
    Feature("tries", 0, 1, lambda v: v.history.tries / MOST_TRIES),
    Feature("last_outcome", -LOG_LIMIT, LOG_LIMIT, lambda v: v.scale_contribution(v.history.outcomes)),
    *(Feature(f"is_{family}", 0, 1, lambda v, family=family: v.mark_family(family)) for family in Family),
)
"""Features of each blueprint in each slot, ``[E, S, K]`` each."""


def compute_features(features: Sequence[Feature], inputs: FeatureInputs) -> Float32s:
    """Compute the features, clip each to its range and stack them along a new last axis; NaN stays."""
    columns = [np.clip(feature.compute(inputs), feature.low, feature.high) for feature in features]
    return np.stack(columns, axis=-1, dtype=np.float32, casting="unsafe")


class FeatureLists(NamedTuple):
    """The features of an observation's three parts."""

    globals: tuple[Feature, ...]
    slots: tuple[Feature, ...]
    blueprints: tuple[Feature, ...]

    @property
    def spec(self) -> ObservationSpec:
        """The number of features in each part."""
        return ObservationSpec(*map(len, self))


# Features of promise come last in each part, so that those before keep their columns.
_PLAIN = FeatureLists(GLOBAL_FEATURES, SLOT_FEATURES, BLUEPRINT_FEATURES)
_WITH_PROMISE = FeatureLists(
    (
        *GLOBAL_FEATURES,
        Feature("best_promise", 0, 1, lambda v: find_largest(v.measured_promises.fitted, (1, 2))),
        Feature("best_promise_held_out", -1, 1, lambda v: find_largest(v.measured_promises.held_out, (1, 2))),
        Feature("promise_change", -1, 1, lambda v: v.measured_promises.change),
        Feature("promise_age", 0, 1, lambda v: v.measured_promises.age / v.horizon),
    ),
    (
        *SLOT_FEATURES,
        Feature("best_promise", 0, 1, lambda v: find_largest(v.measured_promises.fitted, 2)),
        Feature("best_promise_held_out", -1, 1, lambda v: find_largest(v.measured_promises.held_out, 2)),
    ),
    (
        *BLUEPRINT_FEATURES,
        Feature("promise", 0, 1, lambda v: v.measured_promises.fitted),
        Feature("promise_held_out", -1, 1, lambda v: v.measured_promises.held_out),
    ),
)


def list_features(promise: bool) -> FeatureLists:
    """The features of observations with or without promise; those of promise come last."""
    return _WITH_PROMISE if promise else _PLAIN


def observe(inputs: FeatureInputs) -> Observation:
    """The observation of E networks, on the CPU.

    A diverged network has the worst loss and gradient, and 0 for comparisons of them and for promises.
    """
    parts = (compute_features(features, inputs) for features in list_features(inputs.promises is not None))
    return Observation(*(torch.from_numpy(part).nan_to_num(nan=0.0) for part in parts))


_COLUMNS = {
    lists.spec: [{feature.name: index for index, feature in enumerate(features)} for features in lists]
    for lists in (_PLAIN, _WITH_PROMISE)
}


class FeatureReader:
    """An observation of E networks as named arrays; raises KeyError for a name that is not among its features."""

    def __init__(self, observation: Observation) -> None:
        self._globals, self._slots, self._blueprints = (part.cpu().numpy() for part in observation)
        # The numbers of features show whether those of promise are among them.
        spec = ObservationSpec(*(part.shape[-1] for part in observation))
        self.shows_promise = spec == _WITH_PROMISE.spec
        """Whether the observation has features of promise."""
        self._columns = _COLUMNS[spec]

    def network(self, name: str) -> Float32s:
        """A feature of the network, ``[E]``."""
        return self._globals[:, self._columns[0][name]]

    def slot(self, name: str) -> Float32s:
        """A feature of each slot, ``[E, S]``."""
        return self._slots[:, :, self._columns[1][name]]

    def blueprint(self, name: str) -> Float32s:
        """A feature of each blueprint in each slot, ``[E, S, K]``."""
        return self._blueprints[..., self._columns[2][name]]
