"""`esper.ladder`: train models of several sizes in one training, with a function that makes one step."""

import inspect
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from esper.config.arguments import (
    Batches,
    FilePath,
    Flops,
    NonNegativeFloat,
    PositiveInt,
    check_arguments,
    describe_value,
)
from esper.dash.formats import duration
from esper.errors import ConfigError
from esper.files import print_line
from esper.growth.inputs import Arguments, PlainModule, find_input_place, first_tensor
from esper.growth.links import unwrap_optimizer
from esper.ladders.plan import ADVICE as PLAN_ADVICE
from esper.ladders.plan import DECAY, SHARE, LadderPlan, Sizes, make_plan, require_plain
from esper.ladders.rungs import Ladder, RungFolder
from esper.ladders.training import BRANCHES, Evaluate, LadderTraining
from esper.numerics.modules import copy_with, global_generators, keep_generators
from esper.serialization import Checkpoint, Checkpoints

TrainStep = Callable[..., Any]
"""``train_step(model, optimizer, batch)`` makes one optimizer step."""
LEARNING_RATE = 1e-3
CHECKPOINTS = "checkpoints"
"""Subfolder with the newest checkpoints."""
CHECKPOINT_SECONDS = 60.0
WRITING_SHARE = 0.05
"""Largest fraction of the time that writing checkpoints may take; if need be, they are less frequent."""
SECONDS_BETWEEN_LINES = 15.0
"""Least time between two lines that say how much is done."""
_RANDOM, _EPOCH = "random.", "epoch."

ADVICE = {
    **PLAN_ADVICE,
    "train_step": "give a function train_step(model, optimizer, batch) that makes one optimizer step",
    "optimizer": "give a torch.optim optimizer for the model's parameters",
    "evaluate": "give a function evaluate(model) that returns the loss",
    "data": "give batches that can be iterated more than once, such as a DataLoader or a list",
}


@check_arguments(ConfigError, **ADVICE)
def ladder(
    model: PlainModule,
    train_step: TrainStep,
    *,
    steps: PositiveInt,
    folder: FilePath,
    depths: Sizes | None = None,
    parameters: Sizes | None = None,
    flops: Sequence[Flops] | None = None,
    data: Batches | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    evaluate: Evaluate | None = None,
    example_input: Arguments | None = None,
    blocks: Sequence[str] | None = None,
    share: NonNegativeFloat = SHARE,
    decay: NonNegativeFloat = DECAY,
    rates: Sequence[NonNegativeFloat] | None = None,
) -> Ladder:
    """Train models of several sizes in one growing training; returns them with their losses and costs.

    ```python
    def train_step(model, optimizer, batch):
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


    gpt2 = GPT2LMHeadModel(GPT2Config(n_layer=1))
    made = esper.ladder(gpt2, train_step, depths=[1, 2, 4, 8], steps=5000, data=loader, folder="sizes")
    AutoModelForCausalLM.from_pretrained(made.rungs[2].path)  # four blocks
    ```

    The model first trains at the first size. A branch of it, trained with decaying learning rates, is the first rung.
    The model itself continues from the branch point: each block is copied, with its values and its optimizer state; the
    model trains for a share of the steps; the next branch decays; and so on. The given model ends as the largest rung.

    The plan is printed before training (`esper.ladders.ladder.plan_ladder` only makes the plan). A script that was
    killed continues from the folder's checkpoint, usually at most a minute old, when it is run again.

    Args:
        model: The first size: any module with an `nn.ModuleList` or `nn.Sequential` of blocks that run in turn, such as
            GPT-2, Llama, ViT, or the stages of a ResNet. It must not have slots.
        train_step: ``train_step(model, optimizer, batch)`` makes one optimizer step without changing learning rates.
            Without ``data``, its third argument, if it takes one, is the number of the step, from 0.
        steps: Optimizer steps to train one size alone, as for the first rung.
        folder: Folder for the rungs (a folder each), the table ``ladder.json``, and checkpoints.
        depths: Sizes as numbers of blocks, starting with the model's. Give one of ``depths``, ``parameters`` and
            ``flops``.
        parameters: Sizes as numbers of parameters; the nearest possible sizes are used.
        flops: Sizes as FLOPs of a forward pass of one example; the nearest possible sizes are used.
        data: Batches for ``train_step``, repeated when they end.
        optimizer: Has the maximum learning rates; copies join the groups of their originals. None: AdamW at 0.001.
        evaluate: ``evaluate(model)`` returns the loss of a finished rung; called in evaluation mode without gradients.
        example_input: Arguments of the model, of the size of a step's batch. None: found by a step on a copy.
        blocks: Names of the lists of blocks to copy; None: those that run in turn.
        share: Fraction of ``steps`` for which the model trains at each size after the first, before the rung branches.
        decay: Fraction of ``steps`` during which a rung's learning rates fall to zero.
        rates: Factors of the learning rates, by size; None: 1 for all.

    Raises:
        ConfigError: sizes are given in no or several ways, do not increase, or cannot be reached with this model's
            blocks; the blocks are ambiguous, or copies of them would not run; ``train_step`` does not call the model,
            takes other arguments, or changes learning rates; or several processes train it.
        SlotError: a block cannot be copied, or the model's configuration cannot count it.
        DivergedError: parameters are not finite when a rung branches or ends, or at a checkpoint.
        CheckpointError: the folder contains another ladder or one trained with another optimizer, or it is damaged.
        RunError: the folder cannot be written.
    """
    if optimizer is None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    example, passes = _find_example(model, train_step, data, optimizer, example_input)
    plan = make_plan(
        model,
        example,
        passes,
        steps=steps,
        depths=depths,
        parameters=parameters,
        flops=flops,
        blocks=blocks,
        share=share,
        decay=decay,
        rates=rates,
    )
    training = LadderTraining(model, plan, example, Path(folder), evaluate)
    training.link(optimizer)
    training.start()

    # Continue from the folder's newest checkpoint, if there is one.
    model.train()
    batches = _Batches(model, data)
    checkpoints = Checkpoints(Path(folder) / CHECKPOINTS, keep=2)
    if checkpoints.iterations():
        newest = checkpoints.latest()
        training.require_optimizer(newest)
        training.grow_to(plan.find_phase(newest.iteration).rung)
        training.restore_state(newest)
        training.resume_at(newest.iteration)
        training.spent.flops = newest.state["flops"]
        batches.restore_state(newest)
        print_line(f"resuming after step {training.step:,} of {plan.total_steps:,}, from {newest.path}")
    else:
        shutil.rmtree(Path(folder) / BRANCHES, ignore_errors=True)

    # Train; checkpoints are written at every change of size, and about once a minute.
    takes = _count_arguments(train_step, data)
    start = printed = time.monotonic()
    due, printed_step = start + CHECKPOINT_SECONDS, training.step
    with training.spent.counting():
        while not training.finished:
            training.begin_step()
            third = training.step if data is None else batches.take()
            train_step(*(model, optimizer, third)[:takes])
            training.require_rates()
            grown = training.end_step()
            now = time.monotonic()
            if now - printed > SECONDS_BETWEEN_LINES:
                left = (plan.total_steps - training.step) * (now - printed) / (training.step - printed_step)
                print_line(
                    f"{training.describe_phase()}: {training.step:,} of {plan.total_steps:,} done, "
                    f"{duration(now - start)} elapsed, about {duration(left)} left"
                )
                printed, printed_step = now, training.step
            if grown or training.finished or now > due:
                training.require_finite()
                (tensors, state), (more, counts) = training.take_state(), batches.take_state()
                checkpoints.save(training.step, {**tensors, **more}, {**state, **counts})
                saved = time.monotonic()
                due = saved + max(CHECKPOINT_SECONDS, (saved - now) / WRITING_SHARE)
    print_line(str(training.result))
    return training.result


@check_arguments(ConfigError, **ADVICE)
def plan_ladder(
    model: PlainModule,
    train_step: TrainStep | None = None,
    *,
    steps: PositiveInt,
    folder: FilePath | None = None,
    depths: Sizes | None = None,
    parameters: Sizes | None = None,
    flops: Sequence[Flops] | None = None,
    data: Batches | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    example_input: Arguments | None = None,
    blocks: Sequence[str] | None = None,
    share: NonNegativeFloat = SHARE,
    decay: NonNegativeFloat = DECAY,
    rates: Sequence[NonNegativeFloat] | None = None,
) -> LadderPlan:
    """The plan of `esper.ladder` for these arguments, without training. It prints as a report.

    A copy of the model grows to every size, so errors already appear here, as `esper.ladder` raises them.

    ```python
    print(plan_ladder(gpt2, example_input={"input_ids": tokens}, depths=[1, 2, 4, 8], steps=5000))
    ```

    Args:
        model: As in `esper.ladder`, like all arguments that are not named here.
        train_step: Not needed with ``example_input``, which then has the size of a step's batch.
        folder: Folder of a ladder to continue, which must have the same plan.
    """
    if optimizer is None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    example, passes = _find_example(model, train_step, data, optimizer, example_input)
    plan = make_plan(
        model,
        example,
        passes,
        steps=steps,
        depths=depths,
        parameters=parameters,
        flops=flops,
        blocks=blocks,
        share=share,
        decay=decay,
        rates=rates,
    )
    if folder is not None:
        RungFolder(Path(folder), plan)
    return plan


def _count_arguments(train_step: TrainStep, data: Any) -> int:
    """Arguments of the user's function: model, optimizer, and batch or the number of the step."""
    try:
        signature = inspect.signature(train_step)
    except (TypeError, ValueError):
        return 3
    for count in (3, 2) if data is None else (3,):
        try:
            signature.bind(*[None] * count)
        except TypeError:
            continue
        return count
    forms = "train_step(model, optimizer, batch)" if data is not None else "train_step(model, optimizer[, step])"
    raise ConfigError(f"train_step{signature} cannot be called as {forms}: change its arguments")


def _find_example(
    model: nn.Module, train_step: TrainStep | None, data: Any, optimizer: torch.optim.Optimizer, given: Arguments | None
) -> tuple[Arguments, float]:
    """Example arguments of the model, and the number of passes of that size in a step."""
    require_plain(model)
    if isinstance(data, Iterator):
        raise ConfigError(
            f"data is {describe_value(cast('object', data))}, which cannot be repeated: give a DataLoader or a list; "
            "for an endless stream, omit data and make the batch in train_step(model, optimizer, step)"
        )
    if train_step is None and given is None:
        raise ConfigError(
            "give example_input, such as {'input_ids': tokens}, or the train_step function that calls the model"
        )
    if train_step is None or given is not None:
        assert given is not None
        return given, 1.0

    # One step on a copy shows how the model is called.
    takes = _count_arguments(train_step, data)
    with keep_generators(model, _list_generators(data)):
        other, other_optimizer = copy_with(model, (model, unwrap_optimizer(optimizer)), ConfigError)
        calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

        def record(_: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            if torch.is_grad_enabled():
                calls.append((arguments, dict(keywords)))

        other.register_forward_pre_hook(record, with_kwargs=True)
        other.train()
        batch = 0 if data is None else next(iter(data), None)
        train_step(*(other, other_optimizer, batch)[:takes])
    if not calls:
        raise ConfigError(
            "train_step(model, optimizer, batch) does not call the whole model: compute the loss from model(...)"
        )
    examples = [_bind(other, arguments, keywords) for arguments, keywords in calls]
    sizes = [first_tensor(example).numel() for example in examples]
    return examples[0], sum(sizes) / sizes[0]


def _bind(model: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Arguments:
    """The arguments of a call, detached from graphs: only positional ones, or all by keyword."""
    plain = [value.detach() if isinstance(value, Tensor) else value for value in arguments]
    named = {name: value.detach() if isinstance(value, Tensor) else value for name, value in keywords.items()}
    example: Arguments = tuple(plain)
    if named:
        parameters = list(inspect.signature(model.forward).parameters.values())[: len(plain)]
        if any(parameter.kind is not parameter.POSITIONAL_OR_KEYWORD for parameter in parameters):
            raise ConfigError(
                "train_step calls the model with positional and keyword arguments, but "
                f"{type(model).__name__}.forward does not name the positional ones: give example_input"
            )
        names = [parameter.name for parameter in parameters]
        example = {**dict(zip(names, plain, strict=True)), **named}
    find_input_place(example)
    return example


def _list_generators(data: Any) -> list[torch.Generator]:
    if not isinstance(data, DataLoader):
        return []
    holders: list[Any] = [data, data.sampler]
    if isinstance(data.batch_sampler, BatchSampler):
        holders.append(data.batch_sampler.sampler)
    found: list[Any] = [
        holder.generator
        for holder in holders
        if isinstance(holder, DataLoader | RandomSampler | SubsetRandomSampler | WeightedRandomSampler)
    ]
    return list(dict.fromkeys(generator for generator in found if isinstance(generator, torch.Generator)))


class _Batches:
    """Batches of data, epoch after epoch.

    To resume within an epoch, it is repeated with the former state of all random generators.
    """

    def __init__(self, model: nn.Module, data: Any) -> None:
        self._data, self._generators = data, [*global_generators(model), *_list_generators(data)]
        self._batches: Iterator[Any] | None = None
        self._beginning: list[Tensor] = []
        self._taken = 0

    def take(self) -> Any:
        nothing = object()
        for _ in range(2):
            if self._batches is None:
                self._beginning, self._taken = [generator.get_state() for generator in self._generators], 0
                self._batches = iter(self._data)
            batch = next(self._batches, nothing)
            if batch is not nothing:
                self._taken += 1
                return batch
            self._batches = None
        raise ConfigError("data has no batch: give a DataLoader or a list with at least one")

    def take_state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The state as tensors and JSON values."""
        states = {f"{_RANDOM}{index}": generator.get_state() for index, generator in enumerate(self._generators)}
        states |= {f"{_EPOCH}{index}": state for index, state in enumerate(self._beginning)}
        return states, {"taken": self._taken if self._batches is not None else 0}

    def restore_state(self, checkpoint: Checkpoint) -> None:
        """Continue after the batches that were taken."""
        taken = checkpoint.state.get("taken", 0)
        if taken:
            self._set_generators(checkpoint, _EPOCH)
            for _ in range(taken):
                self.take()
        self._set_generators(checkpoint, _RANDOM)

    def _set_generators(self, checkpoint: Checkpoint, prefix: str) -> None:
        for index, generator in enumerate(self._generators):
            if f"{prefix}{index}" in checkpoint.tensors:
                generator.set_state(checkpoint.tensors[f"{prefix}{index}"])
