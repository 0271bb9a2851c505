"""Rule sets, random evidence and random legal actions for the lifecycle's tests."""

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
from esper.lifecycle.legality import ActionMasks
from esper.lifecycle.rules import Isolation, Rules
from esper.lifecycle.table import Evidence, SeedTable
from esper.lifecycle.transitions import Step, step
from esper.numerics.arrays import Bools, Ints
from open_rules import open_rules

DEFAULT = open_rules()
SHADOW = open_rules(isolation=Isolation.SHADOW)
WIDE = {
    "blends": tuple(Blend),
    "cooldown": (2, 1, 3),
    "min_training_steps": 1,
    "evidence_max_age": 0,
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


def good_evidence(environments: int = 1, slots: int = 1) -> Evidence:
    """Everything a gate may ask for."""
    shape = (environments, slots)
    return replace(
        Evidence.none(*shape),
        probed=np.ones(shape, np.bool_),
        gradient_healthy=np.ones(shape, np.bool_),
        contribution=np.ones(shape, np.float32),
        contribution_age=np.zeros(shape, np.int16),
    )


def random_evidence(environments: int, slots: int, generator: np.random.Generator) -> Evidence:
    shape = (environments, slots)
    contribution = generator.normal(0.5, 1.0, shape).astype(np.float32)
    return replace(
        Evidence.none(*shape),
        probed=generator.random(shape) < 0.9,
        gradient_healthy=generator.random(shape) < 0.8,
        contribution=np.where(generator.random(shape) < 0.2, np.float32(np.nan), contribution),
        contribution_age=generator.integers(0, 5, shape, dtype=np.int16),
    )


def evidence_rows(evidence: Evidence, rows: Rows) -> Evidence:
    return Evidence(**{field.name: getattr(evidence, field.name)[rows] for field in fields(Evidence)})


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


def play(table: SeedTable, rules: Rules, *actions: Ints, evidence: Evidence | None = None) -> Step:
    """Steps through single-environment actions ``[8]`` under good evidence; three blueprints fit everywhere."""
    result: Step | None = None
    for chosen in actions:
        seen = good_evidence(1, table.slots) if evidence is None else evidence
        result = step(table, seen, chosen[None], rules, np.ones((1, table.slots, 3), np.bool_))
        table = result.table
    assert result is not None
    return result
