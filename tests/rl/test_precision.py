"""An update in bfloat16 differs from one in float32 by rounding, and where it must not differ it does not."""

import pytest
import torch

from esper.control.policy import PolicySettings
from esper.errors import ConfigError
from esper.lifecycle.actions import Head
from esper.rl.ppo import PPO
from esper.rl.rollout import standardise_advantages
from esper.train.iteration import Anomaly, find_anomalies
from rl.probes import learner, plain_ppo, rollouts

HALVED = plain_ppo(bf16=True)
WEIGHTS = torch.full((len(Head),), 0.01)
LIVELY = PolicySettings(advice=None, hidden=32, width=16, head_gain=1.0)


def test_a_policy_on_the_cpu_refuses_it() -> None:
    with pytest.raises(ConfigError, match=r"ppo\.bf16 .* learns on cpu: set it to false"):
        learner(HALVED)


def test_probabilities_entropies_and_values_are_float32() -> None:
    student = learner(plain_ppo(), sizes=LIVELY)
    (rollout,) = rollouts(student, 1)
    with torch.autocast("cpu", torch.bfloat16):
        now = student.policy.evaluate(rollout.observations, rollout.masks, rollout.actions, rollout.state)
    assert {part.dtype for part in (now.chosen_log_prob, now.log_prob, now.entropy, now.value)} == {torch.float32}
    assert float(now.log_prob.detach().exp().amax()) <= 1.0


def halved(student: PPO) -> PPO:
    """Settings that a learner on the CPU refuses are set afterwards: autocast itself works there, too."""
    rounding = PPO(student.policy, plain_ppo(), 0)
    rounding.settings = HALVED
    return rounding


def test_the_loss_is_that_of_float32_but_for_rounding() -> None:
    student = learner(plain_ppo(), sizes=LIVELY)
    batch = standardise_advantages([student.make_batch(*rollouts(student, 1))])[0]
    exact = PPO(student.policy, plain_ppo(), 0).backward([batch], WEIGHTS)
    rounded = halved(student).backward([batch], WEIGHTS)
    assert float(exact["deviation"]) < 1e-5 < 1e-3 < float(rounded["deviation"]) < 0.2
    for name in ("policy_loss", "value_loss", "head_entropy"):
        torch.testing.assert_close(rounded[name], exact[name], atol=0.02, rtol=0.05, msg=name)


def test_what_acting_and_learning_disagree_upon_is_measured_without_rounding() -> None:
    student = learner(plain_ppo(), sizes=LIVELY)
    (rollout,) = rollouts(student, 1)
    objective = halved(student)
    assert float(objective.measure_deviation([rollout])) < 1e-5
    off = rollout._replace(chosen_log_prob=rollout.chosen_log_prob - 0.01)
    assert float(objective.measure_deviation([off])) > 0.01


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_an_update_on_a_gpu_raises_no_false_alarm() -> None:
    actor = learner(plain_ppo(), sizes=LIVELY)
    (rollout,) = rollouts(actor, 1)
    student = PPO(learner(plain_ppo(), sizes=LIVELY).policy.cuda(), HALVED, 0)
    metrics = student.update(rollout.to(torch.device("cuda")), 0.0)
    assert metrics["optimizer_steps"] > 0
    assert Anomaly.RATIO not in [alarm.anomaly for alarm in find_anomalies((metrics,), HALVED.target_kl)]
    exact = actor.update(rollout, 0.0)
    assert metrics["value_loss"] == pytest.approx(exact["value_loss"], rel=0.1)
