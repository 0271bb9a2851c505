"""The engine of a ladder: where its training stands, and what happens between two steps.

Whoever trains calls `LadderTraining.begin_step` before each optimizer step and `end_step` after it: the loop of
`esper.ladder`, or a callback of another library's trainer. Everything happens to one model and one optimizer: a branch
is the model itself, which is put back to where the rung branched off once the rung is saved. What is to be done follows
from the number of steps done so far.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from esper.config.arguments import describe_value, read_number
from esper.dash.output import print_line
from esper.errors import CheckpointError, ConfigError, DivergedError, plural
from esper.growth.followers import unwrap_optimizer
from esper.growth.probe import Arguments
from esper.ladders.flops import TrainingFlops, count_forward
from esper.ladders.plan import LadderPlan
from esper.ladders.rungs import Ladder, Rung, RungFolder, measure_latency
from esper.ladders.towers import deepen_in_place, grow_towers, read_depths
from esper.numerics.module_state import keep_generators, keep_modes
from esper.serialization.checkpoints import Checkpoint, Checkpoints

BRANCHES = "branches"
"""Subfolder with the model as it was where rungs branched off."""
INITIAL_RATE = "initial_lr"
"""Key of the learning rate of a parameter group before any schedule; torch's schedulers use the same."""
_MODEL, _OPTIMIZER = "model.", "optimizer."

Evaluate = Callable[[nn.Module], Any]


class LadderTraining:
    """One model that climbs a ladder in place.

    Args:
        model: The first rung.
        plan: The ladder's, made for this model.
        example: Arguments of the model.
        folder: Where rungs are saved; what it holds of the same ladder is kept.
        evaluate: ``evaluate(model)``, the loss of a rung; called in evaluation mode, without gradients. None: no loss.
        keep: How many branching points stay on disk.

    Raises:
        CheckpointError: the folder holds another ladder.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: LadderPlan,
        example: Arguments,
        folder: Path,
        evaluate: Evaluate | None = None,
        *,
        keep: int = 1,
    ) -> None:
        self.model, self.plan, self.step = model, plan, 0
        self.folder = RungFolder(folder, plan)
        self._example, self._evaluate, self._console = example, evaluate, Console()
        self._rung, self._towers = 0, plan.towers
        self._optimizer: torch.optim.Optimizer | None = None
        self.spent = TrainingFlops(model, example)
        """FLOPs of training so far."""
        self.spent.forward = count_forward(model, example)[0]
        self._branches = Checkpoints(folder / BRANCHES, keep)

    @property
    def finished(self) -> bool:
        """Whether all rungs have been made."""
        return self.step >= self.plan.total_steps

    @property
    def result(self) -> Ladder:
        """The rungs so far."""
        return Ladder(self.plan, self.folder.rungs, self.folder.path)

    def describe_phase(self) -> str:
        """What is trained now."""
        phase = self.plan.find_phase(self.step)
        size = plural(self.plan.rungs[phase.rung].depth, "block")
        return f"ladder, decay of the rung of {size}" if phase.decays else f"ladder, {size}"

    def link(self, optimizer: torch.optim.Optimizer) -> None:
        """Train by this optimizer from now on, with its present learning rates as the highest ones.

        Raises:
            ConfigError: it trains no block of the model, or needs a closure.
        """
        optimizer = unwrap_optimizer(optimizer)
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ConfigError("the optimizer is LBFGS, whose state belongs to no single parameter: use another one")
        members = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        blocks = [self.model.get_submodule(tower.name) for tower in self._towers]
        if members.isdisjoint(parameter for block in blocks for parameter in block.parameters()):
            raise ConfigError(
                "the optimizer has no parameter of the model's blocks: make it from this model, as in "
                "torch.optim.AdamW(model.parameters(), lr=1e-3)"
            )
        for group in optimizer.param_groups:
            rate = group["lr"]
            group.setdefault(INITIAL_RATE, rate.clone() if isinstance(rate, Tensor) else rate)
        self._optimizer = optimizer

    # Between two steps ------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Set the learning rates of the next optimizer step."""
        for group, rate in zip(self._get_optimizer().param_groups, self._compute_rates(), strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def require_rates(self) -> None:
        """Require the learning rates that `begin_step` set.

        Raises:
            ConfigError: they are others.
        """
        for group, rate in zip(self._get_optimizer().param_groups, self._compute_rates(), strict=True):
            if not math.isclose(float(group["lr"]), float(rate), rel_tol=1e-6):  # a tensor has fewer digits
                raise ConfigError(
                    f"learn changed a learning rate from {float(rate):.3g} to {float(group['lr']):.3g}, but the ladder "
                    "sets it before each step: remove schedulers, and give factors per size as rates"
                )

    def _compute_rates(self) -> list[Any]:
        """The learning rate of each parameter group at the present step."""
        factor = self.plan.compute_rate(self.step)
        return [group[INITIAL_RATE] * factor for group in self._get_optimizer().param_groups]

    def end_step(self) -> bool:
        """Count a step; at its end a rung branches off, or is finished. Returns whether the model's size changed.

        Raises:
            DivergedError: a rung ends or branches off with parameters that are not finite.
            ConfigError: ``evaluate`` returned no number.
            CheckpointError: a branching point cannot be written, or read back.
            RunError: a rung cannot be written.
        """
        self.step += 1
        branch = self.plan.find_branch_step(self._rung)
        ending = self.finished or self.step == branch + self.plan.rungs[self._rung].decay_steps
        if ending or self.step == branch:
            self.require_finite()
        if self.step == branch:
            self._branches.save(self.step, *self.take_state())
        if ending:
            self._finish_rung()
            if not self.finished:
                # Back to where the rung branched off, and up to the next size.
                self.restore_state(self._branches.load(branch))
                self.grow_to(self._rung + 1)
                return True
        return False

    def require_finite(self) -> None:
        """Require finite parameters, before they are kept.

        Raises:
            DivergedError: some are not.
        """
        if all(bool(parameter.isfinite().all()) for parameter in self.model.parameters()):
            return
        finished = f"{plural(len(self.folder.rungs), 'rung')} {'is' if len(self.folder.rungs) == 1 else 'are'} finished"
        raise DivergedError(
            f"training diverged: after step {self.step:,} of {self.plan.total_steps:,} there are parameters that are "
            f"not finite; {finished}. Start again in another folder with a lower learning rate or clipped gradients"
        )

    def _finish_rung(self) -> None:
        """Measure and save the present rung."""
        planned, spent = self.plan.rungs[self._rung], self.spent.flops
        loss = None
        if self._evaluate is not None:
            with torch.no_grad(), keep_modes(self.model), keep_generators(self.model):
                self.model.eval()
                value = self._evaluate(self.model)
            try:
                loss = read_number(value)
            except ValueError:
                raise ConfigError(f"evaluate(model) returned {describe_value(value)}: return one number") from None
        latency = measure_latency(self.model, self._example)
        self.spent.flops = spent  # evaluation is no training
        rung = self.folder.add_rung(
            self.model,
            Rung(
                depth=planned.depth,
                parameters=planned.parameters,
                forward_flops=planned.forward_flops,
                flops=spent,
                flops_alone=planned.flops_alone,
                loss=loss,
                latency=latency,
                path=self.folder.path,
            ),
        )
        result = "" if loss is None else f"loss {loss:.4f}, "
        print_line(
            self._console, f"rung of {plural(planned.depth, 'block')}: {result}{spent:.3g} FLOPs so far, {rung.path}"
        )

    def grow_to(self, rung: int) -> None:
        """Grow the model from its present size to that of a rung."""
        for index in range(self._rung + 1, rung + 1):
            copies = self.plan.rungs[index].copies
            deepen_in_place(self.model, copies, self._optimizer)
            self._towers, self._rung = grow_towers(self._towers, copies), index
        self.spent.forward = count_forward(self.model, self._example)[0]

    # Resuming ---------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Print the plan, and write the folder's table."""
        self.folder.create()
        print_line(self._console, str(self.plan))

    def take_state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors and JSON values of model and optimizer, and what was spent.

        Raises:
            CheckpointError: the optimizer keeps something else per parameter.
        """
        tensors = {_MODEL + name: value for name, value in self._named_tensors().items()}
        values: dict[str, dict[str, Any]] = {}
        for index, state in self._get_optimizer().state_dict()["state"].items():
            for name, value in state.items():
                if isinstance(value, Tensor):
                    tensors[f"{_OPTIMIZER}{index}.{name}"] = value
                elif value is None or isinstance(value, bool | int | float | str):
                    values.setdefault(str(index), {})[str(name)] = value
                else:
                    raise CheckpointError(
                        f"the optimizer's state of a parameter has {name!r}, {describe_value(value)}: use an optimizer "
                        "whose state is tensors and numbers"
                    )
        return tensors, {"optimizer": values, "trained_by": self._describe_optimizer(), "flops": self.spent.flops}

    def require_optimizer(self, checkpoint: Checkpoint) -> None:
        """Require the optimizer and the highest learning rates of a checkpoint.

        Raises:
            CheckpointError: they are others.
        """
        present = self._describe_optimizer()
        former = checkpoint.state.get("trained_by", present)  # earlier checkpoints do not say
        if former != present:
            raise CheckpointError(
                f"the ladder of {checkpoint.path} is trained by {former}, and the optimizer given is {present}: give "
                "that one, or another folder"
            )

    @torch.no_grad()
    def restore_state(self, checkpoint: Checkpoint) -> None:
        """Restore model and optimizer, which must have the size of then.

        Raises:
            CheckpointError: the state is of another model.
        """
        present = self._named_tensors()
        saved = {
            name.removeprefix(_MODEL): value for name, value in checkpoint.tensors.items() if name.startswith(_MODEL)
        }
        if {name: value.shape for name, value in present.items()} != {
            name: value.shape for name, value in saved.items()
        }:
            raise CheckpointError(
                f"{checkpoint.path} is of another model: build the model as it was when the ladder began, or give "
                "another folder"
            )
        for name, value in present.items():
            value.copy_(saved[name])
        # State of the optimizer, by the place of each parameter in its groups.
        states: dict[int, dict[str, Any]] = {
            int(index): dict(values) for index, values in checkpoint.state["optimizer"].items()
        }
        for name, value in checkpoint.tensors.items():
            if name.startswith(_OPTIMIZER):
                index, _, key = name.removeprefix(_OPTIMIZER).partition(".")
                states.setdefault(int(index), {})[key] = value
        optimizer = self._get_optimizer()
        optimizer.zero_grad()
        optimizer.load_state_dict({"state": states, "param_groups": optimizer.state_dict()["param_groups"]})

    def resume_at(self, step: int) -> None:
        """Go on before a step, with model and optimizer already as they were then, and what was spent.

        Raises:
            CheckpointError: the model has another size than at that step.
        """
        due = self.plan.find_phase(step).rung
        if due != self._rung:
            raise CheckpointError(
                f"step {step} belongs to {plural(self.plan.rungs[due].depth, 'block')}, but the model has "
                f"{self.plan.rungs[self._rung].depth}: resume from a checkpoint of this ladder"
            )
        self.step = step
        spent = self.folder.find_spent(step)
        self.spent.flops = self.plan.compute_flops(step) if spent is None else spent

    def follow_loading(self) -> None:
        """Grow the model from now on to the size of any state dict that is loaded into it.

        Loading raises CheckpointError if no rung has that size.
        """
        self.model.register_load_state_dict_pre_hook(_LoadingHook(self))

    def grow_as_loaded(self, state_dict: Mapping[str, Any], prefix: str) -> None:
        """Grow the model to the size of a state dict, whose names of this model begin with ``prefix``."""
        found = read_depths(self.plan.towers, prefix, state_dict)
        towers = self.plan.towers
        for index, rung in enumerate(self.plan.rungs):
            towers = grow_towers(towers, rung.copies) if rung.copies else towers
            if found == {tower.name: len(tower) for tower in towers}:
                if index >= self._rung:
                    self.grow_to(index)
                return
        depth = sum(found.values())
        raise CheckpointError(f"the state dict has {plural(depth, 'block')}, which is no size of this ladder")

    def _named_tensors(self) -> dict[str, Tensor]:
        """Parameters and buffers of the model, and parameters of the optimizer that are not the model's."""
        tensors: dict[str, Tensor] = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        own = set(tensors.values())
        others = [
            parameter
            for group in self._get_optimizer().param_groups
            for parameter in group["params"]
            if parameter not in own
        ]
        return {**tensors, **{f"other/{index}": parameter for index, parameter in enumerate(others)}}

    def _describe_optimizer(self) -> str:
        """Class and highest learning rates of the optimizer."""
        optimizer = self._get_optimizer()
        rates = ", ".join(f"{float(group[INITIAL_RATE]):g}" for group in optimizer.param_groups)
        return f"{type(optimizer).__name__} at {rates}"

    def _get_optimizer(self) -> torch.optim.Optimizer:
        assert self._optimizer is not None, "link an optimizer first"
        return self._optimizer


class _LoadingHook:
    """Hook of a model before it loads a state dict, which copies and pickles of the model lack."""

    def __init__(self, training: LadderTraining | None = None) -> None:
        self._training = training

    def __call__(self, _: nn.Module, state_dict: Mapping[str, Any], prefix: str, *__: Any) -> None:
        if self._training is not None:
            self._training.grow_as_loaded(state_dict, prefix)

    def __deepcopy__(self, _: dict[int, Any]) -> _LoadingHook:
        return _LoadingHook()

    def __reduce__(self) -> tuple[Any, ...]:
        return _LoadingHook, ()
