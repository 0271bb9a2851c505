"""The rollout buffer stores what happened."""

import torch

from esper.control.policy import Policy, PolicyStep
from esper.engine.observation import MaskTensors, Observation
from esper.rl.rollout import RolloutBuffer, concatenate_rollouts, select_environments
from factories import iterate_arrays
from rl.probes import SIZES, SPEC, blank_observation, free_masks

STEPS, ENVIRONMENTS = 3, 4

RUNNING = torch.ones(ENVIRONMENTS, dtype=torch.bool)


def policy() -> Policy:
    return Policy(SPEC, SIZES, torch.Generator().manual_seed(0))


def moment() -> tuple[Observation, MaskTensors, PolicyStep]:
    actor, seen, legality = policy(), blank_observation(ENVIRONMENTS), free_masks(ENVIRONMENTS)
    return seen, legality, actor.act(seen, legality, actor.initial_state(ENVIRONMENTS))


def filled() -> RolloutBuffer:
    box = RolloutBuffer(policy().initial_state(ENVIRONMENTS))
    for t in range(STEPS):
        box.add(*moment(), torch.arange(ENVIRONMENTS) + 10.0 * t, RUNNING)
    return box


def test_terminated_episodes_have_no_final_value_and_cut_ones_keep_theirs() -> None:
    rollout = filled().finish(torch.tensor([True, False, True, False]), torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert rollout.final_value.tolist() == [0.0, 2.0, 0.0, 4.0]


def test_rows_come_back_in_order() -> None:
    rollout = filled().finish(torch.ones(ENVIRONMENTS, dtype=torch.bool), torch.zeros(ENVIRONMENTS))
    assert (rollout.steps, rollout.environments) == (STEPS, ENVIRONMENTS)
    assert rollout.reward.tolist() == [[0, 1, 2, 3], [10, 11, 12, 13], [20, 21, 22, 23]]
    assert rollout.actions.shape == (STEPS, ENVIRONMENTS, 8)
    assert rollout.masks.op.shape == (STEPS, ENVIRONMENTS, 6)


def test_selected_environments_keep_all_their_data() -> None:
    rollout = filled().finish(torch.zeros(ENVIRONMENTS, dtype=torch.bool), torch.arange(4.0))
    part = select_environments(rollout, torch.tensor([3, 1]))
    assert part.reward.tolist() == [[3, 1], [13, 11], [23, 21]]
    assert part.final_value.tolist() == [3, 1]
    assert torch.equal(part.observations.slots, rollout.observations.slots[:, [3, 1]])
    assert part.state.cell.shape[1] == 2
    assert part.running.shape == (STEPS, 2)
    assert part.control_variate.shape == (STEPS, 2)
    for (name, ours), (_, all_of_them) in zip(iterate_arrays(part), iterate_arrays(rollout), strict=True):
        axis = 0 if all_of_them.dim() == 1 else 1
        assert torch.equal(ours, all_of_them.index_select(axis, torch.tensor([3, 1]))), name


def test_rollouts_side_by_side_keep_all_their_data() -> None:
    rollout = filled().finish(torch.zeros(ENVIRONMENTS, dtype=torch.bool), torch.arange(4.0))
    parts = [select_environments(rollout, torch.tensor(index)) for index in ([0], [1, 2], [3])]
    for (name, ours), (_, whole) in zip(
        iterate_arrays(concatenate_rollouts(parts)), iterate_arrays(rollout), strict=True
    ):
        assert torch.equal(ours, whole), name
