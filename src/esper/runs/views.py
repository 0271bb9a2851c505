"""SQL views of a run's events: one row per seed, episode, decision, slot, reward term and so on.

Every run store contains the views, for other programs. Readers of Esper create them anew, so that old runs have the
newest views. `episode` and `environment` identify a network's episode, and `step` counts its decisions from 0.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class View:
    """A view: what a row stands for, and the query."""

    meaning: str
    query: str


def _columns(event: str, *names: str) -> str:
    """SQL that selects fields of the events of a type, one row per event."""
    fields = ",\n    ".join(f"json_extract(payload, '$.{name}') AS {name}" for name in names)
    return f"SELECT id, time, iteration,\n    {fields}\nFROM events WHERE type = '{event}'"


_NETWORK = ("episode", "environment", "step")

# A seed's row covers the changes of its slot since the last germination; fossils of a deeper host start with the run.
_SEEDS = """
WITH changes AS (
    SELECT id,
        json_extract(payload, '$.episode') AS episode,
        json_extract(payload, '$.environment') AS environment,
        json_extract(payload, '$.slot') AS slot,
        json_extract(payload, '$.step') AS step,
        json_extract(payload, '$.before') AS before,
        json_extract(payload, '$.after') AS after,
        json_extract(payload, '$.blueprint') AS blueprint,
        json_extract(payload, '$.cause') AS cause,
        json_extract(payload, '$.contribution') AS contribution,
        json_extract(payload, '$.error') AS error,
        json_extract(payload, '$.price') AS price,
        json_extract(payload, '$.threshold') AS threshold,
        json_extract(payload, '$.loss_gain') AS loss_gain,
        json_extract(payload, '$.loss_error') AS loss_error,
        json_extract(payload, '$.loss_threshold') AS loss_threshold
    FROM events WHERE type = 'lifecycle_transition'
), lives AS (
    SELECT *, SUM(after = 'germinated' OR cause = 'start')
        OVER (PARTITION BY episode, environment, slot ORDER BY id) AS life
    FROM changes
)
SELECT episode, environment, slot, life,
    MAX(blueprint) AS blueprint,
    MIN(step) AS germinated,
    MIN(CASE WHEN after = 'training' THEN step END) AS trained,
    MIN(CASE WHEN after = 'blending' THEN step END) AS blended,
    MIN(CASE WHEN after = 'holding' THEN step END) AS held,
    MIN(CASE WHEN after = 'fossilized' THEN step END) AS fossilized,
    MIN(CASE WHEN after = 'pruned' THEN step END) AS pruned,
    CASE WHEN SUM(after = 'pruned') THEN 'pruned' WHEN SUM(after = 'fossilized') THEN 'fossilized' ELSE 'unfinished' END
        AS outcome,
    MAX(CASE WHEN after IN ('fossilized', 'pruned') THEN cause END) AS cause,
    MAX(CASE WHEN after IN ('fossilized', 'pruned') THEN contribution END) AS contribution,
    MAX(CASE WHEN after IN ('fossilized', 'pruned') THEN error END) AS error,
    MAX(CASE WHEN after IN ('fossilized', 'pruned') THEN price END) AS price,
    MAX(CASE WHEN after IN ('fossilized', 'pruned') THEN threshold END) AS threshold,
    MAX(CASE WHEN after IN ('fossilized', 'pruned') THEN loss_gain END) AS loss_gain,
    MAX(CASE WHEN after IN ('fossilized', 'pruned') THEN loss_error END) AS loss_error,
    MAX(CASE WHEN after IN ('fossilized', 'pruned') THEN loss_threshold END) AS loss_threshold
FROM lives WHERE life > 0
GROUP BY episode, environment, slot, life
"""

_STARTED = ("instance", "family", "variant", "rent", "host_parameters", "reward")
_ENDED = ("objective", "accuracy", "added", "paid", "kept")


def _of(event: str, *names: str) -> str:
    """SQL for fields of a group's only event of a type."""
    return ",\n    ".join(
        f"MAX(CASE type WHEN '{event}' THEN json_extract(payload, '$.{name}') END) AS {name}" for name in names
    )


# One row per episode that has ended, from the events at its beginning and its end.
_EPISODES = f"""
SELECT MAX(iteration) AS iteration,
    json_extract(payload, '$.episode') AS episode,
    json_extract(payload, '$.environment') AS environment,
    {_of("episode_started", *_STARTED)},
    MAX(json_extract(payload, '$.step')) AS steps,
    {_of("episode_ended", *_ENDED)}
FROM events WHERE type IN ('episode_started', 'episode_ended')
GROUP BY 2, 3 HAVING SUM(type = 'episode_ended')
"""

# The lists of a decision, one row per slot.
_PER_SLOT = """
SELECT steps.id AS id, steps.iteration AS iteration,
    json_extract(steps.payload, '$.episode') AS episode,
    json_extract(steps.payload, '$.environment') AS environment,
    json_extract(steps.payload, '$.step') AS step,
    stages.key AS slot,
    stages.value AS stage,
    json_extract(steps.payload, '$.blueprints[' || stages.key || ']') AS blueprint,
    json_extract(steps.payload, '$.alphas[' || stages.key || ']') AS alpha,
    json_extract(steps.payload, '$.contributions[' || stages.key || ']') AS contribution,
    json_extract(steps.payload, '$.contribution_errors[' || stages.key || ']') AS contribution_error,
    json_extract(steps.payload, '$.thresholds[' || stages.key || ']') AS threshold,
    json_extract(steps.payload, '$.gradient_ratios[' || stages.key || ']') AS gradient_ratio,
    json_extract(steps.payload, '$.vanished_shares[' || stages.key || ']') AS vanished_share,
    json_extract(steps.payload, '$.exploded_shares[' || stages.key || ']') AS exploded_share
FROM events AS steps, json_each(steps.payload, '$.stages') AS stages
WHERE steps.type = 'step_taken'
"""

# The terms of a decision's reward, one row per term.
_REWARDS = """
SELECT steps.id AS id, steps.iteration AS iteration,
    json_extract(steps.payload, '$.episode') AS episode,
    json_extract(steps.payload, '$.environment') AS environment,
    json_extract(steps.payload, '$.step') AS step,
    terms.key AS term,
    terms.value AS value
FROM events AS steps, json_each(steps.payload, '$.terms') AS terms
WHERE steps.type = 'step_taken'
"""

_PPO_METRICS = (
    "policy_loss",
    "value_loss",
    "entropy",
    "clip_fraction",
    "gradient_norm",
    "explained_variance",
    "return_mean",
    "learning_rate",
)

_PPO = """
SELECT id, time, iteration,
    json_extract(payload, '$.optimizer_steps') AS optimizer_steps,
    json_extract(payload, '$.stopped_early') AS stopped_early,
    json_extract(payload, '$.kl') AS kl,
    {metrics},
    json_extract(payload, '$.anomalies') AS anomalies,
    json_extract(payload, '$.metrics') AS metrics
FROM events WHERE type = 'ppo_updated'
""".format(metrics=",\n    ".join(f"json_extract(payload, '$.metrics.{name}') AS {name}" for name in _PPO_METRICS))

# Metrics of heads and modules include their names, as in head_ratio/slot.
_MINIBATCHES = """
SELECT events.id AS id, events.iteration AS iteration,
    json_extract(events.payload, '$.minibatch') AS minibatch,
    figures.key AS figure,
    figures.value AS value
FROM events, json_each(events.payload, '$.figures') AS figures
WHERE events.type = 'minibatch_recorded'
"""

# Values of the kept modules in the networks of probe instances, one row per module and per pair of modules.
_MODULE_VALUES = """
SELECT events.id AS id, events.iteration AS iteration,
    json_extract(events.payload, '$.instance') AS instance,
    json_extract(events.payload, '$.family') AS family,
    json_extract(modules.value, '$.slot') AS slot,
    json_extract(modules.value, '$.blueprint') AS blueprint,
    json_extract(modules.value, '$.value') AS value,
    json_extract(events.payload, '$.exact') AS exact
FROM events, json_each(events.payload, '$.modules') AS modules
WHERE events.type = 'interactions_measured'
"""
_INTERACTIONS = """
SELECT events.id AS id, events.iteration AS iteration,
    json_extract(events.payload, '$.instance') AS instance,
    json_extract(events.payload, '$.family') AS family,
    json_extract(pairs.value, '$.first') AS first,
    json_extract(pairs.value, '$.second') AS second,
    (SELECT json_extract(value, '$.blueprint') FROM json_each(events.payload, '$.modules')
        WHERE json_extract(value, '$.slot') = json_extract(pairs.value, '$.first')) AS first_blueprint,
    (SELECT json_extract(value, '$.blueprint') FROM json_each(events.payload, '$.modules')
        WHERE json_extract(value, '$.slot') = json_extract(pairs.value, '$.second')) AS second_blueprint,
    json_extract(pairs.value, '$.interaction') AS interaction,
    json_extract(events.payload, '$.exact') AS exact
FROM events, json_each(events.payload, '$.pairs') AS pairs
WHERE events.type = 'interactions_measured'
"""

VIEWS: Mapping[str, View] = {
    "seeds": View("one seed's life, from germination to its fossil or its end", _SEEDS),
    "episodes": View("one episode of one network that has ended", _EPISODES),
    "decisions": View(
        "one decision and how its network stood afterwards",
        _columns(
            "step_taken",
            *_NETWORK,
            *("op", "slot", "blueprint", "value", "log_prob", "reward"),
            *("train_loss", "loss", "metric", "objective", "added"),
        ),
    ),
    "slots": View("one slot after one decision", _PER_SLOT),
    "rewards": View("one term of the reward for one decision", _REWARDS),
    "transitions": View(
        "one change of a slot's stage",
        _columns(
            "lifecycle_transition",
            *_NETWORK,
            *("slot", "before", "after", "blueprint", "cause", "reason"),
            *("contribution", "error", "price", "threshold"),
            *("loss_gain", "loss_error", "loss_threshold"),
        ),
    ),
    "gates": View("one new result of a gate", _columns("gate_checked", *_NETWORK, "slot", "gate", "passed", "reason")),
    "ppo": View("one update of the policy", _PPO),
    "anomalies": View(
        "one anomaly of an update",
        _columns("anomaly_raised", "anomaly", "head", "figure", "value", "bound", "response", "meaning"),
    ),
    "module_values": View(
        "one module that the greedy policy kept in a probe instance's network: its Shapley value", _MODULE_VALUES
    ),
    "interactions": View("two such modules of one network: their interaction", _INTERACTIONS),
    "minibatches": View("one figure of one minibatch, in the iterations after an anomaly", _MINIBATCHES),
    "rollbacks": View(
        "one rollback by the governor",
        _columns(
            "rolled_back",
            *_NETWORK,
            *("trouble", "loss_before", "metric_before", "loss_after", "metric_after", "pruned", "ended"),
        ),
    ),
}
"""All views by name."""


def build_view_statements(kind: str) -> str:
    """SQL that makes all views, where ``kind`` is ``VIEW`` or ``TEMP VIEW``."""
    return "\n".join(f"CREATE {kind} IF NOT EXISTS {name} AS {view.query};" for name, view in VIEWS.items())
