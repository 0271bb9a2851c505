"""Hypothesis plays long legal games on a small population, and keeps its own record of what must hold."""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from esper.lifecycle.actions import Head, Op, make_wait_actions
from esper.lifecycle.legality import ActionMasks, legal_actions, require_legal
from esper.lifecycle.stages import Stage
from esper.lifecycle.table import Evidence, SeedTable
from esper.lifecycle.transitions import Step, step
from esper.numerics.arrays import Ints
from lifecycle.soundness import assert_obeyed, assert_prunable, assert_sound, assert_step_is_sound
from lifecycle.support import RULE_SETS, good_evidence, random_compatibility, random_evidence

ENVIRONMENTS, SLOTS, BLUEPRINTS = 2, 2, 3


class Lifecycle(RuleBasedStateMachine):
    """The table under random legal actions and random evidence."""

    @initialize(name=st.sampled_from(sorted(RULE_SETS)), seed=st.integers(0, 2**32 - 1))
    def begin(self, name: str, seed: int) -> None:
        self.rules = RULE_SETS[name]
        self.generator = np.random.default_rng(seed)
        self.compatible = random_compatibility(ENVIRONMENTS, SLOTS, BLUEPRINTS, self.generator)
        self.table = SeedTable.dormant(ENVIRONMENTS, SLOTS)
        self.cooldowns: dict[tuple[int, int], list[Stage]] = {}
        self.fossils: dict[tuple[int, int], tuple[int, float]] = {}

    @rule(data=st.data())
    def act(self, data: st.DataObject) -> None:
        """One legal action per environment, head by head."""
        evidence = random_evidence(ENVIRONMENTS, SLOTS, self.generator)
        masks = legal_actions(self.table, evidence, self.rules, self.compatible)
        assert_prunable(self.table, masks)
        actions = draw_legal(data, masks)
        before = self.table
        assert_obeyed(before, actions, self.advance(actions, evidence).table)

    @rule(steps=st.integers(1, 9))
    def let_time_pass(self, steps: int) -> None:
        """So that ramps and cooldowns end, and gates open."""
        for _ in range(steps):
            self.advance(make_wait_actions(ENVIRONMENTS), good_evidence(ENVIRONMENTS, SLOTS))

    def advance(self, actions: Ints, evidence: Evidence) -> Step:
        before = self.table
        copy = before.copy()
        result = step(before, evidence, actions, self.rules, self.compatible)
        assert all(np.array_equal(getattr(before, name), getattr(copy, name)) for name in vars(copy)), "table mutated"
        assert_step_is_sound(before, result, actions, self.rules)
        self.table = result.table
        self.record()
        return result

    def record(self) -> None:
        for place, stage in np.ndenumerate(self.table.stage):
            if stage in (Stage.PRUNED, Stage.EMBARGOED, Stage.RESETTING):
                self.cooldowns.setdefault(place, []).append(Stage(stage))
            elif place in self.cooldowns:
                first, second, third = self.rules.cooldown
                spent = [Stage.PRUNED] * first + [Stage.EMBARGOED] * second + [Stage.RESETTING] * third
                assert self.cooldowns.pop(place) == spent
                assert stage == Stage.DORMANT
            if stage == Stage.FOSSILIZED:
                self.fossils.setdefault(place, (self.table.blueprint[place], self.table.alpha[place]))

    @invariant()
    def fossils_stay(self) -> None:
        for place, (blueprint, alpha) in self.fossils.items():
            assert self.table.stage[place] == Stage.FOSSILIZED
            assert (self.table.blueprint[place], self.table.alpha[place]) == (blueprint, alpha)

    @invariant()
    def table_is_sound(self) -> None:
        assert_sound(self.table, self.rules)


def draw_legal(data: st.DataObject, masks: ActionMasks) -> Ints:
    """A legal action for each environment; shrinking goes towards WAIT and first choices."""
    actions = make_wait_actions(ENVIRONMENTS)
    for head in Head:
        legal = masks.find_legal(head, actions[:, Head.OP], actions[:, Head.SLOT])
        for environment in range(ENVIRONMENTS):
            choices = np.flatnonzero(legal[environment]).tolist()
            if head is Head.OP:
                # Seeds that live long see more, so pruning is drawn less often.
                choices = [op for op in choices if op != Op.PRUNE] * 3 + [op for op in choices if op == Op.PRUNE]
            actions[environment, head] = choices[0] if len(choices) == 1 else data.draw(st.sampled_from(choices))
    require_legal(actions, masks)
    return actions


TestLifecycle = Lifecycle.TestCase
TestLifecycle.settings = settings(max_examples=20, stateful_step_count=30, deadline=None, report_multiple_bugs=False)
