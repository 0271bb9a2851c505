"""What tells a healthy training from an ill one, and the query that gives it."""

from __future__ import annotations

from dataclasses import dataclass

from esper.ui.figures.record import Query

KL = "ppo/kl"


@dataclass(frozen=True)
class Gauge:
    """A small plot of one figure over training."""

    name: str
    series: str
    meaning: str
    marks: tuple[float, ...] = ()
    """Levels to compare with."""


GAUGES = (
    Gauge("entropy", "ppo/entropy", "1: the policy decides at random; 0: it no longer explores"),
    Gauge("operation's entropy", "ppo/head_entropy/op", "the same of the choice of operation alone"),
    Gauge("KL divergence", KL, "moved per update; dashed: where an update ends early"),
    Gauge("explained variance", "ppo/explained_variance", "1: the value function foresees the returns", (0.0,)),
    Gauge("clipped share", "ppo/clip_fraction", "decisions whose probability left the clip range"),
    Gauge("gradient norm", "ppo/gradient_norm", "before it is clipped"),
    Gauge("accuracy", "accuracy", "validation, at the end of the episodes"),
    Gauge("growth", "added", "committed parameters over the host's"),
    Gauge("deciding to wait", "operations/wait", "share of decisions"),
)
HEALTH = Query(
    f"""\
SELECT 'figure' AS kind, name, iteration, value FROM scalars
WHERE name IN ({", ".join(f"'{gauge.series}'" for gauge in GAUGES)})
UNION ALL
SELECT 'anomaly', anomalies.value, iteration, NULL FROM ppo, json_each(ppo.anomalies) AS anomalies
ORDER BY kind DESC, name, iteration
"""
)
