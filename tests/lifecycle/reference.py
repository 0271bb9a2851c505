"""The lifecycle once more in plain Python: one slot is a small object, one environment a list of them.

Written from the rules, slow and obvious. The vectorised lifecycle must agree with it in everything.
"""

import math
from dataclasses import dataclass, field

from esper.lifecycle.actions import ALPHA_SPEEDS, ALPHA_TARGETS, TEMPOS, Blend, Curve, Head, Op
from esper.lifecycle.rules import Isolation, Reason, Rules
from esper.lifecycle.table import Stage
from esper.lifecycle.transitions import Cause


@dataclass
class Measured:
    """The measurements about one slot."""

    probed: bool
    gradient_healthy: bool
    contribution: float
    contribution_age: int


@dataclass
class Ramp:
    start: float = 0.0
    target: float = 0.0
    elapsed: int = 0
    duration: int = 0
    curve: Curve = Curve.LINEAR

    def alpha(self) -> float:
        x = self.elapsed / self.duration
        if self.curve == Curve.COSINE:
            x = 0.5 - 0.5 * math.cos(math.pi * x)
        elif self.curve == Curve.SIGMOID:
            x = 0.5 + 0.5 * math.tanh(10 * (x - 0.5) / 2) / math.tanh(10 / 4)
        return self.start + (self.target - self.start) * x


@dataclass
class Seed:
    blueprint: int
    blend: Blend
    ramp: Ramp
    alpha: float = 0.0
    age: int = 1
    pruning: bool = False


@dataclass
class Slot:
    stage: Stage = Stage.DORMANT
    stage_age: int = 0
    seed: Seed | None = None
    log: list[tuple[Stage, Stage, int, Cause, Reason]] = field(default_factory=list)

    def enter(self, stage: Stage, cause: Cause, reason: Reason = Reason.NO_GATE) -> None:
        blueprint = -1 if self.seed is None else self.seed.blueprint
        self.log.append((self.stage, stage, blueprint, cause, reason))
        self.stage = stage
        self.stage_age = 1
        if stage == Stage.PRUNED:
            self.seed = None


def is_legal(
    environment: list[Slot], measurements: list[Measured], action: list[int], rules: Rules, fits: list[list[bool]]
):
    """Whether one environment may take the action, where fits[slot][blueprint]."""
    op, slot, blueprint, blend, tempo, target, speed, curve = action
    if op not in rules.operations:
        return False
    if op == Op.WAIT:
        return not any(action)
    if not 0 <= slot < len(environment):
        return False
    place, measured = environment[slot], measurements[slot]
    if op == Op.GERMINATE:
        return (
            speed == curve == 0
            and place.stage == Stage.DORMANT
            and 0 <= blueprint < len(fits[slot])
            and fits[slot][blueprint]
            and blend in rules.blends
            and chooses(tempo, TEMPOS, rules.tempos)
            and chooses(target, ALPHA_TARGETS, rules.alpha_targets)
        )
    if op == Op.ADVANCE:
        return (
            not any(action[Head.BLUEPRINT :])
            and place.stage == Stage.TRAINING
            and gate_2(place, measured, rules) == Reason.PASSED
        )
    if op == Op.FOSSILIZE:
        return (
            not any(action[Head.BLUEPRINT :])
            and place.stage == Stage.HOLDING
            and gate_5(measured, rules) == Reason.PASSED
        )
    ramps = chooses(speed, ALPHA_SPEEDS, rules.alpha_speeds) and curve in rules.alpha_curves
    if op == Op.SET_ALPHA:
        return (
            blueprint == blend == tempo == 0
            and ramps
            and place.stage in (Stage.BLENDING, Stage.HOLDING)
            and not place.seed.pruning
            and chooses(target, ALPHA_TARGETS, rules.alpha_targets)
            and ALPHA_TARGETS[target] != place.seed.ramp.target
        )
    return (
        blueprint == blend == tempo == target == 0
        and ramps
        and place.stage in (Stage.GERMINATED, Stage.TRAINING, Stage.BLENDING, Stage.HOLDING)
        and not place.seed.pruning
    )


def chooses(index: int, offered: tuple, allowed: tuple) -> bool:
    return 0 <= index < len(offered) and offered[index] in allowed


def gate_2(place: Slot, measured: Measured, rules: Rules) -> Reason:
    if place.stage_age < rules.min_training_steps:
        return Reason.TOO_YOUNG
    if not measured.gradient_healthy:
        return Reason.GRADIENT_UNHEALTHY
    return Reason.PASSED


def gate_5(measured: Measured, rules: Rules) -> Reason:
    if math.isnan(measured.contribution):
        return Reason.NOT_MEASURED
    if measured.contribution_age > rules.measurement_max_age:
        return Reason.STALE
    if measured.contribution < -rules.harm_tolerance:
        return Reason.HARMFUL
    return Reason.PASSED


def gate_ahead(place: Slot, measured: Measured, rules: Rules) -> Reason:
    if place.stage == Stage.GERMINATED:
        return Reason.PASSED if measured.probed else Reason.NOT_PROBED
    if place.stage == Stage.TRAINING:
        return gate_2(place, measured, rules)
    if place.stage == Stage.BLENDING:
        ramp = place.seed.ramp
        return Reason.PASSED if ramp.elapsed == ramp.duration else Reason.ALPHA_MOVING
    if place.stage == Stage.HOLDING:
        return gate_5(measured, rules)
    return Reason.NO_GATE


def step(environment: list[Slot], measurements: list[Measured], action: list[int], rules: Rules) -> None:
    """One step of one environment, in place; changes of stage are appended to the slots' logs."""
    for number, place in enumerate(environment):
        place.stage_age += 1
        if place.seed is not None:
            place.seed.age += 1
        if action[Head.OP] != Op.WAIT and action[Head.SLOT] == number:
            operate(place, action)
        else:
            tick(place, measurements[number], rules)


def operate(place: Slot, action: list[int]) -> None:
    op, _, blueprint, blend, tempo, target, speed, curve = action
    seed = place.seed
    if op == Op.GERMINATE:
        ramp = Ramp(target=ALPHA_TARGETS[target], duration=TEMPOS[tempo])
        place.seed = Seed(blueprint, Blend(blend), ramp)
        place.enter(Stage.GERMINATED, Cause.GERMINATE)
    elif op == Op.ADVANCE:
        place.enter(Stage.BLENDING, Cause.ADVANCE, Reason.PASSED)
        move(seed)
    elif op == Op.FOSSILIZE:
        place.enter(Stage.FOSSILIZED, Cause.FOSSILIZE, Reason.PASSED)
    elif op == Op.PRUNE and (ALPHA_SPEEDS[speed] == 0 or seed.alpha == 0):
        place.enter(Stage.PRUNED, Cause.PRUNE)
    else:
        goal = 0.0 if op == Op.PRUNE else ALPHA_TARGETS[target]
        if op == Op.PRUNE:
            seed.pruning = True
        seed.ramp = Ramp(seed.alpha, goal, 0, max(1, ALPHA_SPEEDS[speed]), Curve(curve))
        if place.stage == Stage.HOLDING:
            place.enter(Stage.BLENDING, Cause(op))
        move(seed)


def tick(place: Slot, measured: Measured, rules: Rules) -> None:
    stage, seed = place.stage, place.seed
    days = place.stage_age - 1  # in this stage before this step
    if stage == Stage.GERMINATED:
        if not measured.probed:
            place.enter(Stage.PRUNED, Cause.TICK, Reason.NOT_PROBED)
        elif rules.isolation != Isolation.NONE:
            place.enter(Stage.TRAINING, Cause.TICK, Reason.PASSED)
        else:
            place.enter(Stage.BLENDING, Cause.TICK, Reason.PASSED)
            move(seed)
    elif stage == Stage.BLENDING:
        if seed.ramp.elapsed < seed.ramp.duration:
            move(seed)
        else:
            place.enter(Stage.PRUNED if seed.pruning else Stage.HOLDING, Cause.TICK, Reason.PASSED)
    elif stage == Stage.PRUNED and days == rules.cooldown[0]:
        place.enter(Stage.EMBARGOED, Cause.TICK)
    elif stage == Stage.EMBARGOED and days == rules.cooldown[1]:
        place.enter(Stage.RESETTING, Cause.TICK)
    elif stage == Stage.RESETTING and days == rules.cooldown[2]:
        place.enter(Stage.DORMANT, Cause.TICK)


def move(seed: Seed) -> None:
    seed.ramp.elapsed += 1
    seed.alpha = seed.ramp.target if seed.ramp.elapsed == seed.ramp.duration else seed.ramp.alpha()
