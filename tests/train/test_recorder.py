"""The events of a rollout are what happened in it: nothing more, nothing less, and the same however it is split."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from esper.control.rules import Uniform
from esper.lifecycle.actions import Blend, Head, Op, make_wait_actions
from esper.lifecycle.rules import GATES, Rules
from esper.lifecycle.table import Stage
from esper.population.parameters import SeedKind
from esper.rl.episodes import Episodes
from esper.rl.rollout import Rollout, concatenate_rollouts
from esper.runs.events import (
    EpisodeEnded,
    EpisodeStarted,
    GateChecked,
    LifecycleTransition,
    NetworkEvent,
    PolicyLooked,
    RolledBack,
    StepTaken,
    decode_event,
    encode_event,
)
from esper.tasks import registry
from esper.tasks.registry import get_suite, suite_names
from esper.train.evaluation import create_baselines, load_baseline_settings
from esper.train.recorder import EpisodeRecorder, record_interactions
from esper.train.results import KeptPair, SeedShapley, SeedValue
from esper.train.settings import TrainSettings
from esper.train.trainer import ShardResult, ShardTask, collect_rollout, create_policy, sample_instances
from esper.train.workers import Shared
from train.runs import short_suite, started, tiny
from train.test_rollbacks import WildSuite

# An eager policy, so that seeds come, stay and go within a few steps.
EAGER = (
    "policy.advice=null",
    "policy.op_prior={wait: 0.0, germinate: 1.0, fossilize: 2.0, prune: 0.5}",
    "reward=shaped",
)
HEADS = [head.name.lower() for head in Head]
Key = tuple[int, int]
"""Environment, and step or slot."""


@dataclass(frozen=True)
class Recording:
    """The events and results of a rollout, shard by shard."""

    events: list[NetworkEvent]
    results: list[ShardResult]

    def of(self, kind: type) -> list:
        return [event for event in self.events if type(event) is kind]


def test_what_is_not_finite_and_what_is_estimated_is_recorded_as_such():
    seeds = (SeedValue(0, "mlp", 0.123456, 0.0), SeedValue(2, "norm", math.nan, math.nan))
    network = SeedShapley("order/far/1", "order", seeds, (KeptPair(0, 2, -0.000004),))
    exact, estimated = record_interactions(
        3, get_suite("short"), [replace(network, seeds=seeds[:1], pairs=()), network]
    )
    assert (exact.exact, estimated.exact) == (True, False)
    assert [one.value for one in estimated.modules] == [0.12346, None]
    assert [one.slot for one in estimated.modules] == [0, 2]
    assert estimated.pairs[0].interaction == 0
    assert decode_event(estimated.name, estimated.version, encode_event(estimated)) == estimated


def record_rollout(settings: TrainSettings) -> Recording:
    weights = Shared(create_policy(settings).state_dict())
    tasks = [ShardTask(settings, 0, shard, weights) for shard in range(settings.shards)]
    results = [collect_rollout(task) for task in tasks]
    return Recording(
        [decode_event(row.type, row.version, row.payload) for one in results for row in one.events], results
    )


@pytest.fixture(scope="module", autouse=True)
def _suites() -> Iterator[None]:
    with short_suite(), pytest.MonkeyPatch.context() as patch:
        patch.setitem(registry._suites, WildSuite.name, WildSuite)
        yield


@pytest.fixture(scope="module")
def recording(_suites: None) -> Recording:
    return record_rollout(tiny(*EAGER, "environments=16"))


@pytest.fixture(scope="module")
def wild(_suites: None) -> Recording:
    """With networks that blow up until their episodes are ended."""
    return record_rollout(tiny(*EAGER, "suite=wild", "environments=16"))


def stages_of(recording: Recording) -> Iterator[tuple[NetworkEvent, dict[Key, str]]]:
    """Each event with the stages, by environment and slot, that follow from the transitions up to it."""
    stages: dict[Key, str] = defaultdict(lambda: "dormant")
    for event in recording.events:
        if isinstance(event, LifecycleTransition):
            assert stages[event.environment, event.slot] == event.before
            stages[event.environment, event.slot] = event.after
        yield event, stages


@pytest.mark.parametrize("which", ["recording", "wild"])
@pytest.mark.few(1)
def test_transitions_replayed_give_the_stages_of_every_step(which: str, request: pytest.FixtureRequest) -> None:
    seen: Counter[str] = Counter()
    for event, stages in stages_of(request.getfixturevalue(which)):
        if isinstance(event, StepTaken):
            slots = range(len(event.stages))
            assert tuple(stages[event.environment, slot] for slot in slots) == event.stages
            seen.update(event.stages)
    assert {"dormant", "blending", "holding", "fossilized"} <= set(seen), "the test means to see them"


def test_every_episode_is_recorded_from_start_to_end(recording: Recording) -> None:
    steps = get_suite("short").steps
    (result,) = recording.results
    assert [event.instance for event in recording.of(EpisodeStarted)] == [one.name for one in result.log.instances]
    assert [event.environment for event in recording.of(EpisodeEnded)] == list(range(16))
    taken = Counter(event.environment for event in recording.of(StepTaken))
    assert taken == dict.fromkeys(range(16), steps)


@pytest.mark.parametrize("which", ["recording", "wild"])
def test_rewards_are_the_sums_of_their_terms_and_add_up_to_what_was_paid(
    which: str, request: pytest.FixtureRequest
) -> None:
    recording: Recording = request.getfixturevalue(which)
    paid: dict[int, float] = defaultdict(float)
    for event in recording.of(StepTaken):
        assert event.reward is not None
        assert event.reward == pytest.approx(sum(event.terms.values()), abs=1e-4)
        paid[event.environment] += event.reward
    for event in recording.of(EpisodeEnded):
        assert event.paid == pytest.approx(paid[event.environment], abs=1e-3)
    assert len({tuple(event.terms) for event in recording.of(StepTaken)}) > 2, "both modes, and interventions"


@pytest.mark.parametrize("which", ["recording", "wild"])
def test_ends_are_those_of_the_tally(which: str, request: pytest.FixtureRequest) -> None:
    recording: Recording = request.getfixturevalue(which)
    (result,) = recording.results
    for event in recording.of(EpisodeEnded):
        row = event.environment
        assert event.objective == result.log.objective[row]
        assert event.added == result.log.added[row]
        assert [name is not None for name in event.kept] == result.log.kept[row].tolist()
    assert any(any(event.kept) for event in recording.of(EpisodeEnded))


def test_events_do_not_depend_on_the_number_of_shards(recording: Recording) -> None:
    def ordered(events: list[NetworkEvent]) -> list[NetworkEvent]:
        return sorted(events, key=lambda event: (event.environment, event.step, event.name))

    split = record_rollout(tiny(*EAGER, "environments=16", "shards=2"))
    assert ordered(split.events) == ordered(recording.events)


def test_watched_networks_record_how_likely_their_choices_were(recording: Recording) -> None:
    (result,) = recording.results
    decisions = {(event.environment, event.step): event for event in recording.of(StepTaken)}
    suite = get_suite("short")
    looked = recording.of(PolicyLooked)
    assert {event.environment for event in looked} == {0, 4, 8, 12}
    assert len(looked) == 4 * suite.steps
    for event in looked:
        decision = decisions[event.environment, event.step]
        chosen = 1.0
        for head, probabilities in event.probabilities.items():
            assert sum(probabilities) == pytest.approx(1, abs=1e-4)
            chosen *= probabilities[int(result.log.steps[event.step][event.environment][HEADS.index(head)])]
        assert decision.log_prob is not None
        assert chosen == pytest.approx(2.718281828**decision.log_prob, rel=5e-3, abs=5e-5)
    assert {len(event.probabilities) for event in looked} == {1, 2, 4, 6}, "wait; fossilize; prune; germinate"


def test_gates_judge_the_stage_that_the_seed_is_in(recording: Recording) -> None:
    """Before a decision, by what was measured after the one before it."""
    before: dict[Key, StepTaken] = {(event.environment, event.step + 1): event for event in recording.of(StepTaken)}
    judged: Counter[tuple[str, bool]] = Counter()
    for event in recording.of(GateChecked):
        known = before[event.environment, event.step]
        assert event.gate == GATES[Stage[known.stages[event.slot].upper()]]
        assert event.passed == (event.reason == "passed")
        if event.gate == "G3":
            assert event.passed == (known.alphas[event.slot] == 1.0)
        if event.gate == "G5":
            contribution = known.contributions[event.slot]
            assert contribution is not None
            assert event.reason == ("passed" if contribution >= 0 else "harmful")
        judged[event.gate, event.passed] += 1
    assert set(judged) >= {("G1", True), ("G3", False), ("G5", True), ("G5", False)}


def test_gate_g2_goes_by_the_gradient_figures_of_the_decision_before() -> None:
    """With a bound so low that some seeds fail."""
    bound, ratio = 0.3, 1.5
    isolated = "rules={isolation: shadow, min_training_steps: 1, operations: [wait, germinate, advance, prune]}"
    health = f"growth.gradient_health={{max_share: {bound}, exploded_ratio: {ratio}}}"
    recording = record_rollout(tiny(EAGER[0], isolated, health, "environments=16"))
    before: dict[Key, StepTaken] = {(event.environment, event.step + 1): event for event in recording.of(StepTaken)}
    reasons = Counter[str]()
    for event in recording.of(GateChecked):
        if event.gate != "G2":
            continue
        known = before[event.environment, event.step]
        vanished, exploded = known.vanished_shares[event.slot], known.exploded_shares[event.slot]
        healthy = vanished is not None and exploded is not None and max(vanished, exploded) <= bound
        assert event.reason == ("passed" if healthy else "gradient_unhealthy")
        reasons[event.reason] += 1
    assert set(reasons) == {"passed", "gradient_unhealthy"}, "the test means to see both"
    ratios = [ratio for event in recording.of(StepTaken) for ratio in event.gradient_ratios if ratio is not None]
    assert min(ratios) < ratio < max(ratios)
    for event in recording.of(StepTaken):
        measured = [share is not None for share in event.vanished_shares]
        assert [share is not None for share in event.exploded_shares] == measured
        assert all(blueprint is not None for blueprint, one in zip(event.blueprints, measured, strict=True) if one)


def test_a_seed_is_judged_in_every_stage_that_has_a_gate_ahead(recording: Recording) -> None:
    judged = {(event.environment, event.slot, event.step, event.gate) for event in recording.of(GateChecked)}
    changed = {(event.environment, event.slot, event.step): event for event in recording.of(LifecycleTransition)}
    entered = [event for event in changed.values() if Stage[event.after.upper()] in GATES]
    for event in entered:
        at = event.environment, event.slot, event.step + 1
        if event.step + 1 < get_suite("short").steps:
            assert (*at, GATES[Stage[event.after.upper()]]) in judged
    assert len(entered) > 10


def test_without_steps_only_changes_verdicts_and_ends_are_recorded(recording: Recording) -> None:
    brief = record_rollout(tiny(*EAGER, "environments=16", "telemetry.steps_every=0"))
    assert brief.events == [event for event in recording.events if not isinstance(event, (StepTaken, PolicyLooked))]
    assert Counter(map(type, brief.events)).keys() >= {LifecycleTransition, GateChecked, EpisodeEnded}


def test_nothing_is_told_of_an_episode_after_its_end(wild: Recording) -> None:
    over: set[int] = set()
    for event in wild.events:
        assert event.environment not in over, event
        if isinstance(event, EpisodeEnded):
            over.add(event.environment)
    early = [event for event in wild.of(EpisodeEnded) if event.step < get_suite("wild").steps - 1]
    assert early, "the test means to have some"
    assert {event.environment for event in wild.of(RolledBack) if event.ended} == {one.environment for one in early}


def test_blends_are_recorded_as_they_are_computed() -> None:
    suite = get_suite("short")
    chosen = suite.sample(8, "train", np.random.default_rng(1))
    rules = Rules(operations=(Op.WAIT, Op.GERMINATE, Op.PRUNE), cooldown=(1, 1, 1), blends=tuple(Blend))
    episodes, controller = Episodes(suite, chosen, rules), Uniform()
    recorder = EpisodeRecorder(episodes, events="steps")
    state, blends = controller.start([one.seed for one in chosen]), Counter[str]()
    for _ in range(suite.steps):
        actions, state = controller.act(episodes.observe(), episodes.legal_actions(), state)
        for event in recorder.record_step(actions, episodes.step(actions)):
            if isinstance(event, StepTaken) and event.op == "germinate":
                assert event.slot is not None
                assert event.blueprint is not None
                blend = Blend[event.choices["blend"].upper()]
                kind = SeedKind(event.slot, suite.blueprints.index(event.blueprint), blend)
                assert event.environment in episodes.population.banks[kind].block.owners
                blends[event.choices["blend"]] += 1
    assert set(blends) == {"add", "gate", "multiply"}


# Twins wait beside the networks of their groups and disturb nobody.


SHAPED = "reward=shaped"


def collected(settings: TrainSettings, shard: int = 0) -> ShardResult:
    task = ShardTask(settings, 0, shard, Shared(create_policy(settings).state_dict()))
    return collect_rollout(task)


def tensors(rollout: Rollout) -> list[torch.Tensor]:
    parts = (*rollout.observations, *rollout.masks, *rollout.state)
    return [*parts, rollout.actions, rollout.chosen_log_prob, rollout.value, rollout.reward, rollout.running]


def alone(settings: TrainSettings, environment: int) -> np.ndarray:
    """What the environment's network earns if it only waits, with nobody beside it."""
    rewards = [settings.reward[0].at_progress(0.0)]
    shard, row = divmod(environment, settings.environments // settings.shards)
    instance = sample_instances(settings, 0, shard)[row]
    episodes = Episodes(get_suite(settings.suite), [instance], settings.rules, settings.growth, rewards=rewards)
    return np.stack([episodes.step(make_wait_actions(1)).reward[0] for _ in range(episodes.suite.steps)])


@pytest.mark.landing
def test_twins_change_nothing_but_what_is_known_of_them() -> None:
    plain, beside = collected(tiny(SHAPED)), collected(tiny(SHAPED, "ppo.no_growth_baseline=true"))
    assert all(torch.equal(a, b) for a, b in zip(tensors(plain.rollout), tensors(beside.rollout), strict=True))
    assert np.array_equal(plain.log.objective, beside.log.objective)
    assert np.array_equal(plain.log.actions, beside.log.actions)
    assert not plain.rollout.control_variate.any()
    assert plain.baseline_steps == 0
    assert beside.baseline_steps == 2 * get_suite("short").steps


@pytest.mark.landing
@pytest.mark.parametrize("group", [1, 2])
def test_a_twin_earns_what_waiting_pays_on_the_groups_instance(group: int) -> None:
    settings = tiny(SHAPED, "ppo.no_growth_baseline=true", f"ppo.group={group}", "shards=2")
    rollout = concatenate_rollouts([collected(settings, shard).rollout for shard in range(2)])
    for environment in (0, 2, 5, 7):
        expected = torch.from_numpy(alone(settings, environment)).float()
        torch.testing.assert_close(rollout.control_variate[:, environment], expected, atol=1e-5, rtol=1e-4)
    assert rollout.control_variate.abs().max() > 0.01
    assert not torch.equal(rollout.control_variate[:, 0], rollout.control_variate[:, 4])


@pytest.mark.landing
def test_a_run_with_twins_learns_and_counts_their_steps(tmp_path) -> None:
    steps = get_suite("short").steps
    settings = tiny("iterations=1", "ppo.no_growth_baseline=true", "ppo.group=2")
    with started(tmp_path / "twins", settings) as trainer:
        reported = []
        trainer.train(reported.append)
        learned = trainer.learner.state_tensors()
    plain = settings.model_copy(update={"ppo": settings.ppo.model_copy(update={"no_growth_baseline": False})})
    with started(tmp_path / "plain", plain) as trainer:
        trainer.train(reported.append)
        other = trainer.learner.state_tensors()
    beside, without = reported
    assert without.figures["environment_steps"] == 8 * steps
    assert beside.figures["environment_steps"] == (8 + 4) * steps
    assert beside.figures["objective"] == without.figures["objective"]
    assert not torch.equal(learned["policy.value_head.returns.mean"], other["policy.value_head.returns.mean"])


# Every suite has the controllers that a policy is compared with.


@pytest.mark.parametrize("name", suite_names())
def test_every_suite_has_baselines_that_fit_it(name: str) -> None:
    suite = get_suite(name)
    settings = load_baseline_settings(suite)
    places = [*settings.all_at_start, *settings.schedule, *settings.periodic.plantings, *settings.heuristic.preferences]
    assert all(slot < len(suite.sites) and kind < len(suite.blueprints) for slot, kind in places)
    assert [controller.name for controller in create_baselines(suite)] == [
        "none",
        "random",
        "all_at_start",
        "schedule",
        "periodic",
        "heuristic",
        "look",
    ]
