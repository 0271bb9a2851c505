"""Whether the learner can learn at all: one ability per probe, each with a control that lacks it."""

import pytest
import torch
from torch import Tensor

from control.situations import NO_PRIOR
from esper.control.policy import PolicySettings
from esper.engine.observation import MaskTensors, Observation
from esper.lifecycle.actions import Head, Op
from esper.rl.ppo import PPO
from esper.rl.rollout import Rollout, RolloutBuffer
from rl.probes import Probe, blank_observation, collect, free_masks, learner, only_ops, plain_ppo, score, train

pytestmark = pytest.mark.landing

QUICK = plain_ppo(
    learning_rate=3e-3, final_learning_rate=1e-3, minibatches=2, entropy_start=0.02, entropy_floor=0.0, target_kl=0.1
)
ENVIRONMENTS = 32


class Fate(Probe):
    """A signal at the first step shows what the last one pays, whatever is done in between."""

    def __init__(self, shown: bool) -> None:
        super().__init__(4, ENVIRONMENTS)
        self.shown = shown

    def reset(self) -> None:
        self.signal = self.coin()

    def observe(self, step: int) -> Observation:
        seen = self.blank()
        if step == 0 and self.shown:
            seen.globals[:, 0] = self.signal
        return seen

    def reward(self, step: int, actions: Tensor) -> Tensor:
        return self.signal * 3 if step == self.steps - 1 else torch.zeros(self.environments)


@pytest.mark.parametrize(("shown", "expected"), [(True, 1.0), (False, 0.0)])
def test_value_explains_returns_that_are_announced_and_no_others(shown: bool, expected: float) -> None:
    *_, last = train(learner(QUICK), Fate(shown), 20)
    assert last["explained_variance"] == pytest.approx(expected, abs=0.1)


class Match(Probe):
    """The signal shows which of two operations pays; a step is an episode. PRUNE pays most but may be forbidden."""

    def __init__(self, forbid_prune: bool, informed: bool = True) -> None:
        super().__init__(1, ENVIRONMENTS)
        self.forbid_prune = forbid_prune
        self.informed = informed

    def reset(self) -> None:
        self.signal = self.coin()

    def observe(self, step: int) -> Observation:
        seen = self.blank()
        seen.globals[:, 1] = self.signal if self.informed else self.coin()
        return seen

    def masks(self, step: int) -> MaskTensors:
        others = (Op.WAIT, Op.GERMINATE, Op.ADVANCE)
        return only_ops(self.environments, *others, *(() if self.forbid_prune else (Op.PRUNE,)))

    def reward(self, step: int, actions: Tensor) -> Tensor:
        op = actions[:, Head.OP]
        right = torch.where(self.signal > 0, Op.GERMINATE, Op.ADVANCE)
        return (op == right).float() + 2.0 * (op == Op.PRUNE)


@pytest.mark.parametrize(
    ("forbid_prune", "informed", "expected"), [(True, True, 1.0), (True, False, 0.5), (False, True, 2.0)]
)
def test_policy_finds_the_best_of_what_is_legal(forbid_prune: bool, informed: bool, expected: float) -> None:
    student, probe = learner(QUICK), Match(forbid_prune, informed)
    for _ in train(student, probe, 30):
        pass
    assert score(student, probe) == pytest.approx(expected, abs=0.2)


class Marked(Probe):
    """GERMINATE is legal at one step in eight; it pays if slot and blueprint are the marked ones."""

    def __init__(self, marked: bool = True) -> None:
        super().__init__(8, ENVIRONMENTS)
        self.marked = marked

    def reset(self) -> None:
        masks = free_masks(self.environments)
        slots, blueprints = masks.blueprint.shape[1:]
        self.slot = torch.randint(slots, (self.environments,), generator=self.random)
        self.blueprint = torch.randint(blueprints, (self.environments,), generator=self.random)

    def observe(self, step: int) -> Observation:
        seen = self.blank()
        if self.marked:
            rows = torch.arange(self.environments)
            seen.slots[rows, self.slot, 0] = 1.0
            seen.blueprints[rows, :, self.blueprint, 1] = 1.0
        return seen

    def masks(self, step: int) -> MaskTensors:
        return only_ops(self.environments, Op.GERMINATE if step == 5 else Op.WAIT)

    def reward(self, step: int, actions: Tensor) -> Tensor:
        if step != 5:
            return torch.zeros(self.environments)
        return (actions[:, Head.SLOT] == self.slot).float() + (actions[:, Head.BLUEPRINT] == self.blueprint).float()


@pytest.mark.parametrize(("marked", "low", "high"), [(True, 1.8, 2.0), (False, 0.5, 1.2)])
def test_pointers_that_rarely_matter_learn_to_point(marked: bool, low: float, high: float) -> None:
    student, probe = learner(QUICK), Marked(marked)
    for _ in train(student, probe, 30):
        pass
    assert low <= score(student, probe) <= high


OPENING = {
    Head.OP: (Op.WAIT, Op.ADVANCE),
    Head.SLOT: (Op.ADVANCE,),
    Head.BLUEPRINT: (Op.GERMINATE,),
    Head.BLEND: (Op.GERMINATE,),
    Head.TEMPO: (Op.GERMINATE,),
    Head.ALPHA_TARGET: (Op.GERMINATE,),
    Head.ALPHA_SPEED: (Op.PRUNE,),
    Head.ALPHA_CURVE: (Op.PRUNE,),
}
"""Operations to which a head is relevant."""


class Pick(Probe):
    """One head has a choice, in one step of ``every``; its second one, which is marked, pays. All else is given."""

    def __init__(self, head: Head, every: int, steps: int, environments: int = ENVIRONMENTS) -> None:
        super().__init__(steps, environments)
        self.head = head
        self.every = every

    def reset(self) -> None:
        pass

    def observe(self, step: int) -> Observation:
        seen = self.blank()
        seen.slots[:, 1, 0] = 1.0
        seen.blueprints[:, :, 1, 1] = 1.0
        return seen

    def masks(self, step: int) -> MaskTensors:
        free = free_masks(self.environments)
        closed = MaskTensors(*(part & (torch.arange(part.shape[-1]) == 0) for part in free))
        if step % self.every:
            return closed
        opened = closed._replace(op=only_ops(self.environments, *OPENING[self.head]).op)
        return opened if self.head is Head.OP else opened._replace(**{self.head.name.lower(): free[self.head]})

    def reward(self, step: int, actions: Tensor) -> Tensor:
        right = OPENING[Head.OP][1] if self.head is Head.OP else 1
        return (actions[:, self.head] == right).float() * (step % self.every == 0)


def gradient(head: Head, surrogate: str, steps: int) -> list[Tensor]:
    """That of the head's own parameters where it has a choice in the first of the ``steps`` alone."""
    settings = QUICK.model_copy(update={"surrogate": surrogate, "gae_lambda": 0.0})
    student = learner(
        settings, sizes=PolicySettings(advice=None, hidden=32, width=16, head_gain=1.0, op_prior=NO_PRIOR)
    )
    batch = student.make_batch(collect(student.policy, Pick(head, steps, steps)))
    assert batch.is_open.sum((0, 1)).tolist() == [ENVIRONMENTS * (other is head) for other in Head]
    advantage = torch.randn(ENVIRONMENTS, generator=torch.Generator().manual_seed(1)).expand(steps, -1)
    PPO(student.policy, settings, 0).backward([batch._replace(advantage=advantage)], torch.zeros(len(Head)))
    return [parameter.grad for parameter in student.policy.heads.output_parameters(head) if parameter.grad is not None]


@pytest.mark.parametrize(("surrogate", "share"), [("factored", 1.0), ("joint", 1 / 30)])
@pytest.mark.parametrize("head", list(Head))
def test_a_head_with_a_choice_in_one_step_of_thirty_gets_the_gradient_of_one_that_always_has_it(
    head: Head, surrogate: str, share: float
) -> None:
    """From the same decisions with the same advantages; with the joint surrogate it gets a thirtieth."""
    rare, always = gradient(head, surrogate, 30), gradient(head, surrogate, 1)
    assert always
    assert any(part.any() for part in always)
    for seldom, ever in zip(rare, always, strict=True):
        torch.testing.assert_close(seldom, share * ever, rtol=1e-4, atol=1e-6)


BANDIT = plain_ppo(
    gamma=1e-6,  # each decision for itself,
    gae_lambda=0.0,
    normalise_advantages=False,  # and as much at stake in it, however rare it is
    learning_rate=1e-2,
    final_learning_rate=1e-2,
    epochs=6,
    minibatches=1,
    entropy_start=0.1,
    entropy_floor=0.1,
    target_kl=1e6,
)


@pytest.mark.parametrize(
    ("surrogate", "every", "low", "high"),
    [("factored", 1, 0.9, 1.0), ("factored", 30, 0.9, 1.0), ("joint", 1, 0.9, 1.0), ("joint", 30, 0.33, 0.6)],
)
def test_a_head_with_a_choice_in_one_step_of_thirty_learns_in_as_few_updates(
    surrogate: str, every: int, low: float, high: float
) -> None:
    """With the joint surrogate the entropy bonus, which is a mean over the head's own steps, outweighs its gradient."""
    sizes = PolicySettings(advice=None, hidden=16, width=8, op_prior=NO_PRIOR)
    student = learner(BANDIT.model_copy(update={"surrogate": surrogate}), sizes=sizes)
    probe = Pick(Head.TEMPO, every, steps=30, environments=64)
    for _ in train(student, probe, 5):
        pass
    memory = student.policy.initial_state(probe.environments)
    step = student.policy.act(probe.observe(0), probe.masks(0), memory)
    assert low <= float(step.head_log_probs[Head.TEMPO][:, 1].exp().mean()) <= high


class Recall(Probe):
    """A cue at the first step, nothing for ``delay`` steps, then the cue decides which operation pays."""

    def __init__(self, delay: int, environments: int = ENVIRONMENTS) -> None:
        super().__init__(delay + 1, environments)

    def reset(self) -> None:
        self.cue = self.coin()

    def observe(self, step: int) -> Observation:
        seen = self.blank()
        if step == 0:
            seen.globals[:, 0] = self.cue
        seen.globals[:, 1] = float(step == self.steps - 1)
        return seen

    def masks(self, step: int) -> MaskTensors:
        last = step == self.steps - 1
        return only_ops(self.environments, *((Op.GERMINATE, Op.PRUNE) if last else (Op.WAIT,)))

    def reward(self, step: int, actions: Tensor) -> Tensor:
        if step < self.steps - 1:
            return torch.zeros(self.environments)
        return (actions[:, Head.OP] == torch.where(self.cue > 0, Op.GERMINATE, Op.PRUNE)).float()


def recall_without_memory(student: PPO, probe: Recall) -> float:
    """The score if the policy forgets everything before each decision."""
    probe.reset()
    empty = student.policy.initial_state(probe.environments)
    rewards = [
        probe.reward(t, student.policy.act(probe.observe(t), probe.masks(t), empty).actions) for t in range(probe.steps)
    ]
    return float(torch.stack(rewards).sum(0).mean())


@pytest.mark.parametrize(
    ("delay", "updates"),
    [(5, 40), pytest.param(50, 100, marks=pytest.mark.slow), pytest.param(120, 150, marks=pytest.mark.slow)],
)
def test_memory_recalls_a_cue(delay: int, updates: int) -> None:
    student = learner(
        QUICK, sizes=PolicySettings(advice=None, hidden=32, width=16, memory=max(delay, 2), op_prior=NO_PRIOR)
    )
    probe = Recall(delay)
    for _ in train(student, probe, updates):
        if score(student, probe) == 1.0:
            break
    assert score(student, probe) == 1.0
    assert 0.2 < recall_without_memory(student, probe) < 0.8


def steady_income(student: PPO, cut: bool) -> Rollout:
    """Five steps of an endless life that pays 1 at each, as a cut episode or, wrongly, as a finished one."""
    steps = 5
    state = student.policy.initial_state(ENVIRONMENTS)
    buffer = RolloutBuffer(state)
    noise = torch.rand(steps, ENVIRONMENTS, len(Head), generator=torch.Generator().manual_seed(0))
    seen, masks = blank_observation(ENVIRONMENTS), free_masks(ENVIRONMENTS)
    for t in range(steps):
        step = student.policy.act(seen, masks, state, noise[t])
        state = step.state
        buffer.add(seen, masks, step, torch.ones(ENVIRONMENTS), torch.ones(ENVIRONMENTS, dtype=torch.bool))
    terminated = torch.full((ENVIRONMENTS,), not cut)
    return buffer.finish(terminated, student.policy.value(seen, state))


@pytest.mark.parametrize(("cut", "expected"), [(True, 5.0), (False, 3.36)])
def test_value_of_a_cut_life_is_that_of_the_whole_and_of_a_finished_one_is_not(cut: bool, expected: float) -> None:
    """With gamma .8 an endless income of 1 is worth 1 / (1 - .8) = 5, five payments (1 - .8**5) / (1 - .8) = 3.36."""
    student = learner(QUICK.model_copy(update={"gamma": 0.8}))
    for update in range(30):
        student.update(steady_income(student, cut), update / 30)
    assert float(steady_income(student, cut).value[0].mean()) == pytest.approx(expected, abs=0.2)


def test_playing_greedily_is_reproducible() -> None:
    student = learner(QUICK)
    first, second = (collect(student.policy, Match(False), greedy=True) for _ in range(2))
    assert torch.equal(first.actions, second.actions)
