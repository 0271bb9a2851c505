"""`esper.adapt`: grow modules on a frozen host to fit new data, and keep the best."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch

from esper.adaptation.trainer import (
    FineTuneConfig,
    ForgettingReport,
    Loss,
    MakeOptimizer,
    Measure,
    Metrics,
    Structure,
    Trainer,
    seed_torch,
)
from esper.config.arguments import (
    AtLeastTwo,
    Batches,
    Flops,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    Seconds,
    check_arguments,
)
from esper.errors import ConfigError, DivergedError, plural
from esper.grower.spending import Spending
from esper.growth.blueprints.registry import get
from esper.growth.hooks import require_attached
from esper.growth.model import MODEL_ADVICE, GrowingModel
from esper.growth.summary import NOTHING, align_columns

TRIALS_SHOWN = 12
"""Trials on the page, the best first."""


@dataclass(frozen=True)
class Trial:
    """Result of cross-validating one structure on the new data."""

    structure: Structure
    found: Metrics
    """Score and loss on the held-out folds, at the weight that the source data allow."""
    retention: ForgettingReport
    """Weight, and relative increase of the source loss; means over the folds."""
    earned: Mapping[str, float]
    """By slot: decrease of the score when only that seed is switched off; means over the folds."""
    parameters: int
    """Number of parameters that the structure adds."""

    def __str__(self) -> str:
        return describe_structure(self.structure)


@dataclass(frozen=True, repr=False)
class Adaptation:
    """Result of `esper.adapt`: all trials, and what was kept. The model has the kept seeds. Prints as a report."""

    trials: tuple[Trial, ...]
    """All trials, best first."""
    untried: int
    """Number of structures skipped because of the budget."""
    before: Metrics
    """Score and loss of the host on the new data."""
    kept: Trial | None
    """The trial whose structure was trained again on all new data and kept; None if nothing was kept."""
    diverged: tuple[Trial, ...]
    """Better trials whose training on all new data diverged."""
    retention: ForgettingReport
    """Weight, and relative increase of the source loss, after training on all new data. With weight 0 the seeds were
    removed."""
    source_loss: float
    """Loss of the host on the held-out half of the source data; NaN without source data."""
    flops: float | None
    """Total FLOPs; None if torch cannot count the host's."""
    seconds: float
    """Total seconds."""

    def __repr__(self) -> str:
        kept, before, share, rise = self.kept, self.before, self.retention.share, self.retention.rise
        has_source = not math.isnan(self.source_loss)
        parts: list[str] = []

        # What was kept, or why nothing was.
        if kept is not None:
            weight = f", at {kept.retention.share:.0%} of the learned weight" if has_source else ""
            diverged = f"\n{len(self.diverged)} scored higher, but diverged in training on all new data."
            parts.append(
                f"Kept: {kept}, {plural(kept.parameters, 'parameter')}.\n"
                f"Cross-validated on new data{weight}:\n"
                f"score {kept.found.score:.4g} (host {before.score:.4g}), "
                f"loss {kept.found.loss:.4g} (host {before.loss:.4g}).\n"
                f"It was the best of {len(self.trials)} on this score, so the score is optimistic; use separate test "
                "data." + (diverged if self.diverged else "")
            )
            rows = [(slot, kept.structure[slot], f"{earned:+.4f}") for slot, earned in kept.earned.items()]
            parts.append(align_columns([("slot", "blueprint", "earned"), *rows], numbers_from=2))
        elif share == 0:
            parts.append(
                "Nothing was kept: trained on all new data, the best structure raises the source loss too much at any "
                "weight."
            )
        elif self.diverged:
            parts.append(
                f"Nothing was kept: {len(self.diverged)} scored higher than the host, but diverged in training on all "
                "new data;\ngive an optimizer with a lower learning rate."
            )
        else:
            parts.append(f"Nothing was kept: no structure scored higher than the host ({before.score:.4g}).")

        # What it cost on the source data.
        if has_source and kept is None:
            parts.append(f"Source data, held-out batches: loss {self.source_loss:.4g}.")
        elif has_source:
            parts.append(
                f"Source data, held-out batches: loss {self.source_loss:.4g} before, {rise:+.2%} now, at {share:.0%} "
                "of the learned weight.\nThe weight was chosen on these batches, so the increase is slightly "
                "optimistic.\nmodel.without_growth() gives the original outputs."
            )

        # What was tried.
        untried = f", {self.untried} skipped because of the budget" if self.untried else ""
        flops = "" if self.flops is None else f", {self.flops / 1e9:.3g} GFLOP"
        parts.append(f"{len(self.trials)} structures tried{untried}; {self.seconds:.1f} s{flops}")
        titles = ("structure", "score", "loss", "source", "share", "parameters")
        rows = [
            (
                str(trial),
                f"{trial.found.score:.4f}",
                f"{trial.found.loss:.4g}",
                f"{trial.retention.rise:+.2%}" if has_source else NOTHING,
                f"{trial.retention.share:.0%}",
                f"{trial.parameters:,}",
            )
            for trial in self.trials[:TRIALS_SHOWN]
        ]
        parts.append(align_columns([titles, *rows], numbers_from=1))
        return "\n\n".join(parts)


def describe_structure(structure: Structure) -> str:
    """One line: the seeds of a structure, or from three seeds on how many of each blueprint."""
    if len(structure) <= 2:
        return " + ".join(f"{blueprint} at {slot}" for slot, blueprint in structure.items())
    names = list(structure.values())
    counts = ", ".join(f"{names.count(name)} {name}" for name in dict.fromkeys(names))
    return f"{plural(len(structure), 'seed')}: {counts}"


LEARNING_RATE = 0.01
TOLERANCE = 0.01
"""Default of ``tolerance``."""


def make_adam(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """The default optimizer: plain Adam at `LEARNING_RATE`."""
    return torch.optim.Adam(groups, lr=LEARNING_RATE)


@check_arguments(
    ConfigError,
    model=MODEL_ADVICE,
    loss="give a function loss(model, batch) that returns the mean loss of a batch",
    score="give a function score(model, batch) that returns a number, the higher the better",
    tolerance="give the maximum relative increase of the loss on source, such as 0.01",
    optimizer="give a function of parameter groups, such as lambda groups: torch.optim.Adam(groups, lr=1e-3)",
)
def adapt(
    model: GrowingModel,
    loss: Loss,
    target: Batches,
    *,
    score: Measure | None = None,
    source: Batches | None = None,
    tolerance: NonNegativeFloat | None = None,
    optimizer: MakeOptimizer = make_adam,
    epochs: PositiveInt = 30,
    folds: AtLeastTwo = 2,
    parameters: PositiveInt | None = None,
    training_flops: Flops | None = None,
    seconds: Seconds | None = None,
    seed: NonNegativeInt = 0,
    verbose: bool = False,
) -> Adaptation:
    """Adapt a trained model to new data by growing modules on it; returns all trials and what was kept.

    ```python
    model = esper.attach(net, {r"re:.*\\.(query|value)": ["lora_4"], "head": ["lora_4"]}, x[:2], freeze_host=True)
    print(esper.adapt(model, lambda model, batch: cross_entropy(model(batch[0]), batch[1]), loader))
    plain = model.finalize()
    ```

    A structure is a set of seeds, at most one per slot. Each structure is cross-validated on the new data. The search
    tries every blueprint in every slot, largest first; then every blueprint in all of its slots; then the best 2, 4, 8,
    ... single seeds together; then the best structure without seeds that did not help. If the best scores higher than
    the host, it is trained again on all new data and fossilized in ``model``. ``model.swap(None)`` removes it, and
    ``model.without_growth()`` gives the host's outputs bit for bit. The model keeps its training or evaluation mode.

    With ``source``, each batch of new data is trained together with one of every second batch of ``source``. The seeds
    then get the largest weight, in tenths, at which the loss on the other batches of ``source`` rises by at most
    ``tolerance`` (weights are interpolated as by Wortsman et al. 2022, arXiv 2109.01903). Structures are compared at
    that weight. If it is 0 in the end, nothing is kept.

    A structure whose training diverges ranks below all others. If the final training diverges, the next best structure
    is trained on all new data instead.

    Args:
        model: From `esper.attach` with ``freeze_host=True``, with all slots free.
        loss: ``loss(model, batch)`` calls the whole model and returns the mean loss of a batch, a tensor with one
            number. Means over batches are weighted by the number of examples in the last call.
        target: Batches of new data, at least as many as ``folds``; read once and kept in memory.
        score: ``score(model, batch)`` returns the value to maximise, such as the accuracy; None: minus the loss.
        source: At least two batches of data that must not be forgotten; read once and kept in memory.
        tolerance: Maximum relative increase of the loss on ``source``; None: 0.01.
        optimizer: Makes an optimizer from parameter groups (default: Adam with learning rate 0.01). The weight of seeds
            rises linearly from zero during the first sixth of the steps.
        epochs: Passes over the new data in every training.
        folds: Number of folds. A trial costs ``folds - 1`` times a training on all new data.
        parameters: Maximum number of added parameters; larger structures are skipped.
        training_flops: FLOP budget of all training and measuring, as `esper.Spending` counts. At least one structure is
            tried; others only if they and the final training are expected to fit. If the final training diverges, that
            of the next best exceeds the budget.
        seconds: Budget in seconds, by the same rules.
        seed: Random seed of initial weights, orders, dropout, and loaders that shuffle with torch's global generator.
        verbose: Print a line per trial.

    Raises:
        ConfigError: an argument has the wrong type or no effect; the host is not frozen; a slot is taken; there are
            fewer batches than folds; no structure fits into ``parameters``; the loss, score or optimizer cannot be
            used; the loss does not call the model; the loss of the host or of every structure is not finite; or FLOPs
            are limited, but torch cannot count them.
        SlotError: a submodule with a slot was replaced.
    """
    # The host must be frozen, and nothing may grow on it yet.
    require_attached(model)
    if not model.frozen.holds_all(model.host):
        raise ConfigError("the host is not frozen: attach with freeze_host=True")
    if model.seeds:
        raise ConfigError(f"slot {next(iter(model.seeds))!r} is taken: remove and keep its seeds with model.swap(None)")

    # Read the data once; each trial and the last training need enough batches.
    training = model.training
    with seed_torch(seed):
        batches, source_batches = list(target), [] if source is None else list(source)
    if len(batches) < folds:
        raise ConfigError(f"target has {len(batches)} batches for {folds} folds: give smaller batches, or more data")
    if source is None and tolerance is not None:
        raise ConfigError("tolerance has no effect without source: give source, or omit tolerance")
    if source is not None and len(source_batches) < 2:
        raise ConfigError(
            f"source has {len(source_batches)} batches, but needs one to train on and one to measure forgetting: give "
            "smaller batches or more data, or omit it"
        )

    # Search by cross-validation; the clock of the budget runs until the end.
    spending = Spending(model, training_flops, seconds=seconds)
    try:
        allowed = TOLERANCE if tolerance is None else tolerance
        trainer = Trainer(model, FineTuneConfig(loss, score, optimizer, epochs, source_batches, allowed, seed))
        search = Search(trainer, batches, folds, spending, parameters, verbose=verbose)
        kept, retention, diverged = None, ForgettingReport(1.0, 0.0), list[Trial]()
        try:
            search.run()
            # Grow the best on all of the new data; the next best where its training diverges.
            for trial in search.better:
                try:
                    retention = trainer.fit(trial.structure, batches, folds)
                except DivergedError:
                    diverged.append(trial)
                    continue
                kept = trial if retention.share > 0 else None
                break
        except BaseException:
            # Whatever stops the search, the user gets the bare host back.
            model.swap(None)
            raise

        # Make what was kept permanent, undo everything else.
        if kept is None:
            model.swap(None)
        for name in model.seeds:
            model.slots[name].fossilize()
        return Adaptation(
            trials=tuple(sorted(search.trials, key=lambda trial: trial.found.rank, reverse=True)),
            untried=search.untried,
            before=search.before,
            kept=kept,
            diverged=tuple(diverged),
            retention=retention,
            source_loss=trainer.source_loss,
            flops=None if model.host_flops is None or model.compilations.compiled else spending.flops,
            seconds=spending.seconds,
        )
    finally:
        model.tap.pass_counters.remove(spending)
        model.train(training)


class Search:
    """Greedy search over structures by cross-validation: single seeds first, then sets of them."""

    def __init__(
        self,
        trainer: Trainer,
        batches: Sequence[Any],
        folds: int,
        spending: Spending,
        max_parameters: int | None,
        *,
        verbose: bool,
    ) -> None:
        self._trainer, self._model, self._spending = trainer, trainer.model, spending
        self._max_parameters = max_parameters
        self._folds = [batches[fold::folds] for fold in range(folds)]
        self._verbose = verbose
        self.before = Metrics.merge([trainer.measure_host(fold) for fold in self._folds])
        """Score and loss of the host on the new data."""
        self.trials: list[Trial] = []
        """Trials in the order in which they were made."""
        self.untried = 0
        """Structures that the budget left out."""
        self._share_per_flop = 0.0
        """Highest share of the budget that a trial spent per FLOP that `_count_flops` expects of it."""

    @property
    def better(self) -> list[Trial]:
        """Trials that did better than the host, the best first; of equals the one with fewer parameters."""
        better = [trial for trial in self.trials if trial.found.rank > self.before.rank]
        return sorted(better, key=lambda trial: (trial.found.rank, -trial.parameters), reverse=True)

    @property
    def best(self) -> Trial | None:
        """The best trial, if it did better than the host."""
        return next(iter(self.better), None)

    def run(self) -> None:
        """Try single seeds, then sets of them.

        Raises:
            ConfigError: no slot is enabled, no single seed is small enough, or every training diverges.
        """
        slots = [slot for slot in self._model.slots.values() if slot.enabled]
        if not slots:
            raise ConfigError("all slots are disabled: enable one of them by model.slots[name].enabled = True")

        # Every blueprint in every slot by itself, the largest first.
        singles = [{slot.name: name} for slot in slots for name in slot.blueprints]
        singles = sorted(filter(self._fits, singles), key=self._count_parameters, reverse=True)
        if not singles:
            raise ConfigError(
                f"parameters: every available blueprint adds more than {self._max_parameters:,}: allow more, or attach "
                "with smaller blueprints"
            )
        self._try_all(singles)
        if not any(math.isfinite(trial.found.score) for trial in self.trials):
            untried = f", which are all but {self.untried} that the budget left out," if self.untried else ""
            raise ConfigError(
                f"the loss of all {len(self.trials)} structures that were tried{untried} diverges in training: give an "
                "optimizer with a lower learning rate, as by optimizer=lambda groups: torch.optim.Adam(groups, lr=1e-3)"
            )

        # Every blueprint in all of its slots.
        for name in dict.fromkeys(name for single in singles for name in single.values()):
            self._try_all([{slot.name: name for slot in slots if name in slot.blueprints}])

        # The best seeds of different slots together: 2, 4, 8, ..., and all.
        ranked: dict[str, str] = {}
        single_trials = [trial for trial in self.trials if len(trial.structure) == 1]
        for trial in sorted(single_trials, key=lambda trial: trial.found.rank, reverse=True):
            for slot, name in trial.structure.items():
                ranked.setdefault(slot, name)
        count = 1
        while count < len(ranked):
            count = min(2 * count, len(ranked))
            chosen = set(list(ranked)[:count])
            self._try_all([{slot: ranked[slot] for slot in self._model.slots if slot in chosen}])

        # The best of all without the seeds that earned nothing.
        if (best := self.best) is not None:
            self._try_all([{slot: best.structure[slot] for slot, earned in best.earned.items() if earned > 0}])

    def _try_all(self, structures: Iterable[Structure]) -> None:
        """Cross-validate the structures that are new and small enough, as far as the budget goes."""
        for structure in structures:
            if not structure or not self._fits(structure) or any(t.structure == structure for t in self.trials):
                continue
            flops = self._count_flops(structure)
            if self.trials:  # the first one is always tried
                # The structure and the last training of the best must fit into what is left of the budget.
                last = flops if self.best is None else max(flops, self._count_flops(self.best.structure))
                if self._spending.compute_share() + self._share_per_flop * (flops + last) > 1:
                    self.untried += 1
                    continue

            share_before = self._spending.compute_share()
            try:
                trial = self._cross_validate(structure)
            except DivergedError:
                diverged = Metrics(-math.inf, math.inf, self.before.examples)
                earned = dict.fromkeys(structure, 0.0)
                parameters = self._count_parameters(structure)
                trial = Trial(structure, diverged, ForgettingReport(0.0, 0.0), earned, parameters)
            share_per_flop = (self._spending.compute_share() - share_before) / flops if flops else 0.0
            self._share_per_flop = max(self._share_per_flop, share_per_flop)
            self.trials.append(trial)
            if self._verbose:
                sys.stdout.write(f"{trial}: score {trial.found.score:.4g}, loss {trial.found.loss:.4g}\n")
                sys.stdout.flush()

    def _cross_validate(self, structure: Structure) -> Trial:
        trainer = self._trainer
        measured: list[Metrics] = []
        reports: list[ForgettingReport] = []
        ablated: dict[str, list[Metrics]] = {slot: [] for slot in structure}
        for fold, held_out in enumerate(self._folds):
            batches = [batch for other, part in enumerate(self._folds) if other != fold for batch in part]
            reports.append(trainer.fit(structure, batches, fold))
            measured.append(trainer.measure(held_out))
            # Each seed's worth: the same model without it.
            for slot, parts in ablated.items():
                with self._model.slots[slot].disabled():
                    parts.append(trainer.measure(held_out))
        metrics = Metrics.merge(measured)
        earned = {slot: metrics.score - Metrics.merge(parts).score for slot, parts in ablated.items()}
        retention = ForgettingReport(*map(fmean, zip(*reports, strict=True)))
        return Trial(structure, metrics, retention, earned, self._count_parameters(structure))

    def _count_flops(self, structure: Structure) -> float:
        """FLOPs of a trial per example. A frozen host is only differentiated with respect to its features."""
        slots, host = self._model.slots, float(self._model.host_flops or 0)
        grown = sum(get(name).flops_at(slots[slot].site) for slot, name in structure.items())
        passes = self._trainer.config.epochs * (len(self._folds) - 1)
        return passes * (2 * host + 3 * grown) + (1 + len(structure)) * (host + grown)

    def _fits(self, structure: Structure) -> bool:
        return self._max_parameters is None or self._count_parameters(structure) <= self._max_parameters

    def _count_parameters(self, structure: Structure) -> int:
        slots = self._model.slots
        return sum(get(name).parameters_at(slots[slot].site) for slot, name in structure.items())
