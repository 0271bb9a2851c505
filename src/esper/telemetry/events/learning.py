"""How a controller learns."""

from dataclasses import dataclass

from esper.telemetry.events.record import Event, register


@register("ppo_updated", version=3)
@dataclass(frozen=True, slots=True)
class PPOUpdated(Event):
    """A policy update is done; `metrics` are those of `esper.rl.diagnostics.UpdateMetrics`, under flat names."""

    optimizer_steps: int
    stopped_early: bool
    kl: float
    anomalies: tuple[str, ...]
    metrics: dict[str, float]


@register("anomaly_raised")
@dataclass(frozen=True, slots=True)
class AnomalyRaised(Event):
    """An update is not healthy: `anomaly` names what is wrong and `meaning` says it in a sentence."""

    anomaly: str
    meaning: str


@register("policy_probed")
@dataclass(frozen=True, slots=True)
class PolicyProbed(Event):
    """The greedy policy's mean test score on the run's probe instances, and that of each baseline there."""

    score: float
    baselines: dict[str, float]
