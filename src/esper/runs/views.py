"""SQL views of a run's events: one row per seed, episode, decision, slot, reward term and so on.

Every store contains them, for other programs; readers of Esper create them anew. `episode` and `environment` identify a
network's episode, and `step` counts its decisions from 0.
"""

from collections.abc import Mapping
from typing import NamedTuple


class View(NamedTuple):
    """A view: what a row stands for, and the query."""

    meaning: str
    query: str


def _fields(names: str, source: str = "payload", path: str = "$.{}") -> str:
    """Fields of the JSON in ``source`` as columns of the same names, which are separated by spaces."""
    return ",\n    ".join(f"json_extract({source}, '{path.format(name)}') AS {name}" for name in names.split())


def _select(event: str, names: str) -> str:
    """SQL that selects fields of the events of a type, one row per event."""
    return f"SELECT id, time, iteration,\n    {_fields(names)}\nFROM events WHERE type = '{event}'"


def _select_parts(event: str, field: str, columns: str) -> str:
    """SQL that selects ``columns`` of each part of a list or mapping in the events of a type, one row per part."""
    return f"""
SELECT events.id AS id, events.iteration AS iteration,
    {columns}
FROM events, json_each(events.payload, '$.{field}') AS part
WHERE events.type = '{event}'
"""


_NETWORK = "episode environment step "
_PAYLOAD = "events.payload"

OF_DECISION = "contribution error price threshold loss_gain loss_error loss_threshold"
"""Columns about the decision that kept or pruned a seed."""
STAGE_COLUMNS = {
    "trained": "training",
    "blended": "blending",
    "held": "holding",
    "fossilized": "fossilized",
    "pruned": "pruned",
}
"""The stage at whose first step each column has the step."""
_FIRST_STEPS = ",\n    ".join(
    f"MIN(CASE WHEN after = '{stage}' THEN step END) AS {name}" for name, stage in STAGE_COLUMNS.items()
)
_AT_THE_END = ",\n    ".join(
    f"MAX(CASE WHEN after IN ('fossilized', 'pruned') THEN {name} END) AS {name}"
    for name in f"cause {OF_DECISION}".split()
)
# A seed's row covers the changes of its slot since the last germination; fossils of a deeper host start with the run.
_SEEDS = f"""
WITH changes AS (
    SELECT id,
    {_fields(f"{_NETWORK} slot before after blueprint cause {OF_DECISION}")}
    FROM events WHERE type = 'lifecycle_transition'
), lives AS (
    SELECT *, SUM(after = 'germinated' OR cause = 'start')
        OVER (PARTITION BY episode, environment, slot ORDER BY id) AS life
    FROM changes
)
SELECT episode, environment, slot, life,
    MAX(blueprint) AS blueprint,
    MIN(step) AS germinated,
    {_FIRST_STEPS},
    CASE WHEN SUM(after = 'pruned') THEN 'pruned' WHEN SUM(after = 'fossilized') THEN 'fossilized' ELSE 'unfinished' END
        AS outcome,
    {_AT_THE_END}
FROM lives WHERE life > 0
GROUP BY episode, environment, slot, life
"""


def _of_only(event: str, names: str) -> str:
    """SQL for fields of a group's only event of a type."""
    return ",\n    ".join(
        f"MAX(CASE type WHEN '{event}' THEN json_extract(payload, '$.{name}') END) AS {name}" for name in names.split()
    )


_EPISODES = f"""
SELECT MAX(iteration) AS iteration,
    {_fields("episode environment")},
    {_of_only("episode_started", "instance family variant rent host_parameters reward")},
    MAX(json_extract(payload, '$.step')) AS steps,
    {_of_only("episode_ended", "objective accuracy added paid kept")}
FROM events WHERE type IN ('episode_started', 'episode_ended')
GROUP BY 2, 3 HAVING SUM(type = 'episode_ended')
"""
_LISTS = "blueprint alpha contribution contribution_error threshold gradient_ratio vanished_share exploded_share"
"""Fields of a decision, with an s, that have an entry per slot."""
_SLOTS = ",\n    ".join(
    [
        _fields(_NETWORK, _PAYLOAD),
        "part.key AS slot",
        "part.value AS stage",
        *(f"json_extract(events.payload, '$.{name}s[' || part.key || ']') AS {name}" for name in _LISTS.split()),
    ]
)
_BLUEPRINT_OF = (
    "(SELECT json_extract(value, '$.blueprint') FROM json_each(events.payload, '$.modules')\n"
    "        WHERE json_extract(value, '$.slot') = json_extract(part.value, '$.{0}')) AS {0}_blueprint"
)
_PROBED = f"{_fields('instance family', _PAYLOAD)},\n    "
_EXACT = f",\n    {_fields('exact', _PAYLOAD)}"
_PPO_METRICS = "policy_loss value_loss entropy clip_fraction gradient_norm explained_variance return_mean learning_rate"
_PPO = f"""
SELECT id, time, iteration,
    {_fields("optimizer_steps stopped_early kl")},
    {_fields(_PPO_METRICS, path="$.metrics.{}")},
    {_fields("anomalies metrics")}
FROM events WHERE type = 'ppo_updated'
"""

VIEWS: Mapping[str, View] = {
    "seeds": View("one seed's life, from germination to its fossil or its end", _SEEDS),
    "episodes": View("one episode of one network that has ended", _EPISODES),
    "decisions": View(
        "one decision and how its network stood afterwards",
        _select(
            "step_taken",
            f"{_NETWORK} op slot blueprint value log_prob reward train_loss loss metric objective added",
        ),
    ),
    "slots": View("one slot after one decision", _select_parts("step_taken", "stages", _SLOTS)),
    "rewards": View(
        "one term of the reward for one decision",
        _select_parts(
            "step_taken", "terms", f"{_fields(_NETWORK, _PAYLOAD)},\n    part.key AS term, part.value AS value"
        ),
    ),
    "transitions": View(
        "one change of a slot's stage",
        _select("lifecycle_transition", f"{_NETWORK} slot before after blueprint cause reason {OF_DECISION}"),
    ),
    "gates": View("one new result of a gate", _select("gate_checked", f"{_NETWORK} slot gate passed reason")),
    "ppo": View("one update of the policy", _PPO),
    "anomalies": View(
        "one anomaly of an update",
        _select("anomaly_raised", "anomaly head figure value bound response meaning"),
    ),
    "module_values": View(
        "one module that the greedy policy kept in a probe instance's network: its Shapley value",
        _select_parts(
            "interactions_measured", "modules", _PROBED + _fields("slot blueprint value", "part.value") + _EXACT
        ),
    ),
    "interactions": View(
        "two such modules of one network: their interaction",
        _select_parts(
            "interactions_measured",
            "pairs",
            _PROBED
            + _fields("first second", "part.value")
            + f",\n    {_BLUEPRINT_OF.format('first')},\n    {_BLUEPRINT_OF.format('second')},\n    "
            + _fields("interaction", "part.value")
            + _EXACT,
        ),
    ),
    # Figures of heads and modules include their names, as in head_ratio/slot.
    "minibatches": View(
        "one figure of one minibatch, in the iterations after an anomaly",
        _select_parts(
            "minibatch_recorded",
            "figures",
            f"{_fields('minibatch', _PAYLOAD)},\n    part.key AS figure, part.value AS value",
        ),
    ),
    "rollbacks": View(
        "one rollback by the governor",
        _select("rolled_back", f"{_NETWORK} trouble loss_before metric_before loss_after metric_after pruned ended"),
    ),
}


def build_view_statements(kind: str) -> str:
    """SQL that makes all views, where ``kind`` is ``VIEW`` or ``TEMP VIEW``."""
    return "\n".join(f"CREATE {kind} IF NOT EXISTS {name} AS {view.query};" for name, view in VIEWS.items())
