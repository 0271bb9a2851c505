"""What a rule advises is seen, is what an untrained policy does, and is heeded as much as was learned."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from esper.config.loading import dump_settings, load_settings
from esper.control.advice import ADVICE_NAMES, AdviceSettings, append_advice, read_advice
from esper.control.controller import Actions
from esper.control.learned import LearnedController, PolicyOrigin, count_policy_features, name_features, restore_policy
from esper.control.policy import Policy, PolicySettings
from esper.control.rules import LookRule, LookSettings
from esper.engine.engine import GrowthConfig
from esper.engine.observation import FeatureReader, Observation, list_features
from esper.errors import CheckpointError, ConfigError
from esper.growth.promise import PromiseSettings
from esper.lifecycle.actions import ALPHA_TARGETS, RELEVANT, TEMPOS, Blend, Head, Op
from esper.lifecycle.rules import ActionMasks, Rules
from esper.rl.episodes import Episodes
from esper.rl.ppo import PPO, PPOSettings
from esper.train.settings import TrainSettings
from open_rules import open_rules
from rl.short import SUITE, episodes, instances

OFTEN = PromiseSettings(every=4, first=2, examples=32)
RULE = LookSettings(promise=OFTEN, threshold=0.0)
COUNT = 14


def running() -> Episodes:
    return episodes(instances(COUNT), growth=GrowthConfig(promise=OFTEN))


def controller(**weights: float) -> LearnedController:
    """A policy that has learned nothing, advised by the rule."""
    settings = PolicySettings(hidden=16, width=8, advice=AdviceSettings(rule=RULE, **weights))
    policy = Policy(count_policy_features(settings, OFTEN), settings, torch.Generator().manual_seed(0))
    return LearnedController(policy, greedy=True, advisor=LookRule(RULE, SUITE.steps))


def decide_beside_the_rule(who: LearnedController) -> tuple[Actions, Actions]:
    """What ``who`` would do and what the rule does in the rule's own episodes: op, slot, blueprint, ``[T, E, 3]``."""
    game, rule, decided = running(), LookRule(RULE, SUITE.steps), list[tuple[Actions, Actions]]()
    state = who.start([one.seed for one in game.instances])
    while not game.finished.all():
        observation, masks = game.observe(), game.legal_actions()
        actions, state = who.act(observation, masks, state)
        ruled, _ = rule.act(observation, masks, None)
        decided.append((actions[:, :3], ruled[:, :3]))
        game.step(ruled)
    own, ruled = (np.stack(part) for part in zip(*decided, strict=True))
    return own, ruled


def test_before_it_learns_a_policy_does_what_it_is_advised() -> None:
    own, rule = decide_beside_the_rule(controller())
    assert {Op.GERMINATE, Op.FOSSILIZE} <= set(rule[..., Head.OP].ravel().tolist()), "the rule must do something"
    np.testing.assert_array_equal(own, rule)


@pytest.mark.landing
def test_advice_of_no_weight_is_not_heeded() -> None:
    own, rule = decide_beside_the_rule(controller(op=0.0, slot=0.0, blueprint=0.0))
    assert (own != rule).any()
    opposed, _ = decide_beside_the_rule(controller(op=-9.0))
    assert (opposed[..., Head.OP] == rule[..., Head.OP]).mean() < 0.5


def test_what_is_shown_is_what_the_rule_does() -> None:
    game, rule = running(), LookRule(RULE, SUITE.steps)
    seen = set[int]()
    while not game.finished.all():
        observation, masks = game.observe(), game.legal_actions()
        actions, _ = rule.act(observation, masks, None)
        shown = append_advice(rule, observation, masks)
        for part, own in zip(shown, observation, strict=True):
            assert torch.equal(part[..., : own.shape[-1]], own)
        advice = read_advice(shown)
        op = actions[:, Head.OP]
        assert torch.equal(advice.ops.argmax(-1), torch.from_numpy(op))
        assert torch.equal(advice.ops.sum(-1), torch.ones(COUNT))
        np.testing.assert_array_equal(advice.slots.sum(-1), RELEVANT[op, Head.SLOT])
        np.testing.assert_array_equal(advice.blueprints.sum((-2, -1)), RELEVANT[op, Head.BLUEPRINT])
        rows = np.arange(COUNT)
        np.testing.assert_array_equal(advice.slots[rows, actions[:, Head.SLOT]], RELEVANT[op, Head.SLOT])
        marked = advice.blueprints[rows, actions[:, Head.SLOT], actions[:, Head.BLUEPRINT]]
        np.testing.assert_array_equal(marked, RELEVANT[op, Head.BLUEPRINT])
        seen |= set(op.tolist())
        game.step(actions)
    assert {Op.WAIT, Op.GERMINATE} < seen


def test_every_feature_has_a_name() -> None:
    settings = PolicySettings()
    names = name_features(settings, OFTEN)
    assert [len(part) for part in names.values()] == list(count_policy_features(settings, OFTEN))
    assert [tuple(part[-len(own) :]) for part, own in zip(names.values(), ADVICE_NAMES, strict=True)] == [*ADVICE_NAMES]
    plain = name_features(PolicySettings(advice=None), OFTEN)
    assert not any("advised" in name for part in plain.values() for name in part)


def test_weights_of_advice_belong_to_their_heads() -> None:
    heads = controller(op=4.0, slot=2.0, blueprint=1.0).policy.heads
    for head, weight in ((Head.OP, 4.0), (Head.SLOT, 2.0), (Head.BLUEPRINT, 1.0)):
        assert [float(one) for one in heads.output_parameters(head) if one.dim() == 0] == [weight]
    assert all(one.dim() for one in heads.output_parameters(Head.TEMPO))


def test_a_policy_without_its_advisor_is_refused() -> None:
    advised, plain = controller().policy, PolicySettings(hidden=8, width=8, advice=None)
    with pytest.raises(ConfigError, match="advisor"):
        LearnedController(advised, greedy=True)
    alone = Policy(count_policy_features(plain, None), plain, torch.Generator().manual_seed(0))
    with pytest.raises(ConfigError, match="advisor"):
        LearnedController(alone, greedy=True, advisor=LookRule(RULE, SUITE.steps))


def test_promises_are_measured_as_the_advisor_wishes() -> None:
    assert controller().promise == OFTEN
    assert TrainSettings().promise == LookSettings().promise
    changed = load_settings(TrainSettings, None, ["policy.advice.rule.promise.every=5"])
    assert changed.promise.every == 5
    assert load_settings(TrainSettings, None, ["policy.advice=null"]).promise is None
    with pytest.raises(ConfigError, match=r"policy\.advice\.rule\.promise"):
        load_settings(TrainSettings, None, ["growth.promise={every: 8}"])
    with pytest.raises(ConfigError, match="the rule needs both"):
        load_settings(TrainSettings, None, ["policy.advice.rule.promise.shown=fitted"])


def test_an_advisor_needs_promises() -> None:
    game = episodes(instances(2))
    assert not FeatureReader(game.observe()).shows_promise
    with pytest.raises(ConfigError, match="promise"):
        append_advice(LookRule(RULE, SUITE.steps), game.observe(), game.legal_actions())


# A policy as controller: greedy or sampled, what it decides for a network does not depend on the others.


SEEDS = (11, 12, 13, 14, 15)
# Large heads, so that choices are far from ties.
SETTINGS = PolicySettings(advice=None, hidden=24, width=16, head_gain=1.0)


def policy() -> Policy:
    return Policy(list_features(False).spec, SETTINGS, torch.Generator().manual_seed(0))


def rows(observation: Observation, masks: ActionMasks, chosen: list[int]) -> tuple[Observation, ActionMasks]:
    own = ActionMasks(**{name: value if name == "grounds" else value[chosen] for name, value in vars(masks).items()})
    return Observation(*(part[chosen] for part in observation)), own


@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "sampled"])
def test_decisions_do_not_depend_on_who_else_is_there(greedy: bool) -> None:
    running = episodes(instances(len(SEEDS)))
    companies = [[0, 1, 2, 3, 4], [2], [3, 2]]
    controllers = [LearnedController(policy(), greedy=greedy) for _ in companies]
    states = [one.start([SEEDS[row] for row in chosen]) for one, chosen in zip(controllers, companies, strict=True)]
    ops: set[int] = set()
    for _ in range(SUITE.steps):
        observation, masks = running.observe(), running.legal_actions()
        decided: list[np.ndarray] = []
        for index, chosen in enumerate(companies):
            actions, states[index] = controllers[index].act(*rows(observation, masks, chosen), states[index])
            decided.append(actions)
        followed = [actions[chosen.index(2)].tolist() for actions, chosen in zip(decided, companies, strict=True)]
        assert followed[1] == followed[0] == followed[2]
        running.step(decided[0])
        ops |= set(decided[0][:, Head.OP].tolist())
    assert greedy or len(ops) >= 4, "the test means to follow networks that grow"


def test_the_greedy_controller_needs_no_seed_and_the_sampled_one_follows_it() -> None:
    running = episodes(instances(4))
    observation, masks = running.observe(), running.legal_actions()

    def first(greedy: bool, seed: int) -> list[list[int]]:
        controller = LearnedController(policy(), greedy=greedy)
        return controller.act(observation, masks, controller.start([seed] * 4))[0].tolist()

    assert first(True, 0) == first(True, 1)
    assert first(False, 0) == first(False, 0)
    assert len({str(first(False, seed)) for seed in range(6)}) > 1


def test_it_remembers() -> None:
    running = episodes(instances(3))
    observation, masks = running.observe(), running.legal_actions()
    controller = LearnedController(policy(), greedy=True)
    state = controller.start(range(3))
    assert not state.memory.output.any()
    _, state = controller.act(observation, masks, state)
    assert state.memory.output.any()


@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "sampled"])
def test_under_open_rules_it_takes_only_choices_that_it_learned_with(greedy: bool) -> None:
    chosen: dict[bool, set[tuple[int, ...]]] = {}
    heads = [Head.BLEND, Head.TEMPO, Head.ALPHA_TARGET, Head.ALPHA_SPEED, Head.ALPHA_CURVE]
    for keeps in (True, False):
        running = episodes(instances(4), rules=open_rules(blends=tuple(Blend)))
        controller = LearnedController(policy(), greedy=greedy, rules=Rules() if keeps else None)
        state = controller.start(range(4))
        found = chosen.setdefault(keeps, set())
        for _ in range(SUITE.steps):
            actions, state = controller.act(running.observe(), running.legal_actions(), state)
            found |= {tuple(row[heads]) for row in actions if row[Head.OP] == Op.GERMINATE}
            assert not keeps or {Op(op) for op in actions[:, Head.OP]} <= set(Rules().operations)
            running.step(actions)
    (only,) = chosen[True]
    assert only == (Blend.ADD, TEMPOS.index(3), ALPHA_TARGETS.index(1.0), 0, 0)
    assert len(chosen[False] | chosen[True]) > 1


# A saved policy comes back as it was, from what a checkpoint and a configuration hold, and nothing else is read.


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


@pytest.mark.landing
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
