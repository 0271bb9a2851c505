"""Tables of a training run: its families, its blueprints, its updates."""

from __future__ import annotations

from esper.ui.figures.growing import LATE
from esper.ui.figures.learning import NO_ITERATION
from esper.ui.figures.record import Column, Query, Table
from esper.ui.figures.written import count, decimals, share, short, signed_decimals, text

FAMILIES = Query(f"""\
SELECT family, COUNT(*) AS episodes,
    AVG(objective) AS objective,
    AVG(CASE WHEN {LATE} THEN objective END) AS late_objective,
    AVG(accuracy) AS accuracy,
    AVG(added) AS added,
    AVG((SELECT COUNT(*) FROM json_each(kept) WHERE type != 'null')) AS kept
FROM episodes GROUP BY family ORDER BY family
""")

BLUEPRINTS = Query("""\
SELECT blueprint, COUNT(*) AS seeds,
    AVG(outcome = 'fossilized') AS fossilized,
    AVG(outcome = 'pruned') AS pruned,
    AVG(CASE WHEN outcome = 'fossilized' THEN contribution END) AS contribution
FROM seeds GROUP BY blueprint ORDER BY seeds DESC, blueprint
""")

UPDATES = Query("""\
WITH span AS (SELECT MAX(iteration) AS last FROM scalars)
SELECT replace(replace(name, 'ppo/', ''), '_', ' ') AS figure,
    AVG(CASE WHEN iteration <= (last + 3) / 4 THEN value END) AS first_quarter,
    AVG(CASE WHEN iteration > last * 3 / 4 THEN value END) AS last_quarter,
    MIN(value) AS lowest, MAX(value) AS highest
FROM scalars, span WHERE name IN (
    'ppo/entropy', 'ppo/kl', 'ppo/clip_fraction', 'ppo/explained_variance', 'ppo/gradient_norm',
    'ppo/policy_loss', 'ppo/value_loss', 'ppo/return_mean', 'ppo/optimizer_steps', 'ppo/stopped_early'
)
GROUP BY name ORDER BY name
""")

TABLES = (
    Table(
        "families",
        "Episodes of the training run by family of problems: means over episodes. J is the score on validation data "
        "while the policy explores (late: in the last quarter of the iterations), added are committed parameters over "
        "the host's, kept are fossils per network.",
        FAMILIES,
        (
            Column("family", "family", text, numeric=False),
            Column("episodes", "episodes", count),
            Column("objective", "J", decimals),
            Column("late_objective", "J, late", decimals),
            Column("accuracy", "accuracy", share),
            Column("added", "added", share),
            Column("kept", "kept", decimals),
        ),
        "no episode has ended",
    ),
    Table(
        "blueprints",
        "Seeds of the training run by blueprint: what became of them, and the mean contribution to validation accuracy "
        "of fossilized ones when they were fossilized.",
        BLUEPRINTS,
        (
            Column("blueprint", "blueprint", text, numeric=False),
            Column("seeds", "seeds", count),
            Column("fossilized", "fossilized", share),
            Column("pruned", "pruned", share),
            Column("contribution", "contribution", signed_decimals),
        ),
        "no seed has germinated",
    ),
    Table(
        "ppo",
        "Policy updates: means over the first and the last quarter of the iterations, and the range over all.",
        UPDATES,
        (
            Column("figure", "figure", text, numeric=False),
            Column("first_quarter", "first quarter", short),
            Column("last_quarter", "last quarter", short),
            Column("lowest", "lowest", short),
            Column("highest", "highest", short),
        ),
        NO_ITERATION,
    ),
)
