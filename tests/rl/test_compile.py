"""A compiled update does what an eager one does."""

from __future__ import annotations

import shutil

import pytest
import torch

from rl.noise import rollouts
from rl.plain_ppo import plain_ppo
from rl.probes import learner

COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
def test_a_compiled_update_equals_an_eager_one() -> None:
    settings = plain_ppo(epochs=1, minibatches=1)
    eager, compiled = learner(settings), learner(settings.model_copy(update={"compile": True}))
    (rollout,) = rollouts(eager, 1)
    for student in (eager, compiled):
        assert student.update(rollout, 0.0).optimizer_steps == 1
    torch.compiler.reset()
    left, right = eager.state_tensors(), compiled.state_tensors()
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        torch.testing.assert_close(right[name], tensor, atol=1e-5, rtol=1e-5, msg=name)
