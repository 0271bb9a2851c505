"""Whether one model learns, its snapshots, and its rollbacks."""

import copy
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from esper.engine.governor import Governor, GovernorSettings, Intervention, Trouble
from esper.engine.history import PLATEAU_IMPROVEMENT, improves
from esper.errors import CheckpointError, ConfigError, DivergedError
from esper.grower.scores import LOSS, Metrics, Scores
from esper.growth.links import unwrap_optimizer
from esper.growth.model import GrowingModel
from esper.growth.slot import Seed
from esper.lifecycle.actions import Op
from esper.numerics.modules import global_generators
from esper.serialization import from_plain, to_plain

CHECKS_AT_CHANCE = 8
"""Checks in a row at the level of chance after which the user is warned: such a network hardly gets better."""
SMALLEST_KEPT_SHARE = 0.5
"""A network that keeps less than this of its best improvement over chance is nearer to chance than to its best."""
_NOT_RESTORED = ("params", "lr", "initial_lr")
"""Entries of an optimizer's groups that a rollback leaves as they are."""
_CALLER = 8
"""Calls between a warning and the loop that called `esper.Grower.step`."""
_REASONS = {
    Trouble.NOT_FINITE: "a gradient, parameter or moment is infinite or not a number",
    Trouble.COLLAPSED: "the model only guesses, and did better before",
    Trouble.EXPLODED: "the loss has been far above the usual, and validation got much worse",
}


@dataclass(frozen=True)
class Rollback:
    """A rollback of one model."""

    trouble: Trouble
    """The kind of trouble that the check detected."""
    loss: float
    """The training loss of that check."""
    loss_restored: float
    """The training loss when the snapshot was taken; NaN for the one taken before any check."""
    pruned: tuple[str, ...]
    """Slots that lost their module."""


def describe_rollback(intervention: Intervention, loss: float, slots: Sequence[str]) -> Rollback | None:
    """The rollback of a single model at that training loss; None if there was none."""
    if not intervention.rows[0]:
        return None
    pruned = tuple(slots[place] for place in cast("list[int]", intervention.transitions.slot.tolist()))
    return Rollback(Trouble(intervention.trouble[0]), loss, float(intervention.loss_restored[0]), pruned)


class ModelSnapshot:
    """A copy of a model, its optimizer's state and torch's global random generators, to return to.

    All is copied by name, and written back into the model's own tensors. Live modules are pruned, and so are fossils
    that germinated after the snapshot. Of the optimizer ``state`` and ``param_groups`` return, but not the learning
    rates, which are the scheduler's. What an optimizer keeps elsewhere stays.
    """

    def __init__(self, model: GrowingModel, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, unwrap_optimizer(optimizer)
        self._generators = {f"{place} on {each.device}": each for place, each in enumerate(global_generators(model))}
        self._seeds: dict[str, Seed] = {}
        """The modules in the snapshot, by slot."""
        self._values: dict[str, Tensor] = {}
        self._moments: dict[str, dict[str, Any]] = {}
        """The optimizer's state, by the names of parameters."""
        self._groups: list[dict[str, Any]] = []
        self._random: dict[str, Tensor] = {}

    @torch.no_grad()
    def take(self) -> None:
        """Copy the present state."""
        state, groups = self.optimizer.state, self.optimizer.param_groups
        named = self.model.named_parameters()
        self._seeds = self.model.seeds
        self._values = {name: tensor.clone() for name, tensor in self._name_tensors().items()}
        self._moments = {name: copy.deepcopy(state[parameter]) for name, parameter in named if parameter in state}
        kept = [{key: value for key, value in group.items() if key not in _NOT_RESTORED} for group in groups]
        self._groups = copy.deepcopy(kept)
        self._random = {name: generator.get_state() for name, generator in self._generators.items()}

    @torch.no_grad()
    def restore(self) -> None:
        """Return to the state of `take`."""
        # Live modules, and fossils that the snapshot lacks, leave the model and the optimizer.
        model, optimizer = self.model, self.optimizer
        for slot, seed in model.seeds.items():
            if not seed.fossilized or self._seeds.get(slot) is not seed:
                model.slots[slot].remove()
        # Tensors of modules that were pruned since the snapshot no longer exist.
        for name, tensor in self._name_tensors().items():
            if name in self._values:
                tensor.copy_(self._values[name])
        model.copies.reset_mirrors(model)
        # The optimizer's objects are changed in place, since wrappers share them.
        optimizer.zero_grad()
        for name, parameter in model.named_parameters():
            optimizer.state.pop(parameter, None)
            if name in self._moments:
                optimizer.state[parameter] = copy.deepcopy(self._moments[name])
        for group, values in zip(optimizer.param_groups, self._groups, strict=False):
            group.update(copy.deepcopy(values))
        for name, state in self._random.items():
            self._generators[name].set_state(state)
        if not optimizer.state.keys() <= set(model.parameters()):
            warnings.warn(
                "the optimizer also holds a state of what is not in the growing model, which a rollback does not know: "
                "it stays as it is",
                stacklevel=_CALLER,
            )

    def is_finite(self, *, gradients: bool = True) -> bool:
        """Whether all parameters, moments and, if wanted, ``gradients`` are finite now."""
        parameters = list(self.model.parameters())
        arrived = [parameter.grad for parameter in parameters if parameter.grad is not None] if gradients else []
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        tensors = [*parameters, *arrived, *(value for value in moments if isinstance(value, Tensor))]
        return all(bool(tensor.isfinite().all()) for tensor in tensors)

    def state_dict(self) -> dict[str, Any]:
        """The copies as plain values, without those of modules that are gone."""
        new = [seed for slot, seed in self.model.seeds.items() if self._seeds.get(slot) is not seed]
        new_tensors = {tensor for seed in new for tensor in (*seed.parameters(), *seed.buffers())}
        kept = {name for name, tensor in self._name_tensors().items() if tensor not in new_tensors}
        return to_plain(
            {
                "values": {name: value for name, value in self._values.items() if name in kept},
                "moments": {name: value for name, value in self._moments.items() if name in kept},
                # What is not plain a resumed optimizer has from whoever constructs it.
                "groups": [{key: each for key, each in group.items() if _is_plain(each)} for group in self._groups],
                "generators": self._random,
                "optimizer": type(self.optimizer).__name__,
            }
        )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was called; the model has the structure that it had then.

        Generators of absent devices and the state of another kind of optimizer are left out.
        """
        what = "the governor's snapshot"
        tensors, parameters = self._name_tensors(), dict(self.model.named_parameters())
        unknown = [*(state["values"].keys() - tensors.keys()), *(state["moments"].keys() - parameters.keys())]
        if unknown:
            raise CheckpointError(f"{what} holds {min(unknown)!r}, which this model lacks")
        self._values = from_plain({name: tensors[name] for name in state["values"]}, state["values"], what)
        saved = {tensors[name] for name in self._values}
        self._seeds = {slot: seed for slot, seed in self.model.seeds.items() if saved.issuperset(seed.parameters())}
        random = {name: each.get_state() for name, each in self._generators.items() if name in state["generators"]}
        self._random = from_plain(random, {name: state["generators"][name] for name in random}, what)
        same = state["optimizer"] == type(self.optimizer).__name__
        # Tuples such as betas are saved as lists.
        self._groups = [
            {key: tuple(cast("list[Any]", value)) if isinstance(value, list) else value for key, value in group.items()}
            for group in (state["groups"] if same else ())
        ]
        moments: dict[str, dict[str, Any]] = state["moments"] if same else {}
        present = self.optimizer.state
        self._moments = {
            name: place_moments(kept, parameters[name], present.get(parameters[name], {}))
            for name, kept in moments.items()
        }

    def _name_tensors(self) -> dict[str, Tensor]:
        """All parameters and buffers by name, but the alphas of modules, which belong to the lifecycle."""
        buffers: dict[str, Tensor] = {}
        for path, module in cast("Iterable[tuple[str, nn.Module]]", self.model.named_modules()):
            if not isinstance(module, Seed):
                buffers |= dict(module.named_buffers(path, recurse=False))
        return {**dict(self.model.named_parameters()), **buffers}


def _is_plain(value: object) -> bool:
    """Whether ``value``, an entry of an optimizer's group, can be saved."""
    parts = cast("Sequence[object]", value) if isinstance(value, list | tuple) else (value,)
    return all(part is None or isinstance(part, Tensor) or type(part) in (bool, int, float, str) for part in parts)


def place_moments(saved: Mapping[str, Any], parameter: Tensor, present: Mapping[str, Any]) -> dict[str, Any]:
    """Moments of ``parameter`` that were ``saved``, where the optimizer has those that are ``present``.

    Without these they are on the parameter's device, and counts of steps on the CPU.
    """
    moments = dict(saved)
    for key, value in saved.items():
        if isinstance(value, Tensor):
            usual = parameter.device if value.dim() else "cpu"
            moments[key] = value.to(present[key].device if key in present else usual)
    return moments


class OptimizerCheck:
    """Detects a ``host`` that learns while the grower's optimizer makes no step, because another one trains it."""

    def __init__(self, host: nn.Module) -> None:
        self._host = host
        self._warned = False
        self._sums = self._sum_parameters()

    def require_steps(self, *, stepped: bool) -> None:
        """Refuse a host that has changed since the last call although the optimizer has not ``stepped``.

        Warns once if the host has not changed either.
        """
        # Training changes the sums of parameters; no copy of them is needed to notice it.
        sums, before = self._sum_parameters(), self._sums
        self._sums = sums
        if stepped or not len(sums) or len(sums) != len(before):
            return
        same = torch.equal(sums, before.to(sums))
        if not same and any(parameter.grad is not None for parameter in self._host.parameters()):
            raise ConfigError(
                "the model has changed since the last decision, but the grower's optimizer made no step, so another "
                "optimizer trains it, which would never train new modules: make that one from "
                "model.parameter_groups(lr=...), and a Grower with it that loads this one's state_dict()"
            )
        if same and not self._warned:
            self._warned = True
            warnings.warn(
                "the optimizer made no step since the last decision, so there is nothing new to measure: train between "
                "calls of Grower.step, and call it once per epoch or every n minibatches",
                stacklevel=3,
            )

    def accept_changes(self) -> None:
        """Ignore changes of the host so far, which do not come from training: a rollback, say."""
        self._sums = self._sum_parameters()

    @torch.no_grad()
    def _sum_parameters(self) -> Tensor:
        """The sum of the values of each learning parameter, ``[P]``."""
        learning = [parameter for parameter in self._host.parameters() if parameter.requires_grad]
        sums = [values.sum(dtype=torch.float64).to(learning[0].device) for values in learning]
        return torch.stack(sums) if sums else torch.zeros(0)


class LearningCheck:
    """Decides whether a network shows that it has learned, and which operations that rules out.

    Chance is the loss of guessing, where it is known, and otherwise the first loss. No module is kept in a network that
    is not better than chance, whose gradients are zero or whose output is the same for all examples. None is kept or
    pruned while the loss is unusual. Without ``settings`` of a governor nothing is checked.
    """

    def __init__(self, settings: GovernorSettings | None, scores: Scores) -> None:
        self._settings, self._scores = settings, scores
        # What follows is saved.
        self.best_loss = self.last_loss = math.nan
        """The least validation loss so far, and the last one."""
        self.best_improvement = np.full(4, math.nan)
        """The greatest improvements of losses over chance and over the start, of training and validation each."""
        self.checks_without_progress = 0
        """Checks in a row in which nothing showed that the network has learned."""
        self.checks_without_figures = 0
        """Checks in a row in which a loss or metric was not finite, although the model was."""
        self.first_value = math.nan
        """The metric when it was first measured."""
        self.checks_of_same_value = 0
        """Checks so far, while the metric has never changed; -1 once it has."""
        self.learned = self.changed = False
        self.loss_to_regain = math.nan
        """The training loss of the snapshot that the last rollback restored; NaN once the model has regained it."""

    def require_rollbacks_left(self, governor: Governor, intervention: Intervention, train_loss: float) -> None:
        """Stop training that has used up its rollbacks; a model that has regained its loss has all of them again."""
        if intervention.exhausted[0]:
            assert governor.settings is not None
            raise DivergedError(
                f"training diverged again ({_REASONS[Trouble(intervention.trouble[0])]}) after "
                f"{governor.settings.max_rollbacks} rollbacks without recovering: the model is in its last good state; "
                "lower the learning rate, or check the data and the loss"
            )
        if intervention.rows[0]:
            # The snapshot from before any check has no loss.
            restored = float(intervention.loss_restored[0])
            self.loss_to_regain = math.inf if math.isnan(restored) else restored
        elif intervention.usual[0] and train_loss <= self.loss_to_regain:
            governor.rollbacks[:] = 0
            self.loss_to_regain = math.nan

    def require_finite(self, figures: Metrics) -> bool:
        """Whether all ``figures`` of a finite model are finite.

        Warns of the first decision at which they are not, and raises once that lasts.
        """
        wrong = [name for name, value in figures.items() if not math.isfinite(value)]
        if self._settings is None:
            return True
        self.checks_without_figures = self.checks_without_figures + 1 if wrong else 0
        if not wrong:
            return True
        problem = f"{' and '.join(wrong)} not finite, although all parameters are finite"
        advice = "check for batches without labels (or with ignored ones only), and for inputs that are not finite"
        if self.checks_without_figures >= self._settings.patience:
            raise DivergedError(f"{problem}, at {self.checks_without_figures} decisions in a row: {advice}")
        if self.checks_without_figures == 1:
            warnings.warn(f"{problem}: nothing is decided now; {advice}", stacklevel=5)
        return False

    def has_diverged(self, metrics: Metrics, train_loss: float) -> bool:
        """Whether both losses are far above chance, and that of validation is worse than it was.

        A loss on another scale, such as a sum, may be far above in a healthy network too, but does not rise then.
        """
        if self._settings is None:
            return False
        loss = float(metrics[LOSS])
        by_accuracy, by_losses = self._scores.compute_skills(metrics, train_loss)
        self.best_loss = loss if math.isnan(self.best_loss) else min(self.best_loss, loss)
        worse = bool(improves(np.array(self.best_loss), np.array(loss)))
        return worse and by_losses < 1 - self._settings.multiple and not by_accuracy >= self._settings.lead

    def find_disallowed_operations(
        self, metrics: Metrics, train_loss: float, *, usual: bool, constant_output: bool, idle: bool
    ) -> set[Op]:
        """Operations that are ruled out now; warns once the network has shown no learning for long.

        The loss is ``usual`` if the governor found it so, and a network is ``idle`` if all gradients are zero.
        """
        if self._settings is None:
            return set()
        # Learned: at some time it did better than chance by gradients that are not zero, and its loss changed.
        loss = float(metrics[LOSS])
        better = self._beats_chance(metrics, train_loss, self._settings.lead, usual=usual) and not constant_output
        self.learned |= better and not idle
        self.changed |= not math.isnan(self.last_loss) and loss != self.last_loss
        self.last_loss = loss
        # A metric that never changes shows nothing about modules.
        value, name = float(self._scores.get_value(metrics)), self._scores.metric
        if self.checks_of_same_value == 0:
            self.first_value = value
        same = self.checks_of_same_value >= 0 and value == self.first_value
        self.checks_of_same_value = self.checks_of_same_value + 1 if same else -1
        if self.checks_of_same_value == CHECKS_AT_CHANCE and self.changed and name != LOSS:
            warnings.warn(
                f"{name} has been exactly {value:.4g} at all {CHECKS_AT_CHANCE} decisions, while the loss changed, so "
                "contributions to it are 0: check what evaluate returns, or leave out the metric to grow by the loss",
                stacklevel=3,
            )
        shown = better and self.learned and self.changed
        self.checks_without_progress = 0 if shown else self.checks_without_progress + 1
        if self.checks_without_progress == CHECKS_AT_CHANCE:
            chance = "that of guessing (mean, in nats) is" if self._scores.has_chance_level else "the initial one was"
            forgot = self.learned and self.changed
            what = "has lost most of its progress, or overfits," if forgot else "has not learned anything"
            signs = ", and its output is the same for all examples" if constant_output else ""
            signs += ", its gradients are zero" if idle else ""
            is_fraction = len(metrics) == 1 and self._scores.chance_loss < loss <= 1
            hint = "; if it is an accuracy, return (loss, accuracy) or use esper.Metric" if is_fraction else ""
            warnings.warn(
                f"the network {what} for {CHECKS_AT_CHANCE} decisions: its validation loss is {loss:.4g}, {chance} "
                f"{self._scores.chance_loss:.4g}{signs}. No module is kept until it improves: check the learning "
                f"rate, the loss and the data{hint}",
                stacklevel=3,
            )
        # An unusual loss says nothing for or against modules.
        if not usual:
            return {Op.FOSSILIZE, Op.PRUNE}
        return {Op.FOSSILIZE} if idle or not better else set()

    def _beats_chance(self, metrics: Metrics, train_loss: float, lead: float, *, usual: bool) -> bool:
        """Whether the network does better than chance, and has not lost most of its best improvement.

        Its validation loss shows that; if it overfits, the training loss with the score; and for losses on another
        scale, such as sums, both losses relative to the start with the accuracy.
        """
        scores = self._scores
        over_chance = scores.improvement_over_chance(metrics, train_loss)
        improvement = np.array([*over_chance, *scores.improvement_over_start(metrics, train_loss)])
        least = PLATEAU_IMPROVEMENT if scores.has_chance_level else 0.0
        enough = improvement > np.fmax([least, least, lead, lead], self.best_improvement * SMALLEST_KEPT_SHARE)
        if usual:
            self.best_improvement = np.fmax(self.best_improvement, improvement)
        by_training, by_validation = enough[:2].tolist()
        overfits = by_training and scores.shows_skill(metrics, lead)
        return by_validation or overfits or (bool(enough[2:].all()) and scores.improvement_of_accuracy(metrics) > lead)

    def forget_best(self) -> None:
        """Forget the best improvement after a module was pruned, without which the network may do worse."""
        self.best_improvement[:] = math.nan

    def state_dict(self) -> dict[str, Any]:
        """Losses and improvements so far, as plain values."""
        return to_plain({name: value for name, value in vars(self).items() if not name.startswith("_")})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was called."""
        like = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        vars(self).update(from_plain(like, state, "the learning check"))
