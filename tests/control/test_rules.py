"""Hand-written controllers: always legal, as shrewd as they claim; recorded actions come back as far as legal."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from control.situations import HORIZON, SLOTS, Situation, fossil, holding, index_of
from esper.control.controller import Controller
from esper.control.rules import (
    Heuristic,
    HeuristicSettings,
    LookRule,
    LookSettings,
    Never,
    Periodic,
    PeriodicSettings,
    Planting,
    Replay,
    Schedule,
    Uniform,
    compute_seed_rents,
    shuffle_actions,
)
from esper.engine.engine import GrowthConfig
from esper.engine.observation import Observation
from esper.errors import ConfigError
from esper.growth.promise import PromiseSettings
from esper.lifecycle.actions import ALPHA_TARGETS, Curve, Head, Op, make_action, make_wait_actions
from esper.lifecycle.rules import ActionMasks, Isolation, Rules
from esper.lifecycle.table import Stage
from open_rules import open_rules
from rl.short import QUICK, SUITE, episodes, instances, play

MLP, NORM, ATTENTION = (index_of(name) for name in ("mlp", "norm", "attention"))
PAIRS = tuple((slot, kind) for kind in range(len(SUITE.blueprints)) for slot in range(SLOTS))
NARROW = open_rules(
    cooldown=(1, 1, 1), tempos=(5,), alpha_targets=(0.5, 0.7), alpha_speeds=(3, 8), alpha_curves=(Curve.COSINE,)
)
RULE_SETS = {
    "none": QUICK,
    "shadow": open_rules(isolation=Isolation.SHADOW, cooldown=(1, 1, 1), min_training_steps=1),
    "narrow": NARROW,
    "no pruning": open_rules(operations=(Op.WAIT, Op.GERMINATE, Op.FOSSILIZE), harm_tolerance=1.0),
    "no fossils": open_rules(operations=(Op.WAIT, Op.GERMINATE, Op.PRUNE), cooldown=(1, 1, 1)),
    "only waiting": open_rules(operations=(Op.WAIT,)),
}


OFTEN = PromiseSettings(every=1, first=1, examples=32)
LOOKING = GrowthConfig(promise=OFTEN)


def controllers() -> list[Controller]:
    horizon = SUITE.steps
    return [
        Never(),
        Uniform(),
        Schedule([Planting(0, 0, MLP), Planting(0, 2, NORM), Planting(4, 1, ATTENTION)], horizon, "schedule"),
        Periodic(PeriodicSettings(period=1, plantings=PAIRS, probation=1), horizon),
        Heuristic(HeuristicSettings(preferences=PAIRS, probation=1, stop_after=1.0), horizon),
        LookRule(LookSettings(promise=OFTEN, threshold=0.0, probation=1, stop_after=1.0), horizon),
    ]


@pytest.mark.landing
@pytest.mark.parametrize("rules", RULE_SETS.values(), ids=RULE_SETS.keys())
@pytest.mark.parametrize("controller", controllers(), ids=lambda controller: controller.name)
def test_every_action_is_legal(controller: Controller, rules: Rules) -> None:
    running = episodes(instances(7), rules, LOOKING)
    play(running, controller)  # an illegal action raises
    assert running.finished.all()


@pytest.mark.landing
def test_the_controllers_do_what_they_are_for() -> None:
    done: dict[str, set[int]] = {}
    for controller in controllers():
        running = episodes(instances(14), growth=LOOKING)
        controller_ops: set[int] = set()
        state = controller.start(range(14))
        while not running.finished.all():
            actions, state = controller.act(running.observe(), running.legal_actions(), state)
            running.step(actions)
            controller_ops |= set(actions[:, Head.OP].tolist())
        done[controller.name] = controller_ops
    growing = {Op.WAIT, Op.GERMINATE, Op.FOSSILIZE}
    assert done["none"] == {Op.WAIT}
    assert done["random"] == {*Op} - {Op.ADVANCE}
    assert done["schedule"] == growing
    assert done["periodic"] == done["heuristic"] == done["look"] == growing | {Op.PRUNE}


def test_random_draws_do_not_depend_on_neighbours() -> None:
    everyone = instances(6)
    running = episodes(everyone)
    together, alone = Uniform(), Uniform()
    state, own = together.start(range(6)), alone.start([4])
    for _ in range(SUITE.steps):
        masks = running.legal_actions()
        actions, state = together.act(running.observe(), masks, state)
        mine, own = alone.act(running.observe(), _row(masks, 4), own)
        assert mine[0].tolist() == actions[4].tolist()
        running.step(actions)


def _row(masks: ActionMasks, row: int) -> ActionMasks:
    return ActionMasks(**{name: value if name == "grounds" else value[[row]] for name, value in vars(masks).items()})


def test_random_choices_are_uniform_over_what_is_legal() -> None:
    observation, masks = Situation(rules=open_rules()).observe()
    count = 6000
    many = ActionMasks(
        **{k: v if k == "grounds" else np.repeat(v, count, axis=0) for k, v in vars(masks).items()}
    )  # fmt: skip
    controller = Uniform()
    actions, _ = controller.act(observation, many, controller.start(range(count)))
    germinating = actions[actions[:, Head.OP] == Op.GERMINATE]
    assert abs(len(germinating) / count - 1 / 2) < 0.03
    for head, choices in ((Head.SLOT, SLOTS), (Head.BLUEPRINT, len(SUITE.blueprints)), (Head.TEMPO, 3)):
        shares = np.bincount(germinating[:, head], minlength=choices) / len(germinating)
        np.testing.assert_allclose(shares, 1 / choices, atol=0.04)


def decide(controller: Controller, situation: Situation) -> list[int]:
    """The first three heads: operation, slot, blueprint."""
    observation, masks = situation.observe()
    actions, _ = controller.act(observation, masks, controller.start([0]))
    return actions[0, :3].tolist()


def heuristic(**settings: object) -> Heuristic:
    return Heuristic(HeuristicSettings.model_validate({"preferences": PAIRS, "probation": 6, **settings}), HORIZON)


def periodic(**settings: object) -> Periodic:
    return Periodic(PeriodicSettings.model_validate({"stop_after": 0.0, "probation": 6, **settings}), HORIZON)


def look(**settings: object) -> LookRule:
    defaults = {"probation": 6, "fitted": 0.5, "price": 0.0, "size": 0.0, "early": 0.2}
    return LookRule(LookSettings.model_validate({**defaults, **settings}), HORIZON)


MARGINS = pytest.mark.parametrize("judge", [heuristic, periodic], ids=["heuristic", "periodic"])
JUDGES = pytest.mark.parametrize("judge", [heuristic, periodic, look], ids=["heuristic", "periodic", "look"])


def contributing(*accuracy: float, **others: object) -> Situation:
    slots = {slot: holding("mlp") for slot, value in enumerate(accuracy) if np.isfinite(value)}
    return Situation(**{"slots": slots, "accuracy_contribution": accuracy, "progress": 0.9, **others})


NAN = float("nan")


@JUDGES
@pytest.mark.parametrize("rent", [0.0, 0.1])
def test_a_seed_that_was_not_measured_is_not_judged(judge, rent: float) -> None:
    unknown = Situation(slots={0: holding("mlp")}, progress=0.9, rent=rent)
    assert decide(judge(), unknown)[0] == Op.WAIT


@JUDGES
@pytest.mark.parametrize("slot", range(SLOTS))
def test_every_slot_is_judged(judge, slot: int) -> None:
    good, bad = [NAN] * SLOTS, [NAN] * SLOTS
    good[slot], bad[slot] = 0.2, -0.2
    assert decide(judge(), contributing(*good))[:2] == [Op.FOSSILIZE, slot]
    assert decide(judge(), contributing(*bad))[:2] == [Op.PRUNE, slot]


@JUDGES
def test_a_seed_that_is_not_due_does_not_hide_one_that_is(judge) -> None:
    slots = {0: holding("mlp", age=2), 1: fossil("mlp"), 2: holding("mlp", age=7)}
    assert decide(judge(), Situation(slots, 0.9, accuracy_contribution=(0.1, 0.1, 0.1)))[:2] == [Op.FOSSILIZE, 2]


@JUDGES
def test_a_seed_is_judged_after_its_trial_and_not_before(judge) -> None:
    for age, op in ((5, Op.WAIT), (6, Op.FOSSILIZE)):
        situation = contributing(0.2, NAN, NAN, slots={0: holding("mlp", age=age)})
        assert decide(judge(), situation)[0] == op, age


@pytest.mark.parametrize(
    ("loss", "error", "standard_errors", "kept"),
    [
        (0.05, 0.02, 1.0, True),
        (0.05, 0.06, 1.0, False),
        (0.05, 0.06, 0.5, True),
        (-0.05, 0.06, 0.0, False),
        # Without an error the sign decides.
        (1e-6, NAN, 2.0, True),
        (-1e-6, NAN, 2.0, False),
    ],
)
@pytest.mark.parametrize("slot", range(SLOTS))
def test_a_seed_is_kept_where_the_loss_is_lower_beyond_noise(
    loss: float, error: float, standard_errors: float, kept: bool, slot: int
) -> None:
    contribution, losses, errors = np.full((3, SLOTS), NAN)
    contribution[slot], losses[slot], errors[slot] = 0.2, loss, error
    situation = contributing(*contribution, history={"loss_contribution": losses, "loss_error": errors})
    assert decide(look(standard_errors=standard_errors), situation)[:2] == [Op.FOSSILIZE if kept else Op.PRUNE, slot]


def test_a_lower_loss_does_not_pay_the_rent_of_a_seed() -> None:
    history = {"loss_contribution": (0.5, NAN, NAN), "loss_error": (0.01, NAN, NAN)}
    assert decide(look(), contributing(0.05, NAN, NAN, rent=0.0, history=history))[0] == Op.FOSSILIZE
    assert decide(look(), contributing(0.05, NAN, NAN, rent=0.5, history=history))[0] == Op.PRUNE
    assert decide(look(), contributing(-0.01, NAN, NAN, rent=0.0, history=history))[0] == Op.PRUNE


@JUDGES
@pytest.mark.parametrize("rent", [0.0, 0.08, 0.5])
@pytest.mark.parametrize("margin", [0.0, 0.02])
def test_the_rating_of_seeds_that_explains_is_the_one_that_decides(judge, rent: float, margin: float) -> None:
    margin = 0.0 if judge is look else margin
    rule = judge() if judge is look else judge(margin=margin)
    for contribution in np.linspace(-0.05, 0.35, 9):
        situation = contributing(contribution, NAN, NAN, rent=rent)
        rating = rule.rate_seeds(situation.observe()[0])
        kept = decide(rule, situation)[0] == Op.FOSSILIZE
        assert kept == rating.worth_keeping[0, 0] == (rating.contribution[0, 0] >= rating.threshold[0, 0])
        assert rating.contribution[0, 0] == pytest.approx(contribution, abs=1e-6)
        np.testing.assert_allclose(rating.threshold, rating.price + margin, atol=1e-6)
        np.testing.assert_array_equal(rating.price, compute_seed_rents(situation.read()))
        assert np.isnan(rating.contribution[0, 1:]).all()
        assert not rating.worth_keeping[0, 1:].any()


def test_a_seed_s_rent_is_what_the_network_would_save_without_it() -> None:
    slots = {0: holding("mlp"), 1: fossil("attention")}
    rent = compute_seed_rents(Situation(slots, rent=0.08).read())[0]
    paid = Situation(slots, rent=0.08).read().network("rent_paid")[0]
    without_first = Situation({1: slots[1]}, rent=0.08).read().network("rent_paid")[0]
    without_second = Situation({0: slots[0]}, rent=0.08).read().network("rent_paid")[0]
    np.testing.assert_allclose(rent, [paid - without_first, paid - without_second, 0.0], atol=1e-6)
    assert rent[0] > 0.01


@JUDGES
def test_a_seed_that_may_not_be_kept_yet_is_left_alone(judge) -> None:
    unmeasured = contributing(0.2, NAN, NAN, measurements=(NAN, NAN, NAN))
    assert decide(judge(), unmeasured)[0] == Op.WAIT


@pytest.mark.parametrize("rule", [heuristic, periodic, lambda: Schedule([], HORIZON)])
def test_every_rule_that_plants_advances_isolated_seeds_first(rule) -> None:
    training = {**holding("mlp"), "stage": Stage.TRAINING, "alpha": 0.0}
    situation = Situation(
        {0: holding("mlp"), 2: training}, accuracy_contribution=(0.2, NAN, 0.1), rules=RULE_SETS["shadow"]
    )
    assert decide(rule(), situation)[:2] == [Op.ADVANCE, 2]


@pytest.mark.parametrize(
    ("situation", "settings", "expected"),
    [
        (Situation(), {}, [Op.GERMINATE, 0, 0]),
        (Situation(), {"preferences": ((2, 4), (0, 0))}, [Op.GERMINATE, 2, 4]),
        (Situation({2: fossil("mlp")}), {"preferences": ((2, 4), (0, 1))}, [Op.GERMINATE, 0, 1]),
        (Situation(progress=0.7), {}, [Op.WAIT, 0, 0]),
        (Situation(progress=0.7), {"stop_after": 0.7}, [Op.GERMINATE, 0, 0]),
        (Situation(), {"patience": 3.0}, [Op.WAIT, 0, 0]),
        (Situation(history={"plateau_age": 3}), {"patience": 3.0}, [Op.GERMINATE, 0, 0]),
        (Situation({1: holding("mlp", age=1)}), {"at_a_time": 1}, [Op.WAIT, 0, 0]),
        (Situation({1: fossil("mlp")}), {"at_a_time": 1}, [Op.GERMINATE, 0, 0]),
        (Situation({1: fossil("mlp")}), {"most": 1}, [Op.WAIT, 0, 0]),
        (Situation(), {"preferences": ((1, 4), (0, 1)), "narrowest": 0.5}, [Op.GERMINATE, 0, 1]),
        (Situation(), {"preferences": ((1, 4), (2, 1)), "narrowest": 0.6}, [Op.GERMINATE, 2, 1]),
        (Situation(), {"preferences": ((1, 4),), "narrowest": 0.5}, [Op.WAIT, 0, 0]),
    ],
)
def test_what_the_heuristic_tries(situation: Situation, settings: dict[str, object], expected: Sequence[int]) -> None:
    assert decide(heuristic(**settings), situation) == list(expected)


def test_the_heuristic_tries_something_else_next_time() -> None:
    preferences = ((0, MLP), (0, NORM), (0, ATTENTION))
    tries = np.zeros((SLOTS, len(SUITE.blueprints)))
    expected = [MLP, NORM, ATTENTION, MLP, NORM]
    for blueprint in expected:
        situation = Situation(history={"tries": tries.copy()})
        assert decide(heuristic(preferences=preferences), situation) == [Op.GERMINATE, 0, blueprint]
        tries[0, blueprint] += 1


def test_germinations_are_fast_and_full() -> None:
    situation = Situation(rules=NARROW)
    observation, masks = situation.observe()
    actions, _ = heuristic().act(observation, masks, None)
    assert actions[0, Head.TEMPO] == 1, "the fastest that the rules allow, 5 steps"
    assert ALPHA_TARGETS[actions[0, Head.ALPHA_TARGET]] == 0.7, "the largest that the rules allow"


def timeline(controller: Controller, steps: int) -> list[list[int]]:
    """What a controller does first to last in one network, by operation, slot and blueprint."""
    running = episodes(instances(1), open_rules(cooldown=(1, 1, 1), harm_tolerance=1.0))
    state, seen = controller.start([0]), []
    for _ in range(steps):
        actions, state = controller.act(running.observe(), running.legal_actions(), state)
        seen.append(actions[0, :3].tolist())
        running.step(actions)
    return seen


def test_a_schedule_plants_on_time_one_at_a_time_and_keeps_what_it_may() -> None:
    plan = [Planting(0, 0, MLP), Planting(0, 1, NORM), Planting(3, 0, ATTENTION)]
    seen = timeline(Schedule(plan, SUITE.steps, keep_after=2), 10)
    assert seen[:2] == [[Op.GERMINATE, 0, MLP], [Op.GERMINATE, 1, NORM]]
    # GERMINATED at 0, BLENDING at 1 to 3, HOLDING from 4: with age 2 after step 5, and the second one a step later.
    assert seen[2:8] == [[Op.WAIT, 0, 0]] * 4 + [[Op.FOSSILIZE, 0, 0], [Op.FOSSILIZE, 1, 0]]
    assert seen[8:] == [[Op.WAIT, 0, 0]] * 2, "the third planting's slot is taken for good"


@pytest.mark.parametrize(
    ("age", "progress", "plants"), [(0, 0.6, False), (2, 0.6, False), (3, 0.6, True), (0, 0.7, True)]
)
def test_a_patient_schedule_waits_for_a_plateau_or_its_latest_time_and_only_once(
    age: int, progress: float, plants: bool
) -> None:
    patient = Schedule([Planting(0, 0, MLP), Planting(0, 1, NORM)], HORIZON, patience=3, latest=0.6)
    observation, masks = Situation(history={"plateau_age": age}, progress=progress).observe()
    actions, begun = patient.act(observation, masks, patient.start([0]))
    assert actions[0, Head.OP] == (Op.GERMINATE if plants else Op.WAIT)
    observation, masks = Situation({0: fossil("mlp")}, history={"plateau_age": 0}, progress=0.5).observe()
    after = patient.act(observation, masks, begun)[0]
    assert after[0, :3].tolist() == ([Op.GERMINATE, 1, NORM] if plants else [Op.WAIT, 0, 0])


def test_the_periodic_rule_goes_by_the_clock() -> None:
    settings = PeriodicSettings(period=2, plantings=((0, MLP), (1, NORM)), probation=100, stop_after=0.5)
    seen = timeline(Periodic(settings, SUITE.steps), 8)
    assert seen[:3] == [[Op.GERMINATE, 0, MLP], [Op.WAIT, 0, 0], [Op.GERMINATE, 1, NORM]]
    assert seen[3:] == [[Op.WAIT, 0, 0]] * 5, "its slots are taken"


def test_controllers_are_deterministic_in_their_seeds() -> None:
    observation, masks = Situation().observe()
    for controller in controllers():
        first, second = (controller.act(observation, masks, controller.start([7]))[0] for _ in range(2))
        assert first.tolist() == second.tolist()
    draws = {tuple(Uniform().act(observation, masks, Uniform().start([seed]))[0][0]) for seed in range(20)}
    assert len(draws) > 5


@JUDGES
def test_an_observation_of_many_is_decided_row_by_row(judge) -> None:
    situations = [contributing(0.2, NAN, NAN), contributing(NAN, -0.2, NAN), Situation(), promising()]
    seen = [situation.observe() for situation in situations]
    together = Observation(*(torch.cat(parts) for parts in zip(*(one for one, _ in seen), strict=True)))
    masks = ActionMasks(
        **{
            name: value if name == "grounds" else np.concatenate([getattr(one, name) for _, one in seen])
            for name, value in vars(seen[0][1]).items()
        }
    )
    rule = judge()
    actions, _ = rule.act(together, masks, rule.start(range(len(situations))))
    assert actions[:, :3].tolist() == [decide(judge(), situation) for situation in situations]


def recorded(count: int) -> tuple[np.ndarray, list[float]]:
    """Actions of a random controller, and J of what they led to."""
    running, controller = episodes(instances(count)), Uniform()
    state, taken = controller.start(range(count)), []
    while not running.finished.all():
        actions, state = controller.act(running.observe(), running.legal_actions(), state)
        running.step(actions)
        taken.append(actions)
    return np.stack(taken), running.potential.tolist()


def test_the_same_actions_on_the_same_networks_lead_to_the_same_end() -> None:
    actions, objective = recorded(5)
    running = episodes(instances(5))
    seeds = [one.seed for one in running.instances]
    replay = Replay({seed: actions[:, place] for place, seed in enumerate(seeds)})
    state, taken = replay.start(seeds), []
    while not running.finished.all():
        chosen, state = replay.act(running.observe(), running.legal_actions(), state)
        running.step(chosen)
        taken.append(chosen)
    np.testing.assert_array_equal(np.stack(taken), actions)
    assert running.potential.tolist() == objective


def test_what_is_not_legal_or_not_recorded_is_waiting() -> None:
    running = episodes(instances(2))
    seeds = [one.seed for one in running.instances]
    recording = {
        seeds[0]: np.stack([make_action(Op.PRUNE, 1), make_action(Op.GERMINATE, 0, 1)]),
        seeds[1]: make_wait_actions(1),
    }
    replay = Replay(recording)
    state = replay.start(seeds)
    ops: list[list[int]] = []
    for _ in range(3):
        chosen, state = replay.act(running.observe(), running.legal_actions(), state)
        running.step(chosen)
        ops.append(chosen[:, 0].tolist())
    assert ops == [[Op.WAIT, Op.WAIT], [Op.GERMINATE, Op.WAIT], [Op.WAIT, Op.WAIT]]


@pytest.mark.parametrize("count", [2, 3, 17])
def test_shuffled_gives_everybody_the_actions_of_somebody_else(count: int) -> None:
    actions = np.arange(count)[None, :, None] + np.zeros((SUITE.steps, count, 8), np.int64)
    seeds = [100 + place for place in range(count)]
    _, sequences = shuffle_actions(actions, seeds, np.random.default_rng(0)).start(seeds)
    donors = [int(sequence[0, 0]) for sequence in sequences]
    assert sorted(donors) == list(range(count))
    assert all(donor != place for place, donor in enumerate(donors))


def test_what_cannot_be_replayed_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"the actions for seed 3 are \(8,\), but must be \[T, 8\]"):
        Replay({3: np.zeros(8, np.int64)})
    with pytest.raises(ConfigError, match="no actions were recorded for seed 9"):
        Replay({3: make_wait_actions(4)}).start([3, 9])
    with pytest.raises(ConfigError, match="at least two"):
        shuffle_actions(np.zeros((2, 1, 8), np.int64), [1], np.random.default_rng(0))


def promising(**settings: object) -> Situation:
    """Candidates whose mean promise, at no price, is .6, .5 and .3."""
    promised = {(1, "norm"): (0.7, 0.5), (2, "mlp"): (0.9, 0.1), (0, "gate"): (0.4, 0.2)}
    return Situation(**{"progress": 0.1, "promises": promised, **settings})


def test_what_promises_most_is_planted() -> None:
    assert decide(look(), promising()) == [Op.GERMINATE, 1, NORM]
    assert decide(look(fitted=1.0), promising()) == [Op.GERMINATE, 2, MLP]
    assert decide(look(fitted=0.0), promising()) == [Op.GERMINATE, 1, NORM]


def test_a_promise_is_worth_less_the_more_rent_it_costs() -> None:
    both = {(1, "norm"): (0.4, 0.4), (1, "mlp"): (0.5, 0.5)}
    assert decide(look(price=2.0), promising(promises=both, rent=0.0)) == [Op.GERMINATE, 1, MLP]
    assert decide(look(), promising(promises=both, rent=1.0)) == [Op.GERMINATE, 1, MLP]
    assert decide(look(price=2.0, threshold=-1.0), promising(promises=both, rent=1.0)) == [Op.GERMINATE, 1, NORM]


def test_of_two_candidates_above_the_threshold_the_large_one_is_preferred() -> None:
    both = {(1, "norm"): (0.5, 0.5), (1, "mlp"): (0.4, 0.4)}
    free = promising(promises=both, rent=0.0)
    assert decide(look(size=0.0), free) == [Op.GERMINATE, 1, NORM]
    assert decide(look(size=2.0), free) == [Op.GERMINATE, 1, MLP]
    assert decide(look(size=2.0, threshold=0.45), free) == [Op.GERMINATE, 1, NORM], "size does not make up for promise"


@pytest.mark.parametrize("threshold", [0.0, 0.3, 0.45, 0.7])
@pytest.mark.parametrize("price", [0.0, 0.3])
@pytest.mark.parametrize("size", [0.0, 1.0])
def test_the_rating_that_explains_a_planting_decides(threshold: float, price: float, size: float) -> None:
    rule, situation = look(threshold=threshold, price=price, size=size), promising()
    rating = rule.rate_candidates(situation.observe()[0])
    assert rating.threshold == threshold
    assert np.isfinite(rating.worth).sum() == 3
    rank = np.where(rating.worth > threshold, rating.rank, -np.inf)[0]
    planted = [Op.GERMINATE, *map(int, np.unravel_index(rank.argmax(), rank.shape))]
    assert decide(rule, situation) == (planted if np.isfinite(rank).any() else [Op.WAIT, 0, 0])


@pytest.mark.parametrize("unfinished", range(SLOTS))
def test_early_on_a_seed_is_planted_at_every_decision(unfinished: int) -> None:
    slots = {slot: holding("mlp", age=1) for slot in range(unfinished)}
    promised = {(slot, "norm"): (0.5, 0.5) for slot in range(SLOTS)}
    early = {"slots": slots, "promises": promised, "promise_age": 1, "accuracy_contribution": (NAN,) * SLOTS}
    assert decide(look(early=0.1), promising(progress=0.1, **early))[0] == Op.GERMINATE
    assert decide(look(early=0.1), promising(progress=0.15, **early))[0] == Op.WAIT


@pytest.mark.parametrize(
    ("why", "rule", "situation"),
    [
        ("too little is promised", look(threshold=0.61), promising()),
        ("nothing was measured yet", look(threshold=-1.0), promising(promises={})),
        ("the promise is old", look(early=0.0), promising(promise_age=1)),
        ("it is late", look(early=0.0, stop_after=0.05), promising()),
        ("a seed is unfinished", look(early=0.0), promising(slots={0: holding("mlp", age=1)})),
        ("no slot is free", look(), promising(slots=dict.fromkeys(range(SLOTS), fossil("mlp")))),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_nothing_is_planted_where(why: str, rule: LookRule, situation: Situation) -> None:
    assert decide(rule, situation)[0] == Op.WAIT, why


def test_what_was_tried_is_not_tried_again_and_taken_slots_are_passed_over() -> None:
    tries = np.zeros((SLOTS, len(SUITE.blueprints)))
    tries[1, NORM] = 1
    assert decide(look(), promising(history={"tries": tries})) == [Op.GERMINATE, 2, MLP]
    taken = promising(slots={1: fossil("mlp")})
    assert decide(look(), taken) == [Op.GERMINATE, 2, MLP]


def test_a_rule_that_looks_needs_to_be_shown_something() -> None:
    with pytest.raises(ConfigError, match=r"growth\.promise"):
        decide(look(), Situation(promises=None))
