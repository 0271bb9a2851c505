"""Rule sets, random measurements and random legal actions for the lifecycle's tests."""

from dataclasses import fields, replace
from itertools import product

import numpy as np

from esper.lifecycle.actions import (
    ALPHA_SPEEDS,
    ALPHA_TARGETS,
    TEMPOS,
    Blend,
    Curve,
    Head,
    Op,
    Rows,
    clear_irrelevant_heads,
)
from esper.lifecycle.rules import ActionMasks, Isolation, Rules
from esper.lifecycle.table import SeedMeasurements, SeedTable, Stage
from esper.lifecycle.transitions import Cause, Step, step
from esper.numerics.arrays import Bools, Ints
from open_rules import open_rules

DEFAULT = open_rules()
SHADOW = open_rules(isolation=Isolation.SHADOW)
WIDE = {
    "blends": tuple(Blend),
    "cooldown": (2, 1, 3),
    "min_training_steps": 1,
    "measurement_max_age": 0,
    "harm_tolerance": 0.5,
}
NARROW = {
    "operations": (Op.WAIT, Op.GERMINATE, Op.ADVANCE, Op.SET_ALPHA, Op.PRUNE),
    "tempos": (5,),
    "alpha_targets": (0.5, 1.0),
    "alpha_speeds": (3, 8),
    "alpha_curves": (Curve.COSINE, Curve.SIGMOID),
}
ONE_TARGET = {
    "operations": tuple(op for op in Op if op is not Op.SET_ALPHA),
    "alpha_targets": (0.7,),
    "alpha_speeds": (0,),
    "tempos": (8, 3),
}
RULE_SETS = {
    f"{name}-{isolation}": open_rules(isolation=isolation, **choices)
    for name, choices in {"default": {}, "wide": WIDE, "narrow": NARROW, "one_target": ONE_TARGET}.items()
    for isolation in Isolation
}


def good_measurements(environments: int = 1, slots: int = 1) -> SeedMeasurements:
    """Everything a gate may ask for."""
    shape = (environments, slots)
    return replace(
        SeedMeasurements.none(*shape),
        probed=np.ones(shape, np.bool_),
        gradient_healthy=np.ones(shape, np.bool_),
        contribution=np.ones(shape, np.float32),
        contribution_age=np.zeros(shape, np.int16),
    )


def random_measurements(environments: int, slots: int, generator: np.random.Generator) -> SeedMeasurements:
    shape = (environments, slots)
    contribution = generator.normal(0.5, 1.0, shape).astype(np.float32)
    return replace(
        SeedMeasurements.none(*shape),
        probed=generator.random(shape) < 0.9,
        gradient_healthy=generator.random(shape) < 0.8,
        contribution=np.where(generator.random(shape) < 0.2, np.float32(np.nan), contribution),
        contribution_age=generator.integers(0, 5, shape, dtype=np.int16),
    )


def measurement_rows(measurements: SeedMeasurements, rows: Rows) -> SeedMeasurements:
    return SeedMeasurements(
        **{field.name: getattr(measurements, field.name)[rows] for field in fields(SeedMeasurements)}
    )


def random_compatibility(environments: int, slots: int, blueprints: int, generator: np.random.Generator) -> Bools:
    """Most blueprints fit most slots; some slots fit none."""
    compatible = generator.random((environments, slots, blueprints)) < 0.6
    compatible[generator.random((environments, slots)) < 0.1] = False
    return compatible


def sample(masks: ActionMasks, generator: np.random.Generator) -> Ints:
    """A random legal action ``[E, 8]``, drawn head by head; each head uniform over its legal choices."""
    actions = np.zeros((masks.environments, len(Head)), dtype=np.int64)
    for head in Head:
        legal = masks.find_legal(head, actions[:, Head.OP], actions[:, Head.SLOT])
        actions[:, head] = np.where(legal, generator.random(legal.shape), -1.0).argmax(axis=1)
    return actions


def every_action(slots: int, blueprints: int) -> Ints:
    """All distinct actions whose irrelevant heads are 0, legal or not: ``[N, 8]``."""
    ranges = (len(Op), slots, blueprints, len(Blend), len(TEMPOS), len(ALPHA_TARGETS), len(ALPHA_SPEEDS), len(Curve))
    combinations = np.array(list(product(*(range(size) for size in ranges))), dtype=np.int64)
    return np.unique(clear_irrelevant_heads(combinations), axis=0)


def play(table: SeedTable, rules: Rules, *actions: Ints, measurements: SeedMeasurements | None = None) -> Step:
    """Steps through single-environment actions ``[8]`` under good measurements; three blueprints fit everywhere."""
    result: Step | None = None
    for chosen in actions:
        seen = good_measurements(1, table.slots) if measurements is None else measurements
        result = step(table, seen, chosen[None], rules, np.ones((1, table.slots, 3), np.bool_))
        table = result.table
    assert result is not None
    return result


# What is true of every table and of every step, whatever the actions were.


EDGES = {
    (Stage.DORMANT, Stage.GERMINATED): {Cause.GERMINATE},
    (Stage.GERMINATED, Stage.TRAINING): {Cause.TICK},
    (Stage.GERMINATED, Stage.BLENDING): {Cause.TICK},
    (Stage.TRAINING, Stage.BLENDING): {Cause.ADVANCE},
    (Stage.BLENDING, Stage.HOLDING): {Cause.TICK},
    (Stage.HOLDING, Stage.BLENDING): {Cause.SET_ALPHA, Cause.PRUNE},
    (Stage.HOLDING, Stage.FOSSILIZED): {Cause.FOSSILIZE},
    (Stage.GERMINATED, Stage.PRUNED): {Cause.TICK, Cause.PRUNE},
    (Stage.TRAINING, Stage.PRUNED): {Cause.PRUNE},
    (Stage.BLENDING, Stage.PRUNED): {Cause.TICK, Cause.PRUNE},
    (Stage.HOLDING, Stage.PRUNED): {Cause.PRUNE},
    (Stage.PRUNED, Stage.EMBARGOED): {Cause.TICK},
    (Stage.EMBARGOED, Stage.RESETTING): {Cause.TICK},
    (Stage.RESETTING, Stage.DORMANT): {Cause.TICK},
}
"""Every change of stage that may happen, and what may cause it."""


def assert_sound(table: SeedTable, rules: Rules, *, ended: bool = False) -> None:
    """The table describes a state that the design allows; growth that ``ended`` leaves fossils of any weight."""
    stage = table.stage
    owning = (stage >= Stage.GERMINATED) & (stage <= Stage.FOSSILIZED)
    waiting = (stage == Stage.GERMINATED) | (stage == Stage.TRAINING)
    steady = (stage == Stage.HOLDING) | (stage == Stage.FOSSILIZED)
    durations = [0, 1, *TEMPOS, *ALPHA_SPEEDS]
    always = {
        "stages are known": (stage >= Stage.DORMANT) & (stage <= Stage.RESETTING),
        "alpha lies in [0, 1]": (table.alpha >= 0) & (table.alpha <= 1),
        "a blueprint is there iff the slot owns parameters": (table.blueprint == -1) == ~owning,
        "a seed has an age iff the slot owns parameters": (table.seed_age == 0) == ~owning,
        "a stage is not older than its seed": ~owning | (table.stage_age <= table.seed_age),
        "a slot without a seed keeps nothing of one": owning | _is_blank(table),
        "alpha does not count before blending": ~waiting | ((table.alpha == 0) & (table.alpha_elapsed == 0)),
        "alpha is at its target when steady": ~steady | (table.alpha == table.alpha_target),
        "a steady seed has weight": ~steady | (table.alpha > 0),
        "a blending seed is on its way": (stage != Stage.BLENDING) | (table.alpha_elapsed >= 1),
        "alpha lies between its ends": (table.alpha - table.alpha_start) * (table.alpha_target - table.alpha) >= 0,
        "ramps end": table.alpha_elapsed <= table.alpha_duration,
        "durations are on offer": np.isin(table.alpha_duration, durations),
        "targets are on offer": np.isin(table.alpha_target, np.array([0, *ALPHA_TARGETS], np.float32))
        | (ended & (stage == Stage.FOSSILIZED)),
        "only a blending seed is being pruned": ~table.pruning | (stage == Stage.BLENDING),
        "a seed moves to zero iff it is being pruned": ~owning | (table.pruning == (table.alpha_target == 0)),
        "isolation none never trains alone": (stage != Stage.TRAINING) | (rules.isolation != Isolation.NONE),
        "germination takes one step": (stage != Stage.GERMINATED) | (table.stage_age == 1),
    }
    for cooling, steps in zip((Stage.PRUNED, Stage.EMBARGOED, Stage.RESETTING), rules.cooldown, strict=True):
        always[f"{cooling.name} ends in time"] = (stage != cooling) | (table.stage_age <= steps)
    for statement, holds in always.items():
        assert np.all(holds), statement


def _is_blank(table: SeedTable) -> Bools:
    empty = SeedTable.dormant(1, table.slots)
    kept = [
        getattr(table, field.name) == getattr(empty, field.name)
        for field in fields(SeedTable)
        if field.name not in ("stage", "stage_age")
    ]
    return np.all(kept, axis=0)


def assert_step_is_sound(before: SeedTable, result: Step, actions: Ints, rules: Rules) -> None:
    """The step led from ``before`` along the edges of the design, and the cooldown lasted as long as it must."""
    after, changes = result.table, result.transitions
    assert_sound(after, rules)
    moved = np.argwhere(before.stage != after.stage)
    assert moved.tolist() == np.stack([changes.env, changes.slot], axis=1).tolist()
    for env, slot, old, new, cause in zip(
        changes.env, changes.slot, changes.before, changes.after, changes.cause, strict=True
    ):
        assert (old, new) == (before.stage[env, slot], after.stage[env, slot])
        assert Cause(cause) in EDGES[Stage(old), Stage(new)]
        acted = actions[env, Head.OP] != Op.WAIT and actions[env, Head.SLOT] == slot
        assert cause == (actions[env, Head.OP] if acted else Cause.TICK)
    assert np.all(after.stage_age[moved[:, 0], moved[:, 1]] == 1)
    blend = np.where(after.owning, after.blend, before.blend)
    assert np.array_equal(changes.blend, blend[changes.env, changes.slot])
    for stage, steps in zip((Stage.PRUNED, Stage.EMBARGOED, Stage.RESETTING), rules.cooldown, strict=True):
        cooling = before.stage == stage
        assert np.all((before.stage_age[cooling] == steps) == (after.stage[cooling] != stage))
    stayed = before.owning & after.owning
    assert np.all(after.blend[stayed] == before.blend[stayed]), "a seed keeps its blend"
    fossils = before.stage == Stage.FOSSILIZED
    assert np.all(after.stage[fossils] == Stage.FOSSILIZED), "fossils are permanent"
    assert np.all(after.alpha[fossils] == before.alpha[fossils])
    assert np.all(after.blueprint[fossils] == before.blueprint[fossils])


def assert_prunable(table: SeedTable, masks: ActionMasks) -> None:
    """Each live seed can be pruned, unless that has already begun."""
    live = (table.stage >= Stage.GERMINATED) & (table.stage <= Stage.HOLDING)
    assert np.array_equal(masks.slot[:, Op.PRUNE], live & ~table.pruning)


def assert_obeyed(before: SeedTable, actions: Ints, after: SeedTable) -> None:
    """Each action but WAIT had its effect on its slot, by every head that it reads."""
    acting = np.flatnonzero(actions[:, Head.OP] != Op.WAIT)
    chosen = actions[acting]
    at = (acting, chosen[:, Head.SLOT])
    blend, target = chosen[:, Head.BLEND], np.array(ALPHA_TARGETS, np.float32)[chosen[:, Head.ALPHA_TARGET]]
    speed, curve = np.array(ALPHA_SPEEDS)[chosen[:, Head.ALPHA_SPEED]], chosen[:, Head.ALPHA_CURVE]
    pruned, at_once = chosen[:, Head.OP] == Op.PRUNE, (speed == 0) | (before.alpha[at] == 0)
    ramp = {
        "stage": Stage.BLENDING,
        "alpha_start": before.alpha[at],
        "alpha_elapsed": 1,
        "alpha_duration": np.maximum(speed, 1),
        "alpha_curve": curve,
    }
    seed = {
        "stage": Stage.GERMINATED,
        "blueprint": chosen[:, Head.BLUEPRINT],
        "blend": blend,
        "alpha_target": target,
        "alpha_duration": np.array(TEMPOS)[chosen[:, Head.TEMPO]],
    }
    demands = {
        "germinate": (chosen[:, Head.OP] == Op.GERMINATE, seed),
        "advance": (chosen[:, Head.OP] == Op.ADVANCE, {"stage": Stage.BLENDING, "alpha_elapsed": 1}),
        "set alpha": (chosen[:, Head.OP] == Op.SET_ALPHA, {**ramp, "blend": before.blend[at], "alpha_target": target}),
        "fossilize": (chosen[:, Head.OP] == Op.FOSSILIZE, {"stage": Stage.FOSSILIZED, "alpha": before.alpha[at]}),
        "prune at once": (pruned & at_once, {"stage": Stage.PRUNED}),
        "prune by a ramp": (pruned & ~at_once, {**ramp, "alpha_target": 0, "pruning": True}),
    }
    for name, (rows, values) in demands.items():
        for field, value in values.items():
            assert np.all((getattr(after, field)[at] == value)[rows]), f"{name} did not set {field}"
