"""`esper.adapt`: try what may grow on a frozen host, keep what does best on new data, undo the rest."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from esper.adaptation.report import Adaptation, Trial
from esper.adaptation.trainer import Figures, Loss, MakeOptimizer, Measure, Recipe, Retention, Structure, Trainer
from esper.arguments import amount, callable_, check_arguments, instance, optional, positive, truth, whole
from esper.errors import ConfigError
from esper.grower.spending import Spending
from esper.growth.blueprints.registry import get
from esper.growth.hooks import require_attached
from esper.growth.model import GROWING, GrowingModel

LEARNING_RATE = 0.01
BATCHES = instance(
    Iterable,
    but=(str, bytes, Mapping, Tensor, nn.Module),
    advice="give batches as loss(model, batch) takes them, such as a DataLoader or a list",
)


def make_adam(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Adam, without anything."""
    return torch.optim.Adam(groups, lr=LEARNING_RATE)


@check_arguments(
    ConfigError,
    model=GROWING,
    loss=callable_("give a function loss(model, batch) that returns the mean loss of a batch"),
    target=BATCHES,
    score=optional(callable_("give a function score(model, batch) that returns a number, the higher the better")),
    source=optional(BATCHES),
    tolerance=amount("give the share by which the loss on source may rise, such as 0.01"),
    optimizer=callable_(
        "give a function of parameter groups, such as lambda groups: torch.optim.Adam(groups, lr=1e-3)"
    ),
    epochs=whole(1, "give a whole number from 1 on"),
    folds=whole(2, "give a whole number from 2 on"),
    parameters=optional(whole(1, "give a whole number from 1 on")),
    training_flops=optional(positive("give a number of FLOPs above 0")),
    seconds=optional(positive("give a number of seconds above 0")),
    seed=whole(0, "give a whole number from 0 on"),
    verbose=truth(),
)
def adapt(
    model: GrowingModel,
    loss: Loss,
    target: Iterable[Any],
    *,
    score: Measure | None = None,
    source: Iterable[Any] | None = None,
    tolerance: float = 0.01,
    optimizer: MakeOptimizer = make_adam,
    epochs: int = 30,
    folds: int = 2,
    parameters: int | None = None,
    training_flops: float | None = None,
    seconds: float | None = None,
    seed: int = 0,
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
    off again, and ``model.without_growth()`` gives the host's own answers, to the bit.

    With ``source`` each batch of new data is learned together with one of ``source``, and then what grew is given the
    greatest weight, in tenths, at which the loss on ``source`` has not risen by more than ``tolerance`` (as weights are
    interpolated by Wortsman et al. 2022, arXiv 2109.01903). Structures are compared at that weight.

    Args:
        model: From `esper.attach` with ``freeze_host=True``, all slots free.
        loss: ``loss(model, batch)``, the mean loss of a batch: a tensor with one number.
        target: Batches of new data, at least as many as there are ``folds``; they are read once and kept in memory.
        score: ``score(model, batch)``, what matters, such as the accuracy on a batch, the higher the better; None: the
            loss below zero.
        source: Batches of data that must not be forgotten, likewise.
        tolerance: By which share the loss on ``source`` may rise.
        optimizer: Makes an optimizer of parameter groups; Adam with a rate of 0.01, if nothing else is said. The weight
            of what grows rises evenly from zero in the first sixth of the steps.
        epochs: Over the new data, in every trial and in the end.
        folds: Parts of the new data. A trial takes ``folds - 1`` times what one training on all of it does.
        parameters: That may be added; structures with more are not tried.
        training_flops: For everything that is tried and measured, as `esper.grower.spending` counts. At least one
            structure is tried and trained; further ones, as long as another trial and the last training fit in.
        seconds: Likewise.
        seed: All that is random follows from it: first values, orders, dropout.
        verbose: Print a line per trial.

    Raises:
        ConfigError: an argument is of another kind, the host is not frozen, something grows already, there are fewer
            batches than folds, nothing may grow within ``parameters``, the loss or score is none or not finite, or
            FLOPs are limited and torch cannot count them.
        SlotError: a submodule with a slot was replaced.
    """
    _require_ready(model)
    batches, kept = list(target), [] if source is None else list(source)
    if len(batches) < folds:
        raise ConfigError(f"target has {len(batches)} batches for {folds} folds: give smaller batches, or more data")
    if source is not None and not kept:
        raise ConfigError("source has no batches: leave it out, or give data that must not be forgotten")
    spending = Spending(model, training_flops, seconds)
    try:
        trainer = Trainer(model, Recipe(loss, score, optimizer, epochs, kept, tolerance, seed))
        search = Search(trainer, batches, folds, spending, parameters, verbose=verbose)
        try:
            search.run()
            best = search.best
            model.swap(None)
            retention = Retention(1.0, 0.0) if best is None else trainer.fit(best.structure, batches, folds)
        except BaseException:
            model.swap(None)
            raise
        for name in model.seeds:
            model.slots[name].fossilize()
        flops = None if model.host_flops is None or model.compilations.compiled else spending.flops
        ranked = tuple(sorted(search.trials, key=lambda one: one.found.rank, reverse=True))
        told = (best, retention, trainer.source_loss, flops, spending.seconds)
        return Adaptation(ranked, search.untried, search.before, *told)
    finally:
        model.tap.clock = None


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
        self.before = trainer.measure(batches)
        """The host on the new data."""
        self.trials: list[Trial] = []
        """In the order in which they were made."""
        self.untried = 0
        """Single seeds that the budget left out."""
        self._dearest = 0.0
        """Share of the budget that a trial took."""

    @property
    def best(self) -> Trial | None:
        """What did better than the host and all others; of equals the smaller one."""
        found = max(self.trials, key=lambda one: (one.found.rank, -one.parameters))
        return found if found.found.rank > self.before.rank else None

    def run(self) -> None:
        """Try single seeds, then sets of them.

        Raises:
            ConfigError: no single seed is small enough.
        """
        singles = self._list_singles()
        if not singles:
            raise ConfigError(
                f"parameters: no blueprint on offer adds as few as {self._most:,}: allow more, or offer others"
            )
        for number, single in enumerate(singles):
            if self._spent:
                self.untried = len(singles) - number
                return
            self._try(single)
        self._try_all(self._list_kinds())
        self._try_all(self._list_unions())
        if self.best is not None:
            worth = {slot: self.best.structure[slot] for slot, earned in self.best.earned.items() if earned > 0}
            self._try_all([worth])

    @property
    def _spent(self) -> bool:
        """Whether another trial and the last training might not fit into the budget."""
        return bool(self.trials) and self._spending.share + 2 * self._dearest > 1

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
            known = any(one.structure == structure for one in self.trials)
            if structure and not known and self._fits(structure) and not self._spent:
                self._try(structure)

    def _try(self, structure: Structure) -> None:
        began, trainer = self._spending.share, self._trainer
        found: list[Figures] = []
        retained: list[Retention] = []
        earned = dict.fromkeys(structure, 0.0)
        for fold, held_out in enumerate(self._folds):
            others = [batch for at, part in enumerate(self._folds) if at != fold for batch in part]
            retained.append(trainer.fit(structure, others, fold))
            found.append(trainer.measure(held_out))
            for slot in structure:
                lost = found[-1].score - trainer.measure_without(slot, held_out).score
                earned[slot] += lost / len(self._folds)
        self._dearest = max(self._dearest, self._spending.share - began)
        means = Figures(*map(fmean, zip(*found, strict=True))), Retention(*map(fmean, zip(*retained, strict=True)))
        trial = Trial(structure, *means, earned, self._count_parameters(structure))
        self.trials.append(trial)
        if self._verbose:
            sys.stdout.write(f"{trial}: score {trial.found.score:.4g}, loss {trial.found.loss:.4g}\n")
            sys.stdout.flush()

    def _fits(self, structure: Structure) -> bool:
        return self._most is None or self._count_parameters(structure) <= self._most

    def _count_parameters(self, structure: Structure) -> int:
        slots = self._model.slots
        return sum(get(name).parameters_at(slots[slot].site) for slot, name in structure.items())


def _require_ready(model: GrowingModel) -> None:
    """Raise ConfigError unless the host is frozen and nothing grows."""
    require_attached(model)
    if not model.frozen.holds_all(model.host):
        raise ConfigError("the host would learn, too: attach with freeze_host=True")
    if model.seeds:
        raise ConfigError(
            f"slot {next(iter(model.seeds))!r} is taken: take off what has grown by model.swap(None), which returns it"
        )
