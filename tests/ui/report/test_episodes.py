"""Timelines: a slot's stages as spans, and what they look like."""

from __future__ import annotations

from esper.experiments.episode_log import StageChange
from esper.lifecycle.stages import Stage
from esper.ui.report.episodes import GLYPHS, MEANINGS, Span, spans

STEPS = 20


def change(step: int, before: str, after: str, slot: int = 0, blueprint: str | None = "norm") -> StageChange:
    return StageChange(0, step, slot, before, after, blueprint, "tick", "passed")


TRIED_AND_PRUNED = [
    change(2, "dormant", "germinated"),
    change(3, "germinated", "blending"),
    change(6, "blending", "holding"),
    change(8, "holding", "pruned"),
    change(9, "pruned", "embargoed", blueprint=None),
    change(11, "embargoed", "resetting", blueprint=None),
    change(12, "resetting", "dormant", blueprint=None),
    change(15, "dormant", "germinated", blueprint="mlp"),
    change(16, "germinated", "blending", blueprint="mlp"),
]


def test_stages_become_spans_without_dormancy_and_with_one_cooldown():
    assert spans(TRIED_AND_PRUNED, 0, STEPS) == [
        Span(Stage.GERMINATED, 2, 3, "norm"),
        Span(Stage.BLENDING, 3, 6, "norm"),
        Span(Stage.HOLDING, 6, 8, "norm"),
        Span(Stage.PRUNED, 8, 12, "norm"),
        Span(Stage.GERMINATED, 15, 16, "mlp"),
        Span(Stage.BLENDING, 16, STEPS, "mlp"),
    ]


def test_two_cooldowns_stay_two():
    again = [
        change(12, "resetting", "dormant"),
        change(12, "dormant", "germinated"),
        change(13, "germinated", "pruned"),
    ]
    found = spans([*TRIED_AND_PRUNED[:6], *again], 0, STEPS)
    assert [span.stage for span in found].count(Stage.PRUNED) == 2


def test_slots_do_not_mix():
    assert spans(TRIED_AND_PRUNED, 1, STEPS) == []
    other = [change(4, "dormant", "germinated", slot=1)]
    assert spans([*TRIED_AND_PRUNED, *other], 1, STEPS) == [Span(Stage.GERMINATED, 4, STEPS, "norm")]


def test_every_stage_that_is_drawn_is_explained():
    drawn = set(Stage) - {Stage.DORMANT, Stage.EMBARGOED, Stage.RESETTING}
    assert set(GLYPHS) == set(MEANINGS) == drawn
    assert len(set(GLYPHS.values())) == len(GLYPHS)
