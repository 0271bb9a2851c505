"""Lanes show the stage at each step, and fewer columns than steps show the last of those they stand for."""

from esper.dash.watch.text import GLYPHS, stage_lane, stage_legend
from esper.lifecycle.stages import Stage


def test_a_step_has_a_column_where_there_is_room():
    stages = ["dormant", "germinated", "training", "blending", "holding", "fossilized"]
    assert stage_lane(stages, 8, 80).plain == "·▁▂▄▆█  "


def test_steps_share_columns_where_there_is_not():
    stages = ["dormant", "germinated", "holding", "pruned", "embargoed"]
    assert stage_lane(stages, 8, 4).plain == "▁x- "
    assert stage_lane(stages * 100, 500, 7).cell_len == 7


def test_more_steps_than_planned_and_none_at_all():
    assert stage_lane(["holding"] * 5, 3, 10).plain == "▆▆▆▆▆"
    assert stage_lane([], 4, 10).plain == "    "
    assert stage_lane([], 0, 10).plain == ""


def test_every_stage_has_a_glyph_of_one_column():
    assert set(GLYPHS) == {stage.name.lower() for stage in Stage}
    assert all(len(glyph) == 1 for glyph, _ in GLYPHS.values())
    assert all(stage in stage_legend().plain for stage in ("germinated", "fossilized", "pruned"))


def test_stages_are_told_apart_by_colour_too():
    spans = stage_lane(["holding", "holding", "fossilized"], 3, 3).spans
    assert [(span.start, span.end) for span in spans] == [(0, 2), (2, 3)]
    assert len({str(span.style) for span in spans}) == 2


def test_an_unknown_stage_is_a_question_mark():
    assert stage_lane(["\x1b[2J"], 1, 1).plain == "?"
