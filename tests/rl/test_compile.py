"""A compiled update does what an eager one does, and what can be compiled of a policy is all that is."""

import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from esper.control.policy import Policy
from rl.probes import learner, plain_ppo, rollouts

COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
def test_a_compiled_update_equals_an_eager_one() -> None:
    settings = plain_ppo(epochs=1, minibatches=1)
    eager, compiled = learner(settings), learner(settings.model_copy(update={"compile": True}))
    (rollout,) = rollouts(eager, 1)
    for student in (eager, compiled):
        assert student.update(rollout, 0.0)["optimizer_steps"] == 1
    torch.compiler.reset()
    left, right = eager.state_tensors(), compiled.state_tensors()
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        torch.testing.assert_close(right[name], tensor, atol=1e-5, rtol=1e-5, msg=name)


def test_a_policy_that_is_compiled_for_updates_keeps_its_names() -> None:
    eager, compiled = learner(plain_ppo()), learner(plain_ppo(compile=True))
    assert type(compiled.policy) is Policy
    assert compiled.state_tensors().keys() == eager.state_tensors().keys()


def test_what_cannot_be_compiled_raises_and_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[object] = []

    def compiler(function: Callable[..., Any]) -> Callable[..., Any]:
        def compiled(*arguments: Any) -> Any:
            tries.append(function)
            raise RuntimeError("no compiler")

        return compiled

    monkeypatch.setattr(torch, "compile", compiler)
    student = learner(plain_ppo(compile=True))
    (rollout,) = rollouts(student, 1)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no compiler"):
            student.update(rollout, 0.0)
    assert tries == [student.policy.evaluate] * 2


class Looks(TorchFunctionMode):
    """While active, notes what makes a device wait, and a compiler break the graph."""

    BY_NAME = frozenset({"item", "tolist", "__bool__", "__int__", "__float__", "__index__", "nonzero", "cpu", "numpy"})

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in self.BY_NAME or (name == "__getitem__" and _by_mask(args[1])):
            self.found.append(name)
        return func(*args, **kwargs or {})


def _by_mask(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, torch.Tensor) and part.dtype == torch.bool for part in parts)


def test_a_policy_evaluates_stored_decisions_without_looking_at_a_value() -> None:
    student = learner(plain_ppo())
    (rollout,) = rollouts(student, 1)
    with Looks() as looks:
        student.policy.evaluate(rollout.observations, rollout.masks, rollout.actions, rollout.state)
    assert looks.found == []


def test_looks_are_noticed() -> None:
    values = torch.arange(3.0)
    with Looks() as looks:
        bool(values.sum() > 1)
        values[values > 1]
        values[0].item()
    assert looks.found == ["__bool__", "__getitem__", "item"]
