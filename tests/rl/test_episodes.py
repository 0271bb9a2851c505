"""Episodes: rewards add up to J, J is what the committed network is worth, and restarts disturb nobody."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from esper.control.rules import Never, Planting, Schedule
from esper.engine.measurements import CommittedEvaluation, Evaluation
from esper.engine.observation import Observation
from esper.errors import TaskError
from esper.growth.model import GrowingModel
from esper.lifecycle.actions import Blend, Op, make_action, make_wait_actions
from esper.lifecycle.rules import Isolation
from esper.lifecycle.table import Stage
from esper.population.parameters import ParameterLayout
from esper.rl.episodes import Episodes, StepResult
from esper.tasks.instance import Data, Instance, Part
from open_rules import open_rules
from population.scenes import parameters_of
from rl.short import QUICK, SUITE, ShortSuite, episodes, instances, play

MLP, ATTENTION = SUITE.blueprints.index("mlp"), SUITE.blueprints.index("attention")


def committed(running: Episodes, row: int) -> GrowingModel:
    """The network that remains, rebuilt from its own narrow host and seeds."""
    population, instance = running.population, running.instances[row]
    model = GrowingModel(
        SUITE.host(instance), dict.fromkeys(SUITE.sites, SUITE.blueprints), torch.zeros(2, *SUITE.input_shape)
    )
    _fill(model.host, population.host.layout, population.host.values.detach()[row])
    for (slot, blueprint, blend), bank in population.banks.items():
        for place in (bank.block.owners == row).nonzero().flatten().tolist():
            if population.table.stage[row, slot] != Stage.FOSSILIZED:
                continue
            where = model.slots[SUITE.sites[slot]]
            seed = where.germinate(SUITE.blueprints[blueprint], torch.Generator(), blend=blend)
            seed.alpha.fill_(float(population.table.alpha[row, slot]))
            _fill(parameters_of(seed), bank.block.layout, bank.block.values.detach()[place])
            where.fossilize()
    return model.eval()


def _fill(module: torch.nn.Module, shape: ParameterLayout, values: torch.Tensor) -> None:
    """Give a narrow module the live part of a padded row."""
    named = shape.unflatten(values.unsqueeze(0))
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(named[name][0][tuple(slice(extent) for extent in parameter.shape)])


def objective(running: Episodes, part: Part) -> list[float]:
    """J of the committed networks, by hand."""
    scores: list[float] = []
    for row, instance in enumerate(running.instances):
        model = committed(running, row)
        phase = int(instance.drift_step is not None and running.step_index[row] >= instance.drift_step)
        data = SUITE.data(instance, part, phase)
        with torch.no_grad():
            logits = model(data.inputs)
            torch.testing.assert_close(model.finalize()(data.inputs), logits)
            accuracy = (logits.argmax(-1) == data.labels).float().mean()
        host = sum(p.numel() for p in model.host.parameters())
        added = sum(p.numel() for p in model.parameters()) - host
        scores.append(float(accuracy) - instance.rent * float(np.log1p(added / host)))
    return scores


def total(results: Sequence[StepResult]) -> np.ndarray:
    return np.sum([result.reward for result in results], axis=0)


@pytest.mark.landing
@pytest.mark.parametrize("isolation", list(Isolation))
def test_outcome_telescopes_to_j_of_the_committed_network(isolation: Isolation) -> None:
    changes = {"isolation": isolation, "harm_tolerance": 1.0, "blends": tuple(Blend)}
    running = episodes(instances(14), QUICK.model_copy(update=changes))
    results = play(running)
    assert len(results) == SUITE.steps
    np.testing.assert_allclose(total(results), running.potential, atol=1e-6)
    np.testing.assert_allclose(running.potential, objective(running, "validation"), atol=1e-6)
    fossils = running.population.table.stage == Stage.FOSSILIZED
    assert fossils.sum() >= 2, "the test means to score networks that grew"
    assert (running.population.table.live & ~fossils).any(), "and to leave seeds behind that do not count"


def test_before_the_end_the_potential_is_of_the_whole_network() -> None:
    running = episodes(instances(3), open_rules(cooldown=(1, 1, 1)))
    play(running, Schedule([Planting(0, 0, MLP)], SUITE.steps, keep_after=1000), SUITE.steps - 1)
    population = running.population
    added = population.count_seed_parameters(population.table.blended)
    assert (added > 0).all()
    rent = np.array([one.rent for one in running.instances])
    expected = running.engine.history.accuracies[:, 0] - rent * np.log1p(added / population.host_parameters)
    np.testing.assert_allclose(running.potential, expected, atol=1e-6)


class ByLoss(ShortSuite):
    """The same problems, where only the loss counts."""

    objective = "loss"


def test_where_growth_is_about_the_loss_it_takes_accuracys_place_everywhere() -> None:
    rules = QUICK.model_copy(update={"harm_tolerance": 100.0})
    by_accuracy, by_loss = episodes(instances(4), rules), episodes(instances(4), rules, suite=ByLoss())
    grow = Schedule([Planting(0, 0, MLP), Planting(1, 2, MLP)], SUITE.steps, keep_after=2)
    usual, other = play(by_accuracy, grow), play(by_loss, grow)
    chance = np.log(SUITE.classes)
    for one, two in zip(usual, other, strict=True):
        np.testing.assert_array_equal(one.evaluation.loss, two.evaluation.loss)
        np.testing.assert_allclose(two.evaluation.accuracy, 1 - one.evaluation.loss / chance)
        np.testing.assert_allclose(two.evaluation.accuracy_contribution, one.evaluation.loss_contribution / chance)
        np.testing.assert_allclose(two.reward_inputs.after.score["accuracy"], one.reward_inputs.after.score["loss"])
    np.testing.assert_allclose(by_loss.engine.history.training.accuracy, other[-1].evaluation.accuracy)
    table = by_loss.population.table
    assert (table.stage == Stage.FOSSILIZED).any(), "the test means to score networks that grew"
    scored = by_loss.final_score()
    for row, instance in enumerate(by_loss.instances):
        data = SUITE.data(instance, "test", int(instance.drift_step is not None))
        with torch.no_grad():
            loss = torch.nn.functional.cross_entropy(committed(by_loss, row)(data.inputs), data.labels)
        assert scored.accuracy[row] == pytest.approx(1 - float(loss) / chance, abs=1e-5)
    known = np.isfinite(by_loss.engine.history.accuracy_contribution)
    measurements = by_loss.population.measurements.contribution
    np.testing.assert_allclose(measurements[known], by_loss.engine.history.accuracy_contribution[known], rtol=1e-5)
    fresh = episodes(instances(2), suite=ByLoss())
    np.testing.assert_array_equal(fresh.engine.history.accuracies, 0.0)


def test_a_loss_beyond_all_bounds_is_as_bad_as_twice_a_guess() -> None:
    known, losses = np.array([[True]]), np.array([0.5, 1.0, 7.0, np.inf, np.nan])
    contributions, errors = np.array([[0.5], [-9.0], [9.0], [np.inf], [np.nan]]), np.full((5, 1), 0.3)
    seen = Evaluation(losses, np.zeros(5), np.zeros((5, 1)), contributions, np.zeros((5, 1)), errors, known)
    scored = seen.score_losses(2.0)
    np.testing.assert_array_equal(scored.accuracy, [0.75, 0.5, -1, -1, -1])
    np.testing.assert_array_equal(scored.accuracy_contribution[:, 0], [0.25, -2, 2, 2, np.nan])
    np.testing.assert_array_equal(scored.accuracy_error, errors / 2)
    np.testing.assert_array_equal(CommittedEvaluation(np.zeros(5), losses).score_losses(2.0).accuracy, scored.accuracy)


def test_episodes_end_at_the_horizon() -> None:
    running = episodes(instances(2))
    results = play(running, Never())
    assert [result.finished.tolist() for result in results] == [[False] * 2] * (SUITE.steps - 1) + [[True] * 2]
    assert running.observe().globals[0, 0] == 1.0


@pytest.mark.landing
@pytest.mark.parametrize("blend", Blend)
def test_the_final_score_is_on_test_data_and_of_fossils_only(blend: Blend) -> None:
    running = episodes(instances(7), open_rules(harm_tolerance=1.0, blends=(blend,)))
    controller = Schedule([Planting(0, 0, MLP), Planting(7, 2, ATTENTION)], SUITE.steps)
    play(running, controller)
    stages = running.population.table.stage
    assert (stages[:, 0] == Stage.FOSSILIZED).all()
    assert (stages[:, 2] == Stage.HOLDING).all()
    final = running.final_score()
    np.testing.assert_allclose(final.score, objective(running, "test"), atol=1e-6)
    costs = running.population.specs.costs.parameters
    expected = costs.blueprints[:, 0, MLP] + costs.blends[:, 0, blend]
    assert final.added_parameters.tolist() == expected.tolist()
    rent = np.array([one.rent for one in running.instances])
    growth = np.log1p(final.added_parameters / running.population.host_parameters)
    np.testing.assert_allclose(final.score, final.accuracy - rent * growth)


class Watched(ShortSuite):
    """Records which data are requested."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, Part, int]] = []

    def data(self, instance: Instance, part: Part, phase: int = 0) -> Data:
        self.requests.append((instance.name, part, phase))
        return super().data(instance, part, phase)

    def taken(self) -> set[tuple[Part, int]]:
        """Parts and phases requested since the last call."""
        taken = {(part, phase) for _, part, phase in self.requests}
        self.requests.clear()
        return taken


def drifting(step: int | None) -> Instance:
    drawn = next(one for one in instances(14) if one.drift_step is not None)
    return replace(drawn, drift_step=step)


def test_only_the_final_score_reads_test_data() -> None:
    suite = Watched()
    running = Episodes(suite, [*instances(3), drifting(4)], QUICK)
    play(running)
    running.restart(np.array([1]), instances(4)[3:])
    play(running, steps=1)
    assert {part for part, _ in suite.taken()} == {"train", "validation"}
    running.final_score()
    assert {part for part, _ in suite.taken()} == {"test"}


def test_parts_share_no_example() -> None:
    for instance in (*instances(7), drifting(4)):
        phases = (0, 1) if instance.drift_step is not None else (0,)
        for phase in phases:
            seen = [SUITE.data(instance, part, phase).inputs.flatten(1) for part in ("train", "validation", "test")]
            rows = torch.cat(seen)
            assert len(rows.unique(dim=0)) == len(rows)


def test_data_drift_at_their_step() -> None:
    suite = Watched()
    with_drift, without = (Episodes(suite, [drifting(step)], QUICK) for step in (4, None))
    suite.taken()
    for step in range(SUITE.steps):
        results = [one.step(make_wait_actions(1)) for one in (with_drift, without)]
        assert suite.taken() == ({("train", 1), ("validation", 1)} if step == 4 else set())
        same = results[0].evaluation.loss == results[1].evaluation.loss
        assert same == (step < 4)
    with_drift.final_score()
    assert suite.taken() == {("test", 1)}
    without.final_score()
    assert suite.taken() == {("test", 0)}


def assert_same_rows(one: Observation, other: Observation, rows: Sequence[int], tolerance: float = 0.0) -> None:
    for name, part, expected in zip(one._fields, one, other, strict=True):
        torch.testing.assert_close(part[list(rows)], expected[list(rows)], rtol=tolerance, atol=tolerance, msg=name)


def test_a_restart_without_seeds_leaves_the_others_bit_equal_to_the_end() -> None:
    chosen, newcomer = instances(4), instances(11)[10]
    restarted, undisturbed = (episodes(chosen) for _ in range(2))
    actions = np.stack(
        [
            make_action(Op.GERMINATE, 0, MLP),
            make_action(Op.GERMINATE, 1, ATTENTION),
            make_wait_actions(1)[0],
            make_wait_actions(1)[0],
        ]
    )
    for running in (restarted, undisturbed):
        running.step(actions)
    restarted.restart(np.array([2]), [newcomer])
    for _ in range(SUITE.steps - 1):
        rewards = [running.step(make_wait_actions(4)).reward for running in (restarted, undisturbed)]
        assert rewards[0][[0, 1, 3]].tolist() == rewards[1][[0, 1, 3]].tolist()
        assert_same_rows(restarted.observe(), undisturbed.observe(), [0, 1, 3])


@pytest.mark.parametrize("steps", [0, 4, SUITE.steps])
def test_a_restarted_episode_is_as_a_new_one(steps: int) -> None:
    chosen = sorted(instances(14), key=lambda one: one.train_size)
    small, large = chosen[:3], chosen[-3:]
    assert small[0].train_size < large[0].train_size, "the test means to make room for more data"
    restarted, fresh = episodes(small), episodes(large)
    play(restarted, steps=steps)
    restarted.restart(np.array([2, 0, 1]), [large[2], large[0], large[1]])
    assert_same_rows(restarted.observe(), fresh.observe(), range(3))
    for ours, theirs in zip(play(restarted), play(fresh), strict=True):
        assert ours.reward.tolist() == theirs.reward.tolist()
        assert ours.finished.tolist() == theirs.finished.tolist()
    assert restarted.final_score().score.tolist() == fresh.final_score().score.tolist()


def test_a_drift_that_happened_is_undone_by_a_restart() -> None:
    suite = Watched()
    running = Episodes(suite, [drifting(2)], QUICK)
    first = [running.step(make_wait_actions(1)).evaluation.loss[0] for _ in range(5)]
    running.restart(np.array([0]), [drifting(2)])
    assert [running.step(make_wait_actions(1)).evaluation.loss[0] for _ in range(5)] == first


def test_episodes_that_ended_are_carried_along() -> None:
    chosen = instances(2)
    running = episodes(chosen)
    play(running, Never(), steps=3)
    running.restart(np.array([1]), chosen[1:])
    expected = play(episodes(chosen[1:]), Never())
    rewards = [running.step(make_wait_actions(2)).reward[1] for _ in range(SUITE.steps)]
    assert running.finished.tolist() == [True, True]
    np.testing.assert_allclose(rewards, [result.reward[0] for result in expected], atol=1e-5)


def test_instances_of_another_suite_are_refused() -> None:
    stranger = replace(instances(1)[0], suite="digits")
    with pytest.raises(TaskError, match="belongs to suite 'digits'"):
        episodes([stranger])
    running = episodes(instances(1))
    with pytest.raises(TaskError, match="belongs to suite 'digits'"):
        running.restart(np.array([0]), [stranger])
