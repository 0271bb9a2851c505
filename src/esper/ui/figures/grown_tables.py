"""Tables of one model that grew: its seeds' lives, the decisions, the rollbacks, what came out."""

from __future__ import annotations

from dataclasses import asdict

from esper.practice.result import GrowResult
from esper.ui.figures.growing import SLOT_NAME
from esper.ui.figures.record import Column, Exhibit, Files, Query, Table
from esper.ui.figures.rows import Rows
from esper.ui.figures.written import count, difference, figure, text

LIVES = Query(f"""\
SELECT {SLOT_NAME} AS slot_name, blueprint,
    germinated + 1 AS germinated, trained + 1 AS trained, blended + 1 AS blended, held + 1 AS held,
    COALESCE(fossilized, pruned) + 1 AS ended, outcome, cause, contribution
FROM seeds ORDER BY germinated, slot
""")

DECISIONS = Query(f"""\
WITH changed AS (
    SELECT iteration, group_concat({SLOT_NAME} || ' ' || before || ' to ' || after, '; ') AS changes
    FROM (SELECT * FROM transitions ORDER BY id) GROUP BY iteration
), judged AS (
    SELECT iteration,
        group_concat({SLOT_NAME} || ' ' || gate || ' ' || CASE WHEN passed THEN 'passed'
            ELSE 'held back: ' || replace(reason, '_', ' ') END, '; ') AS verdicts
    FROM (SELECT * FROM gates ORDER BY id) GROUP BY iteration
)
SELECT iteration AS decision, op, {SLOT_NAME} AS slot_name, blueprint, changes, verdicts, loss, metric
FROM decisions LEFT JOIN changed USING (iteration) LEFT JOIN judged USING (iteration)
WHERE op != 'wait' OR changes IS NOT NULL OR verdicts IS NOT NULL
ORDER BY iteration
""")

ROLLBACKS = Query("""\
SELECT iteration AS decision, trouble, loss_before, loss_after, json_array_length(pruned) AS seeds_lost
FROM rollbacks ORDER BY id
""")

RESULT = Files("result.json in the run's directory, its fields as they are.\n")
KEPT = Files("result.json in the run's directory, the list kept.\n")
_UNFINISHED = "the run has not ended"

TABLES = (
    Table(
        "seeds",
        "The life of each seed, by the decisions with which it entered a stage. {contributions}",
        LIVES,
        (
            Column("slot_name", "slot", text, numeric=False),
            Column("blueprint", "blueprint", text, numeric=False),
            Column("germinated", "germinated", count),
            Column("blended", "blended", count),
            Column("held", "held", count),
            Column("ended", "ended", count),
            Column("outcome", "outcome", text, numeric=False),
            Column("contribution", "contribution", difference),
        ),
        "no seed has germinated",
    ),
    Table(
        "decisions",
        "Every decision with which something happened: what was decided, which slots changed their stage, what the "
        "gates ahead of seeds said anew, and the {measured} on validation data that it was made on.",
        DECISIONS,
        (
            Column("decision", "decision", count),
            Column("op", "operation", text, numeric=False),
            Column("slot_name", "slot", text, numeric=False),
            Column("blueprint", "blueprint", text, numeric=False),
            Column("changes", "changes", text, numeric=False, long=True),
            Column("verdicts", "gates", text, numeric=False, long=True),
            Column("loss", "loss", figure),
            Column("metric", "{metric}", figure),
        ),
        "all decisions were to wait",
    ),
    Table(
        "rollbacks",
        "Every return to the last good state, with the validation loss before and after.",
        ROLLBACKS,
        (
            Column("decision", "decision", count),
            Column("trouble", "trouble", text, numeric=False),
            Column("loss_before", "loss before", figure),
            Column("loss_after", "loss after", figure),
            Column("seeds_lost", "seeds lost", count),
        ),
        "training never blew up",
    ),
)

_RESULT_TABLE = Table(
    "result",
    "What came out; loss (in nats), accuracy and score, the accuracy less rent, are on test data.",
    RESULT,
    (Column("field", "field", text, numeric=False), Column("value", "value", text)),
    _UNFINISHED,
)
_KEPT_TABLE = Table(
    "kept",
    "The seeds that are part of the model.",
    KEPT,
    (
        Column("slot", "slot", text, numeric=False),
        Column("blueprint", "blueprint", text, numeric=False),
        Column("parameters", "parameters", count),
    ),
    "no seed was kept",
)


def result_exhibits(result: GrowResult | None) -> list[Exhibit]:
    """What came out; without rows while the run goes on."""
    record = {} if result is None else asdict(result)
    plain = [(name, value) for name, value in record.items() if isinstance(value, str | int | float)]
    kept = () if result is None else result.kept
    return [
        (_RESULT_TABLE, Rows(("field", "value"), tuple(plain))),
        (
            _KEPT_TABLE,
            Rows(("slot", "blueprint", "parameters"), tuple((one.slot, one.blueprint, one.parameters) for one in kept)),
        ),
    ]
