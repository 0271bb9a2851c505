"""A saved policy comes back as it was, from what a checkpoint and a configuration hold, and nothing else is read."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from esper.config.loading import dump_settings, load_settings
from esper.control.learned import PolicyOrigin, restore_policy
from esper.control.policy import Policy, PolicySettings
from esper.engine.observation import list_features
from esper.errors import CheckpointError, ConfigError
from esper.lifecycle.actions import Blend
from esper.rl.ppo import PPO
from esper.rl.settings import PPOSettings
from esper.train.settings import TrainSettings
from open_rules import open_rules

SMALL = PolicySettings(advice=None, hidden=8, width=4)
OPEN = open_rules(blends=tuple(Blend))


@pytest.fixture
def saved() -> tuple[Policy, dict[str, torch.Tensor]]:
    """A policy, and the tensors of its learner's checkpoint."""
    policy = Policy(list_features(False).spec, SMALL, torch.Generator().manual_seed(5))
    return policy, PPO(policy, PPOSettings(), 0).state_tensors()


def test_a_policy_comes_back_tensor_for_tensor(saved: tuple[Policy, dict[str, torch.Tensor]]) -> None:
    policy, tensors = saved
    restored = restore_policy(tensors, SMALL, None, OPEN)
    assert restored.state_dict().keys() == policy.state_dict().keys()
    for name, tensor in policy.state_dict().items():
        assert torch.equal(restored.state_dict()[name], tensor), name


@pytest.mark.parametrize("loss", ["another size", "a tensor lacks", "a tensor too many"])
def test_a_policy_of_other_settings_is_refused(loss: str, saved: tuple[Policy, dict[str, torch.Tensor]]) -> None:
    _, tensors = saved
    settings = PolicySettings(advice=None, hidden=16, width=4) if loss == "another size" else SMALL
    if loss == "a tensor lacks":
        del tensors["policy.lstm.weight_ih_l0"]
    if loss == "a tensor too many":
        tensors["policy.extra"] = torch.zeros(1)
    with pytest.raises(CheckpointError, match="policy"):
        restore_policy(tensors, settings, None, OPEN)


def test_weights_and_counters_out_of_their_range_are_refused_by_name(
    saved: tuple[Policy, dict[str, torch.Tensor]],
) -> None:
    policy, _ = saved
    learner = PPO(policy, PPOSettings(), 0)
    optimizer = {f"optimizer.{name}": value for name, value in learner._optimizer.expected_tensors().items()}
    tensors = learner.state_tensors() | {name: torch.zeros_like(value) for name, value in optimizer.items()}
    learner.load_state_tensors(tensors)
    never_negative = ("count", "variance", "updates", "step", "exp_avg_sq")
    for name, tensor in tensors.items():
        wrong = [float("nan"), float("inf"), -float("inf")] if tensor.is_floating_point() else []
        wrong += [-1.0] if name.rpartition(".")[2] in never_negative else []
        for value in wrong:
            damaged = tensors | {name: torch.full_like(tensor, value)}
            with pytest.raises(CheckpointError, match=rf"the learner's checkpoint has a value in '{re.escape(name)}'"):
                learner.load_state_tensors(damaged)
            if name.startswith("policy."):
                with pytest.raises(CheckpointError, match="the checkpoint's policy has a value in"):
                    restore_policy(damaged, SMALL, None, OPEN)


def test_every_configuration_of_a_training_run_has_the_origin_of_its_policy(tmp_path: Path) -> None:
    settings = TrainSettings(suite="digits", policy=SMALL)
    dump_settings(settings, tmp_path / "config.yaml")
    origin = load_settings(PolicyOrigin, tmp_path / "config.yaml")
    assert (origin.suite, origin.rules, origin.policy) == (settings.suite, settings.rules, settings.policy)


def test_a_configuration_that_does_not_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("policy: {hidden: 8, widht: 4}\nsuite: tokens\n")
    with pytest.raises(ConfigError, match="widht"):
        load_settings(PolicyOrigin, tmp_path / "config.yaml")


@pytest.mark.landing
def test_a_policy_is_loaded_without_what_trained_it() -> None:
    program = "import sys, esper.control.learned; print(*(m for m in sys.modules if m.startswith('esper.')))"
    loaded = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout.split()
    assert not [name for name in loaded if name.startswith(("esper.train", "esper.lab", "esper.rl"))]
