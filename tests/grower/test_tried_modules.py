"""A grower lists all that it tried: what, when, by which figures it was judged, and what to try if nothing was kept."""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from esper import Decision
from esper.control.rules import LookRule, LookSettings
from esper.errors import CheckpointError
from esper.growth.promise import PromiseSettings
from esper.growth.summary import TriedModule
from esper.lifecycle.actions import Op
from esper.lifecycle.table import SeedRating, Stage
from esper.lifecycle.transitions import Cause
from factories import Loop, validate, validate_examples
from open_rules import open_rules

CONTROLLERS = ("heuristic", "periodic", "look", "random", "all_at_start")
RULES_WITH_A_MARGIN = ("heuristic", "periodic", "look")
DECISIONS = 16
OPTIONS: dict[str, Any] = {"rules": open_rules(), "horizon": DECISIONS, "seed": 1}


def begun(controller: str, **options: Any) -> Loop:
    return Loop(controller, **OPTIONS, **options)


def play(loop: Loop, decisions: int = DECISIONS) -> list[Decision]:
    return [loop.epoch() for _ in range(decisions)]


def lives(decisions: Sequence[Decision]) -> list[tuple[str, str, int, bool | None]]:
    """Slot, blueprint, decision of planting and fate of every module, from what the decisions changed."""
    found: list[tuple[str, str, int, bool | None]] = []
    for decision in decisions:
        for change in decision.changes:
            if change.after is Stage.GERMINATED:
                found.append((change.slot, str(change.blueprint), decision.number, None))
            elif change.after in (Stage.FOSSILIZED, Stage.PRUNED):
                place = max(index for index, life in enumerate(found) if life[0] == change.slot)
                found[place] = (*found[place][:3], change.after is Stage.FOSSILIZED)
    return found


@pytest.mark.parametrize("controller", CONTROLLERS)
def test_all_that_was_planted_is_listed_with_what_became_of_it(controller: str) -> None:
    loop = begun(controller)
    decisions = play(loop)
    tried = loop.model.tried
    assert [(one.slot, one.blueprint, one.planted, one.kept) for one in tried] == lives(decisions)
    assert all(one.parameters > 0 for one in tried)
    assert loop.model.summary().tried == tried
    ending = loop.grower.finish()
    assert [(one.slot, one.blueprint, one.planted) for one in ending.tried] == [life[:3] for life in lives(decisions)]
    assert all(one.kept is not None for one in ending.tried)
    for one in ending.tried:
        assert one.decided is not None
        assert one.planted <= one.decided <= DECISIONS
        assert str(one) in str(ending).splitlines()
    kept = sum(seed.fossilized for seed in loop.model.seeds.values())
    assert str(ending).startswith(f"Finished. {len(tried)} module{'s' * (len(tried) != 1)} tried, {kept} kept.")
    assert loop.grower.finish().tried == ending.tried, "a second call changes nothing"


@pytest.mark.parametrize("controller", RULES_WITH_A_MARGIN)
@pytest.mark.parametrize("rent", [0.0, 0.5])
def test_a_rule_s_decision_has_the_figures_and_the_threshold_that_it_went_by(controller: str, rent: float) -> None:
    loop = begun(controller, rent=rent)
    judged = [one for one in play(loop, 2 * DECISIONS) if one.op in (Op.FOSSILIZE, Op.PRUNE)]
    assert judged
    for decision in judged:
        figures, ends = decision.rating, (Stage.FOSSILIZED, Stage.PRUNED)
        (change,) = [one for one in decision.changes if one.slot == decision.slot and one.after in ends]
        assert figures is not None
        assert figures == change.rating
        assert figures.contribution == decision.contributions[str(decision.slot)]
        assert figures.threshold is not None
        assert (figures.price > 0) == (rent > 0)
        assert figures.threshold >= figures.price
        reached = figures.contribution >= figures.threshold - 1e-6
        if controller == "look":
            assert figures.loss_gain is not None
            assert figures.loss_threshold is not None
            reached &= figures.loss_gain >= figures.loss_threshold - 1e-6
        assert (decision.op is Op.FOSSILIZE) == reached
        verb, place = decision.op.name.lower(), f"{decision.blueprint} in {decision.slot}"
        assert f"{verb} {place}: {figures}; loss" in str(decision)
        (module,) = [one for one in loop.model.tried if one.decided == decision.number]
        assert (module.by, module.rating) == (controller, figures)


@pytest.mark.parametrize("controller", ["heuristic", "all_at_start"])
def test_where_the_value_of_each_example_is_known_figures_have_an_error(controller: str) -> None:
    loop = begun(controller, evaluate=validate_examples)
    decisions = play(loop, 2 * DECISIONS)
    assert any(decision.rating is not None for decision in decisions)
    ending = loop.grower.finish()
    figures = [one.rating for one in ending.tried if one.rating is not None]
    figures += [one.rating for one in decisions if one.rating is not None]
    measured = [one for one in figures if one.contribution is not None]
    assert measured
    assert all(one.error is not None and 0 <= one.error < 0.2 for one in measured)
    assert all((one.error or 0) > 0 for one in measured if one.contribution)
    assert all(f" ± {one.error:.2g}, rent" in str(one) for one in measured)
    assert all(one.error is None for one in figures if one.contribution is None)


def test_without_a_threshold_the_figures_are_there_all_the_same() -> None:
    judged = [one for one in play(begun("random", rent=0.5), 2 * DECISIONS) if one.op in (Op.FOSSILIZE, Op.PRUNE)]
    assert judged
    assert all(one.rating is not None and one.rating.threshold is None for one in judged)
    assert not any("minimum" in str(one) for one in judged)


@pytest.mark.parametrize("controller", ["heuristic", "random"])
@pytest.mark.parametrize("saved_after", [3, 8, 15])
def test_a_resumed_grower_lists_what_was_tried_before(controller: str, saved_after: int) -> None:
    whole = begun(controller)
    play(whole, saved_after)
    half = Loop.resume(whole.saved(), controller, **OPTIONS)
    assert half.model.tried == whole.model.tried
    play(whole, DECISIONS - saved_after)
    play(half, DECISIONS - saved_after)
    assert str(half.grower.finish()) == str(whole.grower.finish())


@pytest.mark.parametrize("damage", [{"modules": [{"slot": "0"}]}, {"modules": 3}, {"best": 1}])
def test_a_damaged_list_is_refused(damage: dict[str, Any]) -> None:
    saved = begun("heuristic").saved()
    saved["grower"]["memory"]["tried"] |= damage
    with pytest.raises(CheckpointError, match="tried modules in the grower's state is damaged"):
        Loop.resume(saved, "heuristic", **OPTIONS)


def test_a_module_that_is_pruned_slowly_is_listed_with_the_decision_that_judged_it() -> None:
    loop = begun("random")
    pruning: dict[str, Decision] = {}  # by slot, while alpha falls
    slowly_gone = 0
    for decision in play(loop, 60):
        for change in decision.changes:
            if (change.cause, change.after) == (Cause.TICK, Stage.PRUNED):
                judging = pruning.pop(change.slot)
                assert change.rating == judging.rating
                (module,) = [
                    one for one in loop.model.tried if (one.slot, one.decided) == (change.slot, judging.number)
                ]
                assert (module.kept, module.by, module.rating) == (False, "random", judging.rating)
                slowly_gone += judging.number < decision.number
        if decision.op is Op.PRUNE and decision.slot is not None:
            pruning[decision.slot] = decision
    assert slowly_gone > 1, "the random controller chose a slow way more than once"
    assert not [module for module in loop.model.tried if module.by == "gate"]


def test_what_a_rollback_took_is_the_governor_s() -> None:
    loop = begun("all_at_start")
    play(loop, 3)
    decision = loop.epoch(lambda _: math.nan)
    assert decision.rollback is not None
    assert decision.rollback.pruned
    gone = [module for module in loop.model.tried if module.kept is False]
    assert [module.slot for module in gone] == list(decision.rollback.pruned)
    assert {(module.by, module.decided, module.rating) for module in gone} == {("governor", 4, None)}


@pytest.mark.parametrize(("controller", "other"), [("periodic", True), ("all_at_start", False)])
def test_where_nothing_was_kept_it_says_so_and_what_to_try(controller: str, other: bool) -> None:
    loop = begun(controller, rent=9.0)  # nothing is worth that
    play(loop)
    ending = str(loop.grower.finish())
    assert ", 0 kept." in ending
    assert "Nothing was kept." in ending.splitlines()
    assert ("all_at_start" in ending.rpartition("Try:")[2]) == other
    assert "larger blueprints" in ending
    assert re.search(r"Try: a lower rent: \d of \d contributed enough but for it; ", ending)


def test_modules_within_their_error_are_advised_more_examples() -> None:
    loop = begun("all_at_start")
    rating = SeedRating(0.01, 0.02, 0.0, 0.02, None, None, None)
    module = TriedModule("0", "mlp", 5, 1, 4, False, "look", rating)
    loop.model.tried = (module, module)
    advice = loop.grower.tried.advise("look")
    assert advice[-1].startswith("Try: more validation examples: 2 of 2 gained less than a standard error; ")


def test_where_something_was_kept_nothing_else_is_advised() -> None:
    loop = begun("all_at_start")
    play(loop)
    ending = loop.grower.finish()
    assert any(module.kept for module in ending.tried)
    assert not any(sentence.startswith("Try") for sentence in ending.advice)
    assert len(str(ending).splitlines()) == 1 + len(ending.tried) + len(ending.advice)


@pytest.mark.parametrize("evaluate", [validate, validate_examples])
def test_errors_of_plain_numbers_are_estimated_from_decisions_and_say_so(evaluate: Callable[..., Any]) -> None:
    loop = begun("heuristic", evaluate=evaluate)
    ratings = [one.rating for one in play(loop, 2 * DECISIONS) if one.op in (Op.FOSSILIZE, Op.PRUNE)]
    is_plain = evaluate is validate
    assert ratings
    for rating in ratings:
        assert rating is not None
        assert rating.error is not None
        assert rating.error > 0
        assert is_plain == bool(re.search(r"; error estimated from [3-6] decisions$", str(rating)))
    advice = " ".join(loop.grower.finish().advice)
    assert is_plain == ("esper.Validation, or an evaluate that returns one value per example, measures them" in advice)


def test_the_error_is_that_of_successive_differences() -> None:
    network, nowhere = begun("none").grower.network, math.nan
    for contribution, decisions in ((0.1, 1), (0.3, 2), (0.2, 3)):
        network.record_contributions(np.array([[contribution, nowhere]]), np.array([[2 * contribution, nowhere]]))
        errors, counted = network.estimate_errors()
        assert counted.tolist() == [decisions, 0]
    # Half the mean of .2 ** 2 and .1 ** 2.
    assert errors[:, 0].tolist() == pytest.approx([math.sqrt(0.0125), 2 * math.sqrt(0.0125)])
    assert np.isnan(errors[:, 1]).all()


def test_what_a_module_contributed_in_an_earlier_stage_is_not_compared_with_what_it_contributes_now() -> None:
    loop = begun("heuristic")
    changed = 0
    for _ in range(DECISIONS):
        decision, decisions = loop.epoch(), loop.grower.network.estimate_errors()[1]
        for place, slot in enumerate(loop.model.slots):
            if any(change.slot == slot for change in decision.changes):
                assert decisions[place] == 0
                changed += 1
    assert changed


def looking(threshold: float) -> LookRule:
    promise = PromiseSettings(first=1, every=2, examples=64)
    return LookRule(LookSettings(promise=promise, threshold=threshold), DECISIONS)


def test_where_nothing_was_planted_it_names_the_best_candidate_and_the_threshold() -> None:
    loop = begun(looking(threshold=1.0))  # type: ignore[arg-type]
    play(loop)
    best, ending = loop.grower.tried.best, str(loop.grower.finish())
    assert best is not None
    assert best.blueprint in loop.model.slots[best.slot].blueprints
    assert best.worth < best.threshold == 1.0
    first, candidate, advice = ending.splitlines()
    assert first == "Finished. No module was tried."
    assert f"{best.blueprint} in {best.slot}" in candidate
    assert f"{best.worth:.3g}" in candidate
    assert "above 1" in candidate
    assert advice.startswith("Try: ")
    # Below that worth the rule plants just that candidate.
    planting = begun(looking(threshold=best.worth - 1e-4))  # type: ignore[arg-type]
    play(planting)
    assert (best.slot, best.blueprint) in [(one.slot, one.blueprint) for one in planting.model.tried]


def test_the_best_candidate_survives_a_resumption() -> None:
    whole = begun(looking(threshold=1.0))  # type: ignore[arg-type]
    play(whole, 8)
    half = Loop.resume(whole.saved(), looking(threshold=1.0), **OPTIONS)  # type: ignore[arg-type]
    assert half.grower.tried.best == whole.grower.tried.best


def test_a_new_grower_begins_a_new_list() -> None:
    loop = begun("all_at_start")
    play(loop, 3)
    loop.grower.finish()
    assert loop.model.tried
    again = Loop("none", loop.model)
    assert again.model.tried == ()
