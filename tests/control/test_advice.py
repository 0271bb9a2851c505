"""What a rule advises is seen, is what an untrained policy does, and is heeded as much as was learned."""

import numpy as np
import pytest
import torch

from esper.config.loading import load_settings
from esper.control.advice import ADVICE_NAMES, AdviceSettings, append_advice, read_advice
from esper.control.controller import Actions
from esper.control.learned import LearnedController, count_policy_features, name_features
from esper.control.policy import Policy, PolicySettings
from esper.control.rules import LookRule, LookSettings
from esper.engine.config import EpisodeConfig
from esper.engine.observation import FeatureReader
from esper.engine.promises import PromiseSettings
from esper.errors import ConfigError
from esper.lifecycle.actions import RELEVANT, Head, Op
from esper.rl.episodes import Episodes
from esper.train.settings import TrainSettings
from rl.short import SUITE, episodes, instances

OFTEN = PromiseSettings(every=4, first=2, examples=32)
RULE = LookSettings(promise=OFTEN, threshold=0.0)
COUNT = 14


def running() -> Episodes:
    return episodes(instances(COUNT), conduct=EpisodeConfig(promise=OFTEN))


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
    assert changed.promise is not None
    assert changed.promise.every == 5
    assert load_settings(TrainSettings, None, ["policy.advice=null"]).promise is None
    with pytest.raises(ConfigError, match=r"policy\.advice\.rule\.promise"):
        load_settings(TrainSettings, None, ["conduct.promise={every: 8}"])
    with pytest.raises(ConfigError, match="the rule needs both"):
        load_settings(TrainSettings, None, ["policy.advice.rule.promise.shown=fitted"])


def test_an_advisor_needs_promises() -> None:
    game = episodes(instances(2))
    assert not FeatureReader(game.observe()).shows_promise
    with pytest.raises(ConfigError, match="promise"):
        append_advice(LookRule(RULE, SUITE.steps), game.observe(), game.legal_actions())
