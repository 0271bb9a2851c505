"""Lanes: a slot's stages as spans, and what they look like."""

import matplotlib as mpl
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from esper.lab.drawing import STAGE_STYLES, WIDTHS, Span, explain_stages, find_spans
from esper.lab.exhibit import Row
from esper.lifecycle.table import Stage

TRIED_AND_PRUNED = [
    *[("dormant", None)] * 2,
    ("germinated", "norm"),
    *[("blending", "norm")] * 3,
    *[("holding", "norm")] * 2,
    ("pruned", "norm"),
    *[("embargoed", None)] * 2,
    ("resetting", None),
    *[("dormant", None)] * 3,
    ("germinated", "mlp"),
    *[("blending", "mlp")] * 4,
]


def rows(stages: list[tuple[str, str | None]]) -> list[Row]:
    """A slot at decisions 1, 2, ..."""
    return [
        {"decision": decision, "stage": stage, "blueprint": blueprint}
        for decision, (stage, blueprint) in enumerate(stages, 1)
    ]


def test_stages_become_spans_without_dormancy_and_with_one_cooldown():
    assert find_spans(rows(TRIED_AND_PRUNED)) == [
        Span(Stage.GERMINATED, 3, 3, "norm"),
        Span(Stage.BLENDING, 4, 6, "norm"),
        Span(Stage.HOLDING, 7, 8, "norm"),
        Span(Stage.PRUNED, 9, 12, None),
        Span(Stage.GERMINATED, 16, 16, "mlp"),
        Span(Stage.BLENDING, 17, 20, "mlp"),
    ]
    # Two cooldowns stay two, and what follows a dormant time is a life of its own.
    again = find_spans(rows([*TRIED_AND_PRUNED[:12], ("germinated", "norm"), ("pruned", "norm"), ("embargoed", None)]))
    assert [span.stage for span in again].count(Stage.PRUNED) == 2
    lives = find_spans(rows([("fossilized", "norm"), ("dormant", None), ("fossilized", "norm")]))
    assert lives == [Span(Stage.FOSSILIZED, 1, 1, "norm"), Span(Stage.FOSSILIZED, 3, 3, "norm")]


def test_every_stage_that_is_drawn_is_explained():
    drawn = set(Stage) - {Stage.DORMANT, Stage.EMBARGOED, Stage.RESETTING}
    assert set(STAGE_STYLES) == drawn
    assert len({style.letter for style in STAGE_STYLES.values()}) == len(STAGE_STYLES)


@pytest.mark.parametrize("columns", WIDTHS)
def test_the_legend_of_all_stages_fits_into_the_figure(columns: int):
    """With the letters of `drawing`, which are small."""
    with mpl.rc_context({"legend.fontsize": 6.5, "legend.handlelength": 1.8}):
        canvas = Figure(figsize=(WIDTHS[columns], 2.0), layout="constrained")
        agg = FigureCanvasAgg(canvas)
        explain_stages(canvas, canvas.subplots(), set(STAGE_STYLES))
        agg.draw()
    legend = canvas.legends[0].get_window_extent()
    assert legend.x0 >= 0
    assert legend.x1 <= canvas.bbox.x1
