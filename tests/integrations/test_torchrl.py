"""TorchRL wraps growth as it is, with eight choices or with one, and learns on it."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import gymnasium
import pytest
import torch
from numbered_actions import NumberedActions
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torchrl.envs import GymWrapper
from torchrl.envs.utils import check_env_specs
from torchrl.modules import MaskedCategorical, ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

import esper.rl
from esper.engine.observation import GLOBAL_FEATURES, SLOT_FEATURES
from esper.lifecycle.rules import Rules
from train.runs import ShortSuite, short_suite

E, STEPS = 3, ShortSuite.steps
SETTINGS: dict[str, Any] = {"suite": "short", "rules": Rules()}


@pytest.fixture(autouse=True)
def _short() -> Iterator[None]:
    with short_suite():
        yield


class Body(nn.Module):
    """A linear layer on the features; the mask goes along, as bool."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(len(GLOBAL_FEATURES) + len(ShortSuite.sites) * len(SLOT_FEATURES), outputs)

    def forward(self, network: Tensor, slots: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(torch.cat((network, slots.flatten(-2)), -1)), mask.bool()


SEEN = ["globals", "slots", "action_mask"]


def wrapped() -> GymWrapper:
    return GymWrapper(NumberedActions(E, **SETTINGS), categorical_action_encoding=True)


def actor_of(env: GymWrapper) -> ProbabilisticActor:
    body = TensorDictModule(Body(env.action_spec.n), in_keys=SEEN, out_keys=["logits", "mask"])
    return ProbabilisticActor(
        body,
        spec=env.action_spec,
        in_keys=["logits", "mask"],
        distribution_class=MaskedCategorical,
        return_log_prob=True,
    )


def test_the_environment_with_eight_choices() -> None:
    env = GymWrapper(gymnasium.make_vec(esper.rl.ENVIRONMENT, num_envs=E, **SETTINGS))
    check_env_specs(env)
    env.set_seed(0)
    course = env.rollout(STEPS + 4)
    assert course.batch_size == (E, STEPS), "the episodes end"
    assert course["next", "terminated"][:, -1].all()
    assert not course["next", "truncated"].any()
    assert course["action"].shape == (E, STEPS, 8)
    assert course["globals"][:, :, 0] == pytest.approx(torch.arange(STEPS).expand(E, STEPS) / STEPS)


def test_episodes_that_end_begin_anew() -> None:
    env = wrapped()
    check_env_specs(env)
    env.set_seed(0)
    course = env.rollout(2 * STEPS, break_when_any_done=False)
    assert course.batch_size == (E, 2 * STEPS)
    assert course["next", "done"][..., 0].nonzero()[:, 1].tolist() == [STEPS - 1, 2 * STEPS - 1] * E
    assert (course["globals"][:, [0, STEPS], 0] == 0).all()


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_networks_learn_although_the_agent_acts_without_gradients(context: Callable[[], Any]) -> None:
    courses: list[TensorDict] = []
    for around in (nullcontext, context):
        torch.manual_seed(0)
        with around():
            env = wrapped()
            env.set_seed(0)
            inside = env.rollout(STEPS)
        courses.append(torch.cat([inside, env.rollout(STEPS)], 1))
    assert (courses[0] == courses[1]).all()


def test_clipped_ppo_learns_under_exact_masks() -> None:
    torch.manual_seed(0)
    env = wrapped()
    env.set_seed(0)
    actor = actor_of(env)
    critic = ValueOperator(nn.Linear(len(GLOBAL_FEATURES), 1), in_keys=["globals"])
    loss = ClipPPOLoss(actor, critic)
    advantage = GAE(gamma=1.0, lmbda=0.98, value_network=critic)
    optimizer = torch.optim.Adam(loss.parameters(), 1e-2)
    before = [parameter.detach().clone() for parameter in loss.parameters()]
    chosen: set[int] = set()
    for _ in range(2):
        with torch.no_grad():
            course = env.rollout(STEPS, actor)
        assert course["action_mask"].bool().gather(-1, course["action"][..., None]).all()
        chosen |= set(course["action"].flatten().tolist())
        advantage(course)
        terms = loss(course)
        optimizer.zero_grad()
        (terms["loss_objective"] + terms["loss_critic"] + terms["loss_entropy"]).backward()
        optimizer.step()
    assert all(not torch.equal(one, other) for one, other in zip(before, loss.parameters(), strict=True))
    assert len(chosen) > 5
