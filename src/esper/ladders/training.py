"""The engine of a ladder: the state of its training, and what happens between two steps.

The training loop calls `LadderTraining.begin_step` before each optimizer step and `end_step` after it. A branch is the
model itself, which returns to the branching point once the rung is saved. What happens at a step depends only on the
number of steps done so far.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

from esper.config.arguments import describe_value, read_number
from esper.engine.budget import TRAINING_PASSES
from esper.errors import CheckpointError, ConfigError, DivergedError, plural
from esper.files import print_line
from esper.growth.hooks import find_tensors
from esper.growth.inputs import Arguments, find_input_place, first_tensor
from esper.growth.links import unwrap_optimizer
from esper.ladders.plan import LadderPlan, count_forward
from esper.ladders.rungs import Ladder, Rung, RungFolder, measure_latency
from esper.ladders.towers import deepen_in_place, grow_towers, read_depths
from esper.numerics.modules import keep_generators, keep_modes
from esper.serialization import Checkpoint, Checkpoints

BRANCHES = "branches"
"""Subfolder with the state of the model at the branching points."""
INITIAL_RATE = "initial_lr"
"""A group's learning rate before any schedule, as in torch's schedulers."""
_MODEL, _OPTIMIZER = "model.", "optimizer."

Evaluate = Callable[[nn.Module], Any]


class TrainingFlops:
    """Counts the FLOPs of a model's training passes as a `Grower`'s spending does.

    A forward pass costs that of the example input, scaled by the input's size, a backward pass twice as much. Passes
    under `torch.no_grad` are not counted.
    """

    def __init__(self, model: nn.Module, example: Arguments) -> None:
        self.flops = 0.0
        self.forward = 0.0
        """Of a forward pass of the model for the example input."""
        self._model, self._place = model, find_input_place(example)
        self._size = first_tensor(example).numel()
        self._pass = 0.0

    @contextmanager
    def counting(self) -> Generator[None]:
        """Count all passes through the whole model."""
        hooks = [
            self._model.register_forward_pre_hook(self._begin, with_kwargs=True),
            self._model.register_forward_hook(self._end),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _begin(self, _: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        if not torch.is_grad_enabled():
            return
        places: dict[int | str, Any] = {**dict(enumerate(arguments)), **keywords}
        tensors = {place: value for place, value in places.items() if isinstance(value, Tensor)}
        inputs = tensors.get(self._place, next(iter(tensors.values()), None))
        if inputs is not None:
            self._pass = self.forward * inputs.numel() / self._size
            self.flops += self._pass

    def _end(self, _: nn.Module, __: tuple[Any, ...], output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        # The backward pass is counted when it happens.
        backward, self._pass = self._pass * (TRAINING_PASSES - 1), 0.0
        outputs = [tensor for tensor in find_tensors(output) if tensor.grad_fn is not None]
        if outputs:

            def count(_: Tensor) -> None:
                self.flops += backward

            register_multi_grad_hook(outputs, count, mode="any")


class LadderTraining:
    """A model that grows through the sizes of a ladder in place; ``keep`` branching points are kept."""

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
        self._example, self._evaluate = example, evaluate
        self._rung, self._towers = 0, plan.towers
        self._optimizer: torch.optim.Optimizer | None = None
        self.spent = TrainingFlops(model, example)
        self.spent.forward = count_forward(model, example)[0]
        self._branches = Checkpoints(folder / BRANCHES, keep)

    @property
    def finished(self) -> bool:
        return self.step >= self.plan.total_steps

    @property
    def result(self) -> Ladder:
        return Ladder(self.plan, self.folder.list_rungs(), self.folder.path)

    def describe_phase(self) -> str:
        phase = self.plan.find_phase(self.step)
        size = plural(self.plan.rungs[phase.rung].depth, "block")
        return f"ladder, decay of the rung of {size}" if phase.decays else f"ladder, {size}"

    def link(self, optimizer: torch.optim.Optimizer) -> None:
        """Use this optimizer from now on, with its learning rates as the maximum ones."""
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

    # Between two steps

    def begin_step(self) -> None:
        """Set the learning rates of the next optimizer step."""
        for group, rate in zip(self._get_optimizer().param_groups, self._compute_rates(), strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def require_rates(self) -> None:
        """Check that the learning rates are still those of `begin_step`."""
        for group, rate in zip(self._get_optimizer().param_groups, self._compute_rates(), strict=True):
            if not math.isclose(float(group["lr"]), float(rate), rel_tol=1e-6):  # a tensor has fewer digits
                raise ConfigError(
                    f"train_step changed a learning rate from {float(rate):.3g} to {float(group['lr']):.3g}, but the "
                    "ladder sets it before each step: remove schedulers, and give factors per size as rates"
                )

    def _compute_rates(self) -> list[Any]:
        factor = self.plan.compute_rate(self.step)
        return [group[INITIAL_RATE] * factor for group in self._get_optimizer().param_groups]

    def end_step(self) -> bool:
        """Count a step, and start or finish a rung's branch if it is due; returns whether the model's size changed."""
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
                # Return to the branching point, and grow to the next size.
                self.restore_state(self._branches.load(branch))
                self.grow_to(self._rung + 1)
                return True
        return False

    def require_finite(self) -> None:
        if all(bool(parameter.isfinite().all()) for parameter in self.model.parameters()):
            return
        count = len(self.folder.list_rungs())
        raise DivergedError(
            f"training diverged: after step {self.step:,} of {self.plan.total_steps:,} there are parameters that are "
            f"not finite; {plural(count, 'rung')} {'is' if count == 1 else 'are'} finished. Start again in another "
            "folder with a lower learning rate or clipped gradients"
        )

    def _finish_rung(self) -> None:
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
        self.spent.flops = spent  # evaluation does not count as training
        rung = Rung(
            depth=planned.depth,
            parameters=planned.parameters,
            forward_flops=planned.forward_flops,
            flops=spent,
            flops_alone=planned.flops_alone,
            loss=loss,
            latency=latency,
            path=self.folder.find_path(planned.depth),
        )
        self.folder.add_rung(self.model, rung)
        result = "" if loss is None else f"loss {loss:.4f}, "
        print_line(f"rung of {plural(planned.depth, 'block')}: {result}{spent:.3g} FLOPs so far, {rung.path}")

    def grow_to(self, rung: int) -> None:
        for index in range(self._rung + 1, rung + 1):
            copies = self.plan.rungs[index].copies
            deepen_in_place(self.model, copies, self._optimizer)
            self._towers, self._rung = grow_towers(self._towers, copies), index
        self.spent.forward = count_forward(self.model, self._example)[0]

    # Resuming

    def start(self) -> None:
        self.folder.create()
        print_line(str(self.plan))

    def take_state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The state as tensors and JSON values."""
        tensors = {_MODEL + name: value for name, value in self._named_tensors().items()}
        values: dict[str, dict[str, Any]] = {}
        for index, state in self._get_optimizer().state_dict()["state"].items():
            if not isinstance(index, int):
                raise CheckpointError(
                    f"the optimizer's state has {index!r}, which belongs to no parameter: use an optimizer whose state "
                    "is by parameter"
                )
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
        present = self._describe_optimizer()
        former = checkpoint.state.get("trained_by", present)  # earlier checkpoints lack it
        if former != present:
            raise CheckpointError(
                f"the ladder of {checkpoint.path} is trained by {former}, and the optimizer given is {present}: give "
                "that one, or another folder"
            )

    @torch.no_grad()
    def restore_state(self, checkpoint: Checkpoint) -> None:
        """Restore model and optimizer from a checkpoint of the same size."""
        present = self._named_tensors()
        saved = {
            name.removeprefix(_MODEL): value for name, value in checkpoint.tensors.items() if name.startswith(_MODEL)
        }
        # Buffers outside the state dict, such as caches of positions, may have another size by now.
        caches = set(dict(self.model.named_buffers())) - set(self.model.state_dict())
        if {name: value.shape for name, value in present.items() if name not in caches} != {
            name: value.shape for name, value in saved.items() if name not in caches
        }:
            raise CheckpointError(
                f"{checkpoint.path} is of another model: build the model as it was when the ladder began, or give "
                "another folder"
            )
        for name, value in present.items():
            if name not in caches or (name in saved and saved[name].shape == value.shape):
                value.copy_(saved[name])
        # State of the optimizer, by the index of each parameter in its groups.
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
        """Continue before a step, once model and optimizer are restored."""
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
        """Let the model grow to the size of any state dict that is loaded into it."""
        self.model.register_load_state_dict_pre_hook(_LoadingHook(self))

    def grow_as_loaded(self, state_dict: Mapping[str, Any], prefix: str) -> None:
        """Grow the model to its size in a state dict in which its names start with ``prefix``."""
        found = read_depths(self.plan.towers, prefix, state_dict)
        towers = self.plan.towers
        for index, rung in enumerate(self.plan.rungs):
            towers = grow_towers(towers, rung.copies) if rung.copies else towers
            if found == {tower.name: len(tower) for tower in towers}:
                if index < self._rung:
                    raise CheckpointError(
                        f"the state dict has {plural(rung.depth, 'block')}, but the model has grown to "
                        f"{self.plan.rungs[self._rung].depth}: make model and callback anew to resume from it"
                    )
                self.grow_to(index)
                return
        depth = sum(found.values())
        raise CheckpointError(f"the state dict has {plural(depth, 'block')}, which is no size of this ladder")

    def _named_tensors(self) -> dict[str, Tensor]:
        """Parameters and buffers of the model, and other parameters of the optimizer."""
        tensors: dict[str, Tensor] = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        own = set(tensors.values())
        parameters = [parameter for group in self._get_optimizer().param_groups for parameter in group["params"]]
        others = [parameter for parameter in parameters if parameter not in own]
        return {**tensors, **{f"other/{index}": parameter for index, parameter in enumerate(others)}}

    def _describe_optimizer(self) -> str:
        optimizer = self._get_optimizer()
        rates = ", ".join(f"{float(group[INITIAL_RATE]):g}" for group in optimizer.param_groups)
        return f"{type(optimizer).__name__} at {rates}"

    def _get_optimizer(self) -> torch.optim.Optimizer:
        assert self._optimizer is not None, "link an optimizer first"
        return self._optimizer


class _LoadingHook:
    """Runs before a model loads a state dict; copies and pickles of the model do not have it."""

    def __init__(self, training: LadderTraining | None = None) -> None:
        self._training = training

    def __call__(self, _: nn.Module, state_dict: Mapping[str, Any], prefix: str, *__: Any) -> None:
        if self._training is not None:
            self._training.grow_as_loaded(state_dict, prefix)

    def __deepcopy__(self, _: dict[int, Any]) -> _LoadingHook:
        return _LoadingHook()

    def __reduce__(self) -> tuple[Any, ...]:
        return _LoadingHook, ()
