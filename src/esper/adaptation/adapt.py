"""`esper.adapt`: try what may grow on a frozen host, keep what does best on new data, undo the rest."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch

from esper.adaptation.trainer import (
    Figures,
    Loss,
    MakeOptimizer,
    Measure,
    Recipe,
    Retention,
    Structure,
    Trainer,
    repeatable,
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
from esper.errors import ConfigError, DivergedError
from esper.grower.spending import Spending
from esper.growth.blueprints.registry import get
from esper.growth.hooks import require_attached
from esper.growth.model import MODEL_ADVICE, GrowingModel
from esper.growth.summary import NOTHING, align_columns

SHOWN = 12
"""Structures on the page, the best first."""


@dataclass(frozen=True)
class Trial:
    """A structure that was grown on a part of the new data, and measured on the rest, each part in turn."""

    structure: Structure
    found: Figures
    """On the parts that it had not learned from, with the weight that other data allowed."""
    retention: Retention
    """Means over the parts."""
    earned: Mapping[str, float]
    """By slot: what the score loses when that seed alone is switched off; means over the parts."""
    parameters: int
    """Scalars that it adds."""

    def __str__(self) -> str:
        return describe_structure(self.structure)


@dataclass(frozen=True, repr=False)
class Adaptation:
    """What was found by `esper.adapt`; the model holds what was kept. As text a page."""

    trials: tuple[Trial, ...]
    """The best first."""
    untried: int
    """Structures that the budget left out."""
    before: Figures
    """Figures of the host on the new data."""
    kept: Trial | None
    """What grew again on all of the new data; None where nothing did better than the host, or nothing of it stayed."""
    diverged: tuple[Trial, ...]
    """What did better still, but not when it grew on all of the new data: that training diverged."""
    retention: Retention
    """Retention of what grew again; where the share is 0, it was taken off."""
    source_loss: float
    """Loss of the host on the half of the other data which nothing learns from; not a number where there are none."""
    flops: float | None
    """FLOPs spent in all; None where torch cannot count the host's."""
    seconds: float
    """Seconds spent in all."""

    def __repr__(self) -> str:
        kept, before, share, rise = self.kept, self.before, self.retention.share, self.retention.rise
        has_source = not math.isnan(self.source_loss)
        parts: list[str] = []
        if kept is not None:
            weight = f", at {kept.retention.share:.0%} of what it learned" if has_source else ""
            diverged = f"\n{len(self.diverged)} did better, but diverged when growing on all of them."
            parts.append(
                f"Kept: {kept}, {kept.parameters:,} parameters.\n"
                f"On new data that it did not learn from{weight}:\n"
                f"score {kept.found.score:.4g}, the host's {before.score:.4g}; "
                f"loss {kept.found.loss:.4g}, the host's {before.loss:.4g}.\n"
                f"By that it was chosen among {len(self.trials)}, which flatters it: measure it on data of their own."
                + (diverged if self.diverged else "")
            )
            rows = [(slot, kept.structure[slot], f"{earned:+.4f}") for slot, earned in kept.earned.items()]
            parts.append(align_columns([("slot", "blueprint", "earned"), *rows], numbers_from=2))
        elif share == 0:
            parts.append(
                "Nothing was kept: grown on all of the new data, the best raises the loss on source too much at any "
                "weight."
            )
        elif self.diverged:
            parts.append(
                f"Nothing was kept: {len(self.diverged)} did better than the host, but diverged when growing on all of "
                "the new data;\ngive an optimizer with a lower learning rate."
            )
        else:
            parts.append(f"Nothing was kept: no structure did better than the host, whose score is {before.score:.4g}.")
        if has_source and kept is None:
            parts.append(f"Source, on batches that nothing learned from: loss {self.source_loss:.4g}.")
        elif has_source:
            parts.append(
                f"Source, on batches that nothing learned from: loss {self.source_loss:.4g} before, {rise:+.2%} now, "
                f"with {share:.0%} of what was learned\non all new data, which is kept. By them that weight was "
                "chosen, which flatters it a little;\nnothing is lost under model.without_growth()."
            )
        left = f", {self.untried} not tried for want of budget" if self.untried else ""
        flops = "" if self.flops is None else f", {self.flops / 1e9:.3g} GFLOP"
        parts.append(f"{len(self.trials)} structures tried{left}; {self.seconds:.1f} s{flops}")
        titles = ("structure", "score", "loss", "source", "share", "parameters")
        trials = [
            (
                str(trial),
                f"{trial.found.score:.4f}",
                f"{trial.found.loss:.4g}",
                f"{trial.retention.rise:+.2%}" if has_source else NOTHING,
                f"{trial.retention.share:.0%}",
                f"{trial.parameters:,}",
            )
            for trial in self.trials[:SHOWN]
        ]
        parts.append(align_columns([titles, *trials], numbers_from=1))
        return "\n\n".join(parts)


def describe_structure(structure: Structure) -> str:
    """In a line: its seeds, or how many of each kind where they are many."""
    if len(structure) <= 2:
        return " + ".join(f"{blueprint} at {slot}" for slot, blueprint in structure.items())
    kinds = list(structure.values())
    counted = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    return f"{len(structure)} seeds: {counted}"


LEARNING_RATE = 0.01
TOLERANCE = 0.01
"""Share by which the loss on other data may rise if nothing is said."""
_SLOWER = (
    "in training: give an optimizer with a lower learning rate, as by optimizer=lambda groups: "
    "torch.optim.Adam(groups, lr=1e-3)"
)


def make_adam(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Adam, without anything."""
    return torch.optim.Adam(groups, lr=LEARNING_RATE)


@check_arguments(
    ConfigError,
    model=MODEL_ADVICE,
    loss="give a function loss(model, batch) that returns the mean loss of a batch",
    score="give a function score(model, batch) that returns a number, the higher the better",
    tolerance="give the share by which the loss on source may rise, such as 0.01",
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
    """Adapt a trained model to new data by what grows on it, and tell what was tried and what it is worth.

    ```python
    model = esper.attach(net, {r"re:.*\\.(query|value)": ["lora_4"], "head": ["lora_4"]}, x[:2], freeze_host=True)
    print(esper.adapt(model, lambda model, batch: cross_entropy(model(batch[0]), batch[1]), loader))
    plain = model.finalize()
    ```

    A structure is a set of seeds, at most one in a slot. Each is tried from its beginning: grown on all parts of the
    new data but one, and measured on that one, each part in turn. First every blueprint on offer in every slot is tried
    by itself, the largest ones first; then every blueprint in all of its slots; then the best 2, 4, 8, ... single ones
    together; then the best of all without the seeds that earned nothing. What does best grows once more on all of the
    new data, and is kept, if it did better than the host: it is fossilized in ``model``. ``model.swap(None)`` takes it
    off again, and ``model.without_growth()`` gives the host's own answers, to the bit. The model is afterwards in the
    mode, training or evaluation, in which it was.

    With ``source`` each batch of new data is learned together with one of every second batch of ``source``. Then what
    grew is given the greatest weight, in tenths, at which the loss on the other batches of ``source``, which nothing
    learns from, has not risen by more than ``tolerance`` (as weights are interpolated by Wortsman et al. 2022, arXiv
    2109.01903). Structures are compared at that weight. If it is 0 in the end, nothing is kept.

    A structure whose training diverges counts as worse than any other. If the last training does, the next best grows
    on all of the new data instead.

    Args:
        model: From `esper.attach` with ``freeze_host=True``, all slots free.
        loss: ``loss(model, batch)``, the mean loss of a batch: a tensor with one number. It calls the model as a whole.
            In means over batches each counts by its examples, which are those of the last call.
        target: Batches of new data, at least as many as there are ``folds``; they are read once and kept in memory.
        score: ``score(model, batch)``, what matters, such as the accuracy on a batch, the higher the better; None: the
            loss below zero.
        source: Batches of data that must not be forgotten, two at least, likewise.
        tolerance: By which share the loss on ``source`` may rise; None: a hundredth.
        optimizer: Makes an optimizer of parameter groups; Adam with a rate of 0.01, if nothing else is said. The weight
            of what grows rises evenly from zero in the first sixth of the steps.
        epochs: Over the new data, in every trial and in the end.
        folds: Parts of the new data. A trial takes ``folds - 1`` times what one training on all of it does.
        parameters: That may be added; structures with more are not tried.
        training_flops: For everything that is tried and measured, as `esper.grower.spending` counts. At least one
            structure is tried and trained; further ones, as long as they and the last training fit in, by what
            those before them took. If the last training diverges, that of the next best comes on top.
        seconds: Likewise.
        seed: All that is random follows from it: first values, orders, dropout, and what a loader shuffles by torch's
            global generator.
        verbose: Print a line per trial.

    Raises:
        ConfigError: an argument is of another kind or says nothing, the host is not frozen, something grows already,
            there are fewer batches than folds, nothing may grow within ``parameters``, the loss, score or optimizer is
            none, the loss does not call the model, that of the host is not finite or that of every structure becomes
            so, or FLOPs are limited and torch cannot count them.
        SlotError: a submodule with a slot was replaced.
    """
    # The host must be frozen, and nothing may grow on it yet.
    require_attached(model)
    if not model.frozen.holds_all(model.host):
        raise ConfigError("the host would learn, too: attach with freeze_host=True")
    if model.seeds:
        raise ConfigError(
            f"slot {next(iter(model.seeds))!r} is taken: take off what has grown by model.swap(None), which returns it"
        )

    # Read the data once; each trial and the last training need enough batches.
    training = model.training
    with repeatable(seed):
        batches, source_batches = list(target), [] if source is None else list(source)
    if len(batches) < folds:
        raise ConfigError(f"target has {len(batches)} batches for {folds} folds: give smaller batches, or more data")
    if source is None and tolerance is not None:
        raise ConfigError("tolerance is about source, and there is none: give it, or leave tolerance out")
    if source is not None and len(source_batches) < 2:
        raise ConfigError(
            f"source has {len(source_batches)} batches, and one is learned while another tells what is forgotten: give "
            "smaller ones or more data, or leave it out"
        )

    spending = Spending(model, training_flops, seconds=seconds)
    try:
        allowed = TOLERANCE if tolerance is None else tolerance
        trainer = Trainer(model, Recipe(loss, score, optimizer, epochs, source_batches, allowed, seed))
        search = Search(trainer, batches, folds, spending, parameters, verbose=verbose)
        kept, retention, diverged = None, Retention(1.0, 0.0), list[Trial]()
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
            model.swap(None)
            raise
        if kept is None:
            model.swap(None)
        for name in model.seeds:
            model.slots[name].fossilize()
        return Adaptation(
            trials=tuple(sorted(search.trials, key=lambda one: one.found.rank, reverse=True)),
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
    """Tries structures one after the other."""

    def __init__(
        self,
        trainer: Trainer,
        batches: Sequence[Any],
        folds: int,
        spending: Spending,
        most: int | None,
        *,
        verbose: bool,
    ) -> None:
        self._trainer, self._model, self._spending, self._most = trainer, trainer.model, spending, most
        self._folds = [batches[fold::folds] for fold in range(folds)]
        self._verbose = verbose
        self.before = Figures.merge([trainer.measure_host(fold) for fold in self._folds])
        """The host on the new data."""
        self.trials: list[Trial] = []
        """Trials in the order in which they were made."""
        self.untried = 0
        """Structures that the budget left out."""
        self._price = 0.0
        """Share of the budget that a trial took, for each of its FLOPs; the highest."""

    @property
    def better(self) -> list[Trial]:
        """What did better than the host, the best first; of equals the smaller one."""
        better = [one for one in self.trials if one.found.rank > self.before.rank]
        return sorted(better, key=lambda one: (one.found.rank, -one.parameters), reverse=True)

    @property
    def best(self) -> Trial | None:
        """What did better than the host and all others."""
        return next(iter(self.better), None)

    def run(self) -> None:
        """Try single seeds, then sets of them.

        Raises:
            ConfigError: no slot is enabled, no single seed is small enough, or every training diverges.
        """
        if not any(slot.enabled for slot in self._model.slots.values()):
            raise ConfigError("all slots are disabled: enable one of them by model.slots[name].enabled = True")
        singles = self._list_singles()
        if not singles:
            raise ConfigError(
                f"parameters: no blueprint on offer adds as few as {self._most:,}: allow more, or offer others"
            )
        self._try_all(singles)
        if not any(math.isfinite(one.found.score) for one in self.trials):
            left = f", which are all but {self.untried} that the budget left out," if self.untried else ""
            raise ConfigError(f"the loss of all {len(self.trials)} structures that were tried{left} diverges {_SLOWER}")
        self._try_all(self._list_kinds())
        self._try_all(self._list_unions())
        if self.best is not None:
            worth = {slot: self.best.structure[slot] for slot, earned in self.best.earned.items() if earned > 0}
            self._try_all([worth])

    def _affords(self, structure: Structure) -> bool:
        """Whether it and the last training are likely to fit into the budget; the first one always does."""
        if not self.trials:
            return True
        own = self._count_flops(structure)
        last = own if self.best is None else max(own, self._count_flops(self.best.structure))
        return self._spending.compute_share() + self._price * (own + last) <= 1

    def _count_flops(self, structure: Structure) -> float:
        """Of a trial, for each example. A frozen host is differentiated by its features alone."""
        slots, host = self._model.slots, float(self._model.host_flops or 0)
        grown = sum(get(name).flops_at(slots[slot].site) for slot, name in structure.items())
        trained = self._trainer.recipe.epochs * (len(self._folds) - 1)
        return trained * (2 * host + 3 * grown) + (1 + len(structure)) * (host + grown)

    def _list_singles(self) -> list[Structure]:
        offers = [{slot.name: name} for slot in self._model.slots.values() if slot.enabled for name in slot.blueprints]
        fit = [one for one in offers if self._fits(one)]
        return sorted(fit, key=self._count_parameters, reverse=True)

    def _list_kinds(self) -> Iterator[Structure]:
        """Every blueprint in all of its slots."""
        for name in dict.fromkeys(name for one in self._list_singles() for name in one.values()):
            yield {slot.name: name for slot in self._model.slots.values() if slot.enabled and name in slot.blueprints}

    def _list_unions(self) -> Iterator[Structure]:
        """The best seeds of different slots together: 2, 4, 8, ..., and all."""
        singles = [one for one in self.trials if len(one.structure) == 1]
        ranked: dict[str, str] = {}
        for one in sorted(singles, key=lambda one: one.found.rank, reverse=True):
            for slot, name in one.structure.items():
                ranked.setdefault(slot, name)
        count = 1
        while count < len(ranked):
            count = min(2 * count, len(ranked))
            chosen = set(list(ranked)[:count])
            yield {slot: ranked[slot] for slot in self._model.slots if slot in chosen}

    def _try_all(self, structures: Iterable[Structure]) -> None:
        """Those that are new, and neither too large nor too dear."""
        for structure in structures:
            if not structure or any(one.structure == structure for one in self.trials) or not self._fits(structure):
                continue
            if self._affords(structure):
                self._try(structure)
            else:
                self.untried += 1

    def _try(self, structure: Structure) -> None:
        began = self._spending.compute_share()
        try:
            trial = self._cross_validate(structure)
        except DivergedError:
            figures = Figures(-math.inf, math.inf, self.before.examples)
            unknown = dict.fromkeys(structure, 0.0)
            trial = Trial(structure, figures, Retention(0.0, 0.0), unknown, self._count_parameters(structure))
        flops = self._count_flops(structure)
        self._price = max(self._price, (self._spending.compute_share() - began) / flops if flops else 0.0)
        self.trials.append(trial)
        if self._verbose:
            sys.stdout.write(f"{trial}: score {trial.found.score:.4g}, loss {trial.found.loss:.4g}\n")
            sys.stdout.flush()

    def _cross_validate(self, structure: Structure) -> Trial:
        trainer = self._trainer
        parts: list[Figures] = []
        retained: list[Retention] = []
        without: dict[str, list[Figures]] = {slot: [] for slot in structure}
        for fold, held_out in enumerate(self._folds):
            others = [batch for at, part in enumerate(self._folds) if at != fold for batch in part]
            retained.append(trainer.fit(structure, others, fold))
            parts.append(trainer.measure(held_out))
            for slot, figures in without.items():
                figures.append(trainer.measure_without(slot, held_out))
        whole = Figures.merge(parts)
        earned = {slot: whole.score - Figures.merge(figures).score for slot, figures in without.items()}
        retention = Retention(*map(fmean, zip(*retained, strict=True)))
        return Trial(structure, whole, retention, earned, self._count_parameters(structure))

    def _fits(self, structure: Structure) -> bool:
        return self._most is None or self._count_parameters(structure) <= self._most

    def _count_parameters(self, structure: Structure) -> int:
        slots = self._model.slots
        return sum(get(name).parameters_at(slots[slot].site) for slot, name in structure.items())
