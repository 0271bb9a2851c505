"""A race of candidates for growth: each trains for a while in a branch of its own, and the model becomes the winner."""

from __future__ import annotations

import functools
import gc
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

import torch
from pydantic import PlainValidator

from esper.config.arguments import Flops, NonNegativeInt, check_arguments
from esper.errors import ConfigError, DivergedError
from esper.grower.branch import Branch, branch
from esper.grower.distributed import Processes
from esper.grower.measuring import Evaluate
from esper.grower.scores import LOSS, check_figures
from esper.grower.spending import Spending
from esper.growth.model import GROWING, OPTIMIZER, GrowingModel

Candidate: TypeAlias = Mapping[str, str]
"""What is to grow: names of blueprints by those of slots; nothing, where it is empty."""


@dataclass(frozen=True)
class Race:
    """What `race` returns."""

    winner: int
    """Index of the candidate that the model has become."""
    losses: tuple[float, ...]
    """Of all candidates at their end, as ``evaluate`` gave them; not finite where training blew up."""


def _read_candidates(value: Any) -> tuple[dict[str, str], ...]:
    try:
        candidates = tuple(dict(one) for one in value)
    except TypeError as error:
        raise ValueError("no mappings") from error
    if not candidates or not all(isinstance(part, str) for one in candidates for pair in one.items() for part in pair):
        raise ValueError("no names")
    return candidates


@check_arguments(
    ConfigError,
    model=GROWING,
    optimizer=OPTIMIZER,
    candidates="give a list of mappings from slots to blueprints, such as [{}, {'0': 'mlp'}]",
    learn="give a function of a model, its optimizer and the number of the step",
    evaluate="give a function of a model that returns its validation loss",
    seed="give a whole number from 0 on",
    counted_in="give an esper.Spending",
)
def race(
    model: GrowingModel,
    optimizer: torch.optim.Optimizer,
    candidates: Annotated[Sequence[Candidate], PlainValidator(_read_candidates)],
    learn: Callable[[GrowingModel, torch.optim.Optimizer, int], object],
    evaluate: Evaluate,
    *,
    training_flops: Flops,
    seed: NonNegativeInt = 0,
    counted_in: Spending | None = None,
) -> Race:
    """Let candidates grow side by side from the model as it is now, and go on as the one whose loss is the least.

    A loss right after growth misleads, one a little later predicts (Yuan et al. 2024, arXiv 2406.02469): so each
    candidate trains for the same FLOPs first, in an `esper.branch`, whose moments and learning rates are the
    optimizer's. Then model and optimizer take over what the winner learned, so that its training is not lost.

    ```python
    def learn(model, optimizer, step):
        inputs, labels = minibatch(np.random.default_rng(step))  # of the step alone: the same for all candidates
        loss = F.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


    candidates = [{}, {"blocks.0": "block_copy"}, {"blocks.3": "block_copy"}]
    won = esper.race(model, optimizer, candidates, learn, validate, training_flops=2e10)
    print(candidates[won.winner], won.losses)
    ```

    Seeds are planted at full weight, by hand: race before a grower is made, which wants them fossilized, and not while
    one decides. Candidates run one after the other; beside the model there are the best one so far and the present one.
    Random numbers of torch's global generators are the same for each, and are not used up. What a branch changes
    outside of parameters and buffers is not taken over. In several processes call it in all of them, with a ``learn``
    that averages the gradients; the first one evaluates.

    Args:
        model: That grows, as `esper.attach` returned it; without seeds in the slots that the candidates name.
        optimizer: That trains it.
        candidates: At least one; an empty one trains on as it is. Of equal losses the first wins.
        learn: Makes one step of training of the model and the optimizer that it is given, which are a branch's, and is
            told how many that has made. It begins in the modes, training or evaluation, that the model has. A
            scheduler of the model's goes on after the race; a `GradScaler` should be a fresh one for each candidate.
        evaluate: As for `esper.Grower`, of a single set; its loss is what counts.
        training_flops: What each candidate may take for training, as `esper.Spending` counts.
        seed: The values of fresh seeds follow from it.
        counted_in: Where the FLOPs of all candidates are counted, evaluation included; None: nowhere.

    Raises:
        ConfigError: an argument is of another kind; torch cannot count FLOPs; ``evaluate`` returns no loss; or
            ``learn`` does not call the model that it is given.
        SlotError: a candidate cannot be planted; a submodule with a slot was replaced, or the optimizer was not made of
            the model's groups.
        UnknownBlueprintError: nobody registered a name.
        DivergedError: no candidate has a loss that is finite. The model is then as it was, as with the other errors.
    """
    for candidate in candidates:
        for slot, blueprint in candidate.items():
            model.slots[slot].require_open_to(blueprint)
    processes, losses = Processes(), list[float]()
    best: tuple[int, Branch] | None = None
    try:
        for candidate in candidates:
            rung = branch(model, optimizer, training_flops=training_flops, counted_in=counted_in)
            with torch.random.fork_rng():
                _plant(rung.model, candidate, seed)
                _train(rung, learn, processes)
                losses.append(processes.agree(functools.partial(_measure, rung.model, evaluate)))
            if math.isfinite(losses[-1]) and (best is None or losses[-1] < losses[best[0]]):
                best = len(losses) - 1, rung
            del rung
            gc.collect()  # a model and its slots know each other, so that it would stay for long
    finally:
        processes.close()
    if best is None:
        raise DivergedError("none of the candidates has a loss that is finite: race earlier, or at a lower rate")
    winner, rung = best
    _become(model, optimizer, rung, candidates[winner])
    return Race(winner, tuple(losses))


def _plant(model: GrowingModel, candidate: Candidate, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for slot, blueprint in candidate.items():
        model.slots[slot].germinate(blueprint, generator, alpha=1.0)


def _train(rung: Branch, learn: Callable[[GrowingModel, torch.optim.Optimizer, int], object], to: Processes) -> None:
    step = 0
    while to.agree(lambda: rung.spending.share < 1):
        before = rung.spending.flops
        learn(rung.model, rung.optimizer, step)
        if rung.spending.flops == before:
            raise ConfigError("learn did not call the model that it was given, which is a branch: train that one")
        step += 1


def _measure(model: GrowingModel, evaluate: Evaluate) -> float:
    return check_figures(evaluate(model))[LOSS]


@torch.no_grad()
def _become(model: GrowingModel, optimizer: torch.optim.Optimizer, rung: Branch, candidate: Candidate) -> None:
    """Let model and optimizer be what the branch has become; its seeds are the model's from now on."""
    for slot in candidate:
        seed = rung.model.slots[slot].seed
        assert seed is not None
        model.slots[slot].plant(seed)
    state = rung.model.state_dict()
    for name, buffer in rung.model.named_buffers():  # those that are in no state dict, too, and those that grow
        owner, _, last = name.rpartition(".")
        holder = model.get_submodule(owner)
        known = dict(holder.named_buffers(recurse=False)).get(last)
        if known is not None and known.shape == buffer.shape:
            known.copy_(buffer)
        else:
            holder.register_buffer(last, buffer.clone(), persistent=name in state)
    model.load_state_dict(state)
    optimizer.load_state_dict(rung.optimizer.state_dict())
