"""The update: exact where it must be exact, bounded where it must be bounded."""

from statistics import fmean

import pytest
import torch
from torch import Tensor

from control.situations import NO_PRIOR
from esper.control.policy import Policy, PolicySettings
from esper.control.policy.network import PolicyState
from esper.engine.observation import MaskTensors, Observation
from esper.errors import CheckpointError, ConfigError
from esper.lifecycle.actions import Head, Op, PerHead
from esper.lifecycle.rules import Rules
from esper.rl.ppo import KL_STOP, PPO, Figures
from esper.rl.rollout import select_steps
from esper.train.iteration import Anomaly, find_anomalies
from rl.probes import ENVIRONMENTS, SIZES, SPEC, STEPS, Noise, collect, learner, only_ops, plain_ppo, rollouts, same

FLOORED = PolicySettings(advice=None, hidden=32, width=16, head_gain=1.0, probability_floor=PerHead.fill(0.1))


def name_anomalies(metrics: Figures, target_kl: float = 0.03) -> list[Anomaly]:
    return [alarm.anomaly for alarm in find_anomalies((metrics,), target_kl)]


@pytest.mark.parametrize("surrogate", ["joint", "factored"])
@pytest.mark.parametrize("sizes", [SIZES, FLOORED])
@pytest.mark.few(1)
def test_the_first_ratio_is_one_in_every_update(sizes: PolicySettings, surrogate: str) -> None:
    student, probe = learner(plain_ppo(surrogate=surrogate), sizes=sizes), Noise(STEPS, ENVIRONMENTS)
    for update in range(4):
        metrics = student.update(collect(student.policy, probe), update / 4)
        assert metrics["first_ratio_deviation"] < 1e-5
        assert Anomaly.RATIO not in name_anomalies(metrics, student.settings.target_kl)


def test_a_normaliser_updated_between_acting_and_learning_breaks_the_ratio_and_is_noticed() -> None:
    student = learner(plain_ppo(target_kl=1e6), sizes=PolicySettings(advice=None, hidden=32, width=16, head_gain=1.0))
    (rollout,) = rollouts(student, 1)
    student.policy.normaliser.update(rollout.observations)
    metrics = student.update(rollout, 0.0)
    assert metrics["first_ratio_deviation"] > 1e-3
    assert Anomaly.RATIO in name_anomalies(metrics)


def test_statistics_stand_still_during_the_update_and_take_in_the_rollout_once() -> None:
    student = learner(plain_ppo(epochs=3))
    (rollout,) = rollouts(student, 1)
    student.update(rollout, 0.0)
    seen = rollout.observations.globals.flatten(0, 1).double()
    torch.testing.assert_close(student.policy.normaliser.globals.mean, seen.mean(0))
    assert student.policy.normaliser.globals.count == STEPS * ENVIRONMENTS
    assert student.policy.value_head.returns.count == STEPS * ENVIRONMENTS


def test_resuming_from_saved_tensors_is_bit_exact() -> None:
    settings = plain_ppo(epochs=2, minibatches=3)
    straight, probe = learner(settings), Noise(STEPS, ENVIRONMENTS)
    for update in range(3):
        straight.update(collect(straight.policy, probe), update / 6)
    saved = straight.state_tensors()
    later = [Noise(STEPS, ENVIRONMENTS, seed=5), Noise(STEPS, ENVIRONMENTS, seed=5)]
    resumed = PPO(learner(settings, seed=77).policy, settings, straight.seed)
    resumed.load_state_tensors(saved)
    assert same(resumed.state_tensors(), saved)
    for update in range(3, 6):
        first = straight.update(collect(straight.policy, later[0]), update / 6)
        second = resumed.update(collect(resumed.policy, later[1]), update / 6)
        assert first == second
    assert same(straight.state_tensors(), resumed.state_tensors())


def test_a_learner_without_closed_heads_continues_from_a_checkpoint_that_has_them() -> None:
    """As older versions saved it. What it learned for them is dropped, and nothing else."""
    older = learner(plain_ppo())
    for rollout in rollouts(older, 1):
        older.update(rollout, 0.0)
    saved = older.state_tensors()
    student = PPO(Policy(SPEC, SIZES, torch.Generator().manual_seed(9), Rules().closed_heads), older.settings, 0)
    student.load_state_tensors(saved)
    kept = student.state_tensors()
    assert all(torch.equal(saved[name], tensor) for name, tensor in kept.items())
    dropped = saved.keys() - kept.keys()
    assert any(name.startswith("optimizer.") for name in dropped)
    assert all(
        name.split(".")[2] == "details" or name.split(".")[3] not in ("OP", "SLOT", "BLUEPRINT") for name in dropped
    )

    # Figures are of the heads that there are.
    record: list[dict[str, float]] = []
    metrics = student.update(collect(student.policy, Noise(STEPS, ENVIRONMENTS)), 0.0, record=record)
    for names in (metrics, *record):
        heads = {name.partition("/")[2] for name in names if name.startswith("head_")}
        assert heads == {"op", "slot", "blueprint"}


def test_saved_tensors_are_copies() -> None:
    student = learner(plain_ppo())
    first, second = rollouts(student, 2)
    student.update(first, 0.0)
    saved = student.state_tensors()
    before = {name: tensor.clone() for name, tensor in saved.items()}
    student.update(second, 0.5)
    assert same(saved, before)


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda t: {k: v for k, v in t.items() if k != "policy.lstm.bias_ih_l0"}, "lacks 'policy.lstm.bias_ih_l0'"),
        (lambda t: {**t, "policy.extra": torch.zeros(2)}, "has 'policy.extra'"),
        (
            lambda t: {**t, "policy.lstm.bias_ih_l0": torch.zeros(2)},
            r"as torch.float32 \[2\] where",
        ),
        (
            lambda t: {**t, "updates": torch.tensor(1.0)},
            r"holds updates as torch.float32 \[\] where",
        ),
        (lambda t: {k: v.double() if "exp_avg" in k else v for k, v in t.items()}, "exp_avg as torch.float64"),
        (lambda t: {k: v for k, v in t.items() if not k.endswith("lstm.bias_ih_l0.step")}, "lacks 'optimizer"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_and_changes_nothing(damage, sentence: str) -> None:
    student = learner(plain_ppo())
    (rollout,) = rollouts(student, 1)
    student.update(rollout, 0.0)
    before = student.state_tensors()
    with pytest.raises(CheckpointError, match=sentence):
        student.load_state_tensors(damage(student.state_tensors()))
    assert same(student.state_tensors(), before)


def test_the_kl_stop_comes_before_the_step_that_would_go_on() -> None:
    greedy = learner(plain_ppo(epochs=50, target_kl=1e-4, learning_rate=1e-2))
    (rollout,) = rollouts(greedy, 1)
    metrics = greedy.update(rollout, 0.0)
    assert metrics["stopped_early"]
    assert metrics["kl"] > KL_STOP * 1e-4
    assert 0 < metrics["optimizer_steps"] < 50 * greedy.settings.minibatches

    patient = learner(plain_ppo(epochs=2, target_kl=1e6))
    metrics = patient.update(*rollouts(patient, 1), 0.0)
    assert not metrics["stopped_early"]
    assert metrics["optimizer_steps"] == 2 * patient.settings.minibatches


@pytest.mark.parametrize("stop", [1e-3, 1e9])
def test_the_kl_stop_has_one_place(monkeypatch: pytest.MonkeyPatch, stop: float) -> None:
    """The multiple of target_kl at which an update ends is `KL_STOP`, and no number beside it."""
    monkeypatch.setattr("esper.rl.ppo.KL_STOP", stop)
    student = learner(plain_ppo(epochs=4, target_kl=1e-3, learning_rate=1e-2))
    metrics = student.update(*rollouts(student, 1), 0.0)
    assert metrics["stopped_early"] == (stop < 1)
    assert metrics["optimizer_steps"] == (1 if stop < 1 else 4 * student.settings.minibatches)


def test_a_memory_of_another_width_is_refused() -> None:
    """A rollout that a policy with other sizes acted in, from whichever side it comes."""
    student = learner(plain_ppo())
    (rollout,) = rollouts(student, 1)
    wide = torch.zeros(1, rollout.environments, student.policy.settings.hidden + 1)
    with pytest.raises(ConfigError, match=r"memory is \[1, \d+, 33\].* policy.hidden 32"):
        student.update(rollout._replace(state=PolicyState(wide, wide)), 0.0)
    observation, masks = select_steps(rollout.observations, 0), select_steps(rollout.masks, 0)
    with pytest.raises(ConfigError, match="memory is"):
        student.policy.act(observation, masks, PolicyState(wide, wide))


def test_a_rollout_not_of_this_policy_makes_no_step_at_all() -> None:
    student = learner(plain_ppo())
    (rollout,) = rollouts(student, 1)
    weights = {name: value.clone() for name, value in student.policy.named_parameters()}
    metrics = student.update(rollout._replace(chosen_log_prob=rollout.chosen_log_prob - 1), 0.0)
    assert metrics["optimizer_steps"] == 0
    kept = [n for n, p in student.policy.named_parameters() if torch.equal(p, weights[n])]
    assert set(weights) - set(kept) == {"value_head.output.weight", "value_head.output.bias"}  # rescaled only


def test_a_reward_that_is_not_finite_changes_neither_weights_nor_statistics() -> None:
    student = learner(plain_ppo())
    (rollout,) = rollouts(student, 1)
    rollout.reward[2, 3] = float("nan")
    before = student.state_tensors()
    metrics = student.update(rollout, 0.0)
    assert not metrics["finite"]
    assert metrics["optimizer_steps"] == 0
    assert Anomaly.NON_FINITE in name_anomalies(metrics)
    after = student.state_tensors()
    assert all(torch.equal(after[n], before[n]) for n in before if n != "updates")


def test_the_order_of_minibatches_depends_on_seed_and_update_only() -> None:
    def weights(seed: int) -> Tensor:
        policy_seed = 0
        student = PPO(learner(plain_ppo(), policy_seed).policy, plain_ppo(), seed)
        torch.manual_seed(seed + 100)  # must not matter
        student.update(*rollouts(student, 1), 0.0)
        return student.policy.lstm.weight_hh_l0.detach().clone()

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))


def test_only_the_critic_is_decayed() -> None:
    def after(decay: float) -> dict[str, Tensor]:
        student = learner(plain_ppo(value_weight_decay=decay, epochs=1, minibatches=1))
        student.update(*rollouts(student, 1), 0.0)
        return {name: value.detach().clone() for name, value in student.policy.named_parameters()}

    plain, decayed = after(0.0), after(0.5)
    differing = {name for name in plain if not torch.equal(plain[name], decayed[name])}
    assert differing
    assert all(name.startswith("value_head.") for name in differing)


def test_group_relative_advantages_ignore_what_a_group_shares() -> None:
    student = learner(plain_ppo(group=4))
    (rollout,) = rollouts(student, 1)
    luck = torch.tensor([100.0, -300.0, 50.0]).repeat_interleave(4)
    lucky = rollout._replace(reward=rollout.reward + luck)
    torch.testing.assert_close(
        student.make_batch(lucky).advantage, student.make_batch(rollout).advantage, atol=1e-2, rtol=1e-4
    )
    assert not torch.allclose(student.make_batch(lucky).target, student.make_batch(rollout).target)
    alone = PPO(student.policy, plain_ppo(), 0)
    assert not torch.allclose(alone.make_batch(lucky).advantage, alone.make_batch(rollout).advantage)


@pytest.mark.parametrize(("change", "sentence"), [({"minibatches": 13}, "into 13 minibatches"), ({"group": 5}, "of 5")])
def test_settings_that_do_not_suit_the_environments_are_refused(change: dict[str, int], sentence: str) -> None:
    student = learner(plain_ppo(**change))
    with pytest.raises(ConfigError, match=sentence):
        student.update(*rollouts(student, 1), 0.0)


def test_schedules_end_where_they_should() -> None:
    floors = PerHead.fill(0.02).model_copy(update={"slot": 0.1, "blueprint": 0.2})
    settings = plain_ppo(entropy_start=PerHead.fill(0.1), entropy_floor=floors, entropy_anneal=0.5)
    expected = {Head.SLOT: [0.1] * 4, Head.BLUEPRINT: [0.1, 0.15, 0.2, 0.2]}
    for head in Head:
        weights = [settings.entropy_weights(progress)[head] for progress in (0.0, 0.25, 0.5, 1.0)]
        assert weights == pytest.approx(expected.get(head, [0.1, 0.06, 0.02, 0.02]))
    assert settings.learning_rate_at(0.0) == settings.learning_rate
    assert settings.learning_rate_at(1.0) == settings.final_learning_rate


def test_metrics_are_flat_finite_numbers_under_every_heads_name() -> None:
    student = learner(plain_ppo(entropy_start=PerHead.fill(0.05)))
    scalars = student.update(*rollouts(student, 1), 0.0)
    assert all(isinstance(value, float) for value in scalars.values())
    for head in ("op", "slot", "blueprint", "blend", "tempo", "alpha_target", "alpha_speed", "alpha_curve"):
        assert 0 < scalars[f"head_entropy/{head}"] <= 1 + 1e-6
        assert scalars[f"module_gradient_norm/{head}"] > 0
        assert 0 <= scalars[f"head_clip_fraction/{head}"] <= 1
        assert scalars[f"head_entropy_weight/{head}"] == pytest.approx(0.05)


@pytest.mark.parametrize("surrogate", ["joint", "factored"])
@pytest.mark.parametrize("chunk", [None, 2])
def test_minibatches_are_recorded_in_full_on_request(surrogate: str, chunk: int | None) -> None:
    student, silent = (learner(plain_ppo(surrogate=surrogate, chunk=chunk, epochs=2)) for _ in range(2))
    (rollout,) = rollouts(student, 1)
    record: list[dict[str, float]] = []
    metrics = student.update(rollout, 0.0, record=record)

    # It changes nothing, and the update's metrics are its means.
    assert silent.update(rollout, 0.0) == metrics
    assert same(silent.state_tensors(), student.state_tensors())
    assert len(record) == metrics["optimizer_steps"]
    for name in ("policy_loss", "head_share/op", "gradient_norm", "module_gradient_norm/slot"):
        assert fmean(figures[name] for figures in record) == pytest.approx(metrics[name])

    # Per head: ratios are 1 before the first step, and move; advantages are standardised over all steps.
    heads = [head.name.lower() for head in Head]
    assert [record[0][f"head_ratio/{head}"] for head in heads] == pytest.approx([1.0] * len(heads), abs=1e-5)
    assert max(record[-1][f"head_deviation/{head}"] for head in heads) > 1e-4
    for figures in record:
        for head in heads:
            assert figures[f"head_advantage_square/{head}"] >= figures[f"head_advantage/{head}"] ** 2 - 1e-6


def test_figures_of_a_rare_head_are_over_the_decisions_in_which_it_had_a_choice() -> None:
    """Slots may be chosen in one episode of twelve: the minibatches without it do not count."""
    student = learner(plain_ppo(epochs=1, minibatches=ENVIRONMENTS, target_kl=1e6))
    (rollout,) = rollouts(student, 1)
    slot = rollout.masks.slot.clone()
    slot[:, 1:] &= torch.arange(slot.shape[-1]) == 0
    record: list[dict[str, float]] = []
    metrics = student.update(rollout._replace(masks=rollout.masks._replace(slot=slot)), 0.0, record=record)
    choices = [figures["head_choices/slot"] for figures in record]
    assert sum(count > 0 for count in choices) == 1
    assert metrics["head_entropy/slot"] == pytest.approx(max(figures["head_entropy/slot"] for figures in record))
    assert metrics["head_share/slot"] == pytest.approx(sum(choices) / rollout.running.sum().item())


def test_the_rate_is_scaled() -> None:
    student = learner(plain_ppo())
    (rollout,) = rollouts(student, 1)
    metrics = student.update(rollout, 0.0, rate_scale=0.25)
    assert metrics["learning_rate"] == 0.25 * student.settings.learning_rate
    assert metrics["rate_scale"] == 0.25


def test_each_anomaly_is_raised_by_its_own_metric() -> None:
    student = learner(plain_ppo())
    healthy = {**student.update(*rollouts(student, 1), 0.0), "explained_variance": 0.5}
    assert find_anomalies((healthy,), 0.03) == ()
    sick = {
        Anomaly.NON_FINITE: {**healthy, "value_loss": float("nan")},
        Anomaly.RATIO: {**healthy, "first_ratio_deviation": 0.01},
        Anomaly.KL: {**healthy, "kl": 1.0},
        Anomaly.ENTROPY: {**healthy, "head_entropy/op": 0.001},
        Anomaly.EXPLAINED_VARIANCE: {**healthy, "explained_variance": -0.9},
    }
    for anomaly, metrics in sick.items():
        assert name_anomalies(metrics) == [anomaly]
        assert anomaly.meaning


@pytest.mark.parametrize("surrogate", ["joint", "factored"])
@pytest.mark.parametrize("group", [1, 4])
def test_what_follows_an_episodes_end_teaches_nothing(group: int, surrogate: str) -> None:
    def learned(seed: int) -> dict[str, Tensor]:
        """After an update from rollouts that differ only behind the ends of their episodes."""
        student = learner(plain_ppo(group=group, minibatches=2, epochs=2, surrogate=surrogate))
        (rollout,) = rollouts(student, 1)
        running = torch.arange(STEPS).unsqueeze(1) < torch.arange(ENVIRONMENTS) % STEPS + 1
        noise = torch.Generator().manual_seed(seed)

        def spoil(part: Tensor) -> Tensor:
            wide = running.view(*running.shape, *[1] * (part.dim() - 2))
            return torch.where(wide, part, torch.randn(part.shape, generator=noise))

        spoilt = rollout._replace(
            observations=Observation(*(spoil(part) for part in rollout.observations)),
            chosen_log_prob=spoil(rollout.chosen_log_prob),
            value=spoil(rollout.value),
            reward=spoil(rollout.reward),
            final_value=torch.randn(ENVIRONMENTS, generator=noise) * ~running[-1],
            running=running,
        )
        metrics = student.update(spoilt, 0.0)
        assert metrics["optimizer_steps"] > 0
        return {**student.state_tensors(), "loss": torch.tensor(metrics["policy_loss"])}

    assert same(learned(1), learned(2))


class OneHead(Noise):
    """Only the operation has a choice, and it has one in every step."""

    def masks(self, step: int) -> MaskTensors:
        masks = only_ops(self.environments, Op.WAIT, Op.GERMINATE, Op.ADVANCE)
        first = (part & (torch.arange(part.shape[-1]) == 0) for part in masks[1:])
        return MaskTensors(masks.op, *first)


class TwoHeads(OneHead):
    """The slot has a choice too."""

    def masks(self, step: int) -> MaskTensors:
        masks = super().masks(step)
        return masks._replace(slot=only_ops(self.environments, Op.WAIT).slot)


@pytest.mark.parametrize(("kind", "equal"), [(OneHead, True), (TwoHeads, False)])
@pytest.mark.few(1)
def test_a_training_in_which_one_head_alone_chooses_is_the_same_to_the_bit_with_both_surrogates(
    kind: type[Noise], equal: bool
) -> None:
    def trained(surrogate: str) -> dict[str, Tensor]:
        student = learner(plain_ppo(surrogate=surrogate, clip=0.002, target_kl=1e6))
        probe = kind(STEPS, ENVIRONMENTS)
        metrics = [student.update(collect(student.policy, probe), 0.0) for _ in range(3)]
        assert metrics[-1]["clip_fraction"] > 0
        return student.state_tensors()

    assert same(trained("joint"), trained("factored")) == equal


@pytest.mark.parametrize("surrogate", ["joint", "factored"])
@pytest.mark.parametrize("head", list(Head))
@pytest.mark.few(2)
def test_a_heads_entropy_weight_teaches_that_head_and_no_other(head: Head, surrogate: str) -> None:
    """Where nothing is to be won, so that only the bonus of the one head with a weight teaches its output."""
    weights = PerHead.fill(0.0).model_copy(update={head.name.lower(): 1.0})
    settings = plain_ppo(entropy_start=weights, entropy_floor=weights, surrogate=surrogate, target_kl=1e6)
    student = learner(
        settings, sizes=PolicySettings(advice=None, hidden=32, width=16, head_gain=1.0, op_prior=NO_PRIOR)
    )
    probe = Noise(STEPS, ENVIRONMENTS)
    before = collect(student.policy, probe)
    rollout = before._replace(reward=torch.zeros_like(before.reward), value=torch.zeros_like(before.value))
    weights_before = {other: [p.clone() for p in student.policy.heads.output_parameters(other)] for other in Head}
    first, *_, last = (student.update(rollout, 0.0) for _ in range(5))
    name = head.name.lower()
    assert last[f"head_entropy/{name}"] > first[f"head_entropy/{name}"]
    for other, parameters in weights_before.items():
        now = student.policy.heads.output_parameters(other)
        moved = any(not torch.equal(p, q) for p, q in zip(parameters, now, strict=True))
        assert moved == (other == head), other
