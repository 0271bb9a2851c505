"""Iterations and results with planted figures."""

from collections.abc import Mapping
from typing import Any

from esper.lifecycle.actions import Head
from esper.rl.ppo import FIGURES, Figures
from esper.runs.events import LifecycleTransition, RolledBack
from esper.train.iteration import Alarm, Anomaly, Iteration


def change(
    step: int, slot: int, before: str, after: str, blueprint: str, cause: str, /, **more: Any
) -> LifecycleTransition:
    """A change of stage, by default in the first network of a run's first episode, of a seed that passed its gate."""
    place = {"iteration": 0, "episode": 0, "environment": 0, "step": step, "slot": slot, "reason": "passed"}
    return LifecycleTransition(**{**place, **more}, before=before, after=after, blueprint=blueprint, cause=cause)


def rolled_back(trouble: str, **more: Any) -> RolledBack:
    """A rollback, by default in the first step of the first network."""
    place = {"iteration": 1, "episode": 1, "environment": 0, "step": 0, "pruned": (0,), "ended": False}
    losses = {"loss_before": 9.0, "metric_before": 0.1, "loss_after": 1.0, "metric_after": float("nan")}
    return RolledBack(**{**place, **losses, **more}, trouble=trouble)


EXPLODED = rolled_back("exploded")
"""What befell the first network in its first step."""
LEVELS = {"none": 0.531, "random": 0.488, "all_at_start": 0.597, "periodic": 0.612, "heuristic": 0.641}

HEADS = [head.name.lower() for head in Head]


def make_update(heads: Mapping[str, float], **figures: float) -> Figures:
    """The figures of a healthy update; those in ``heads`` are of each head."""
    healthy = dict.fromkeys(FIGURES, 0.0) | {"finite": 1.0, "rate_scale": 1.0} | figures
    of_heads = {f"{name}/{head}": value for name, value in heads.items() for head in HEADS}
    return {name: value for name, value in healthy.items() if name not in heads} | of_heads


UPDATE = make_update(
    {"head_entropy": 0.9, "head_entropy_weight": 0.01, "head_share": 0.5, "head_clip_fraction": 0.05}
    | {"module_gradient_norm": 0.1},
    entropy=0.87,
    kl=0.0042,
    clip_fraction=0.06,
    gradient_norm=0.31,
    explained_variance=0.64,
    learning_rate=1e-3,
    optimizer_steps=16,
)

OPERATIONS = {"wait": 0.66, "germinate": 0.18, "advance": 0.0, "set_alpha": 0.0, "fossilize": 0.07, "prune": 0.09}
FAMILIES = {"bott": 0.74, "ctx": 0.78, "drift": 0.49, "order": 0.51, "plain": 0.72, "quad": 0.55, "vote": 0.8}


ALARMS = {
    anomaly: Alarm(anomaly, "head_entropy/slot", 0.01, 0.02, "slot")
    if anomaly in (Anomaly.ENTROPY, Anomaly.ENTROPY_FALL)
    else Alarm(anomaly, "kl", 0.4, 0.15)
    for anomaly in Anomaly
}
"""An alarm of each anomaly."""


def iteration(
    number: int,
    total: int = 40,
    *,
    objective: float = 0.6,
    probe: float | None = None,
    anomalies: tuple[Alarm, ...] = (),
    rollbacks: int = 0,
    **update: float,
) -> Iteration:
    return Iteration(
        number=number,
        total=total,
        anomalies=anomalies,
        figures={
            "objective": objective,
            "accuracy": 0.672,
            "added": 1.13,
            "environment_steps": 3840,
            "seconds": 9.6,
            "kept/layer0": 0.81,
            "kept/layer1": 0.33,
            "kept/layer2": 0.62,
            "rollbacks": rollbacks,
            **{f"objective/{family}": value for family, value in FAMILIES.items()},
            **{f"operations/{name}": share for name, share in OPERATIONS.items()},
            **{f"ppo/{name}": value for name, value in {**UPDATE, **update}.items()},
            **({} if probe is None else {"probe_score": probe}),
        },
    )
