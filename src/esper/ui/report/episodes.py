"""Whole episodes as timelines: what each slot went through, and the network's accuracy meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from esper.experiments.behaviour import Behaviour, EpisodeTimeline
from esper.experiments.episode_log import StageChange
from esper.lifecycle.stages import COOLDOWN, Stage
from esper.ui.figures.record import Files
from esper.ui.formats import percent, score
from esper.ui.report.axes import axis_for, counting_axis
from esper.ui.report.layout import figure, section
from esper.ui.report.markup import Element, Node, element
from esper.ui.report.plot import Plot, drawing, percentage, text, vertical

ACCURACY_HEIGHT = 56
BAR_HEIGHT = 16
LABEL_HEIGHT = 15
LANE_HEIGHT = BAR_HEIGHT + LABEL_HEIGHT + 6
LEFT = 50
RIGHT = 6
"""Pixels beside the drawings, which have to line up."""

GLYPHS = {
    Stage.GERMINATED: "g",
    Stage.TRAINING: "t",
    Stage.BLENDING: "b",
    Stage.HOLDING: "h",
    Stage.FOSSILIZED: "F",
    Stage.PRUNED: "x",
}
MEANINGS = {
    Stage.GERMINATED: "germinated",
    Stage.TRAINING: "training in isolation",
    Stage.BLENDING: "blending in",
    Stage.HOLDING: "held on trial",
    Stage.FOSSILIZED: "fossilized: kept for good",
    Stage.PRUNED: "pruned, slot cooling down",
}
_SOURCE = Files("behaviour.json in the run's directory, the list episodes.\n")


@dataclass(frozen=True)
class Span:
    """A slot's time in one stage: from the decision ``start`` until before ``end``."""

    stage: Stage
    start: int
    end: int
    blueprint: str | None


def spans(changes: Sequence[StageChange], slot: int, steps: int) -> list[Span]:
    """A slot's stages over an episode of ``steps`` decisions; dormant times left out, cooldowns as one."""
    own = [change for change in changes if change.slot == slot]
    found = [
        Span(Stage[change.after.upper()], change.step, end, change.blueprint)
        for change, end in zip(own, _ends([change.step for change in own], steps), strict=True)
    ]
    return _cooldowns_joined([span for span in found if span.stage != Stage.DORMANT])


def _cooldowns_joined(found: Sequence[Span]) -> list[Span]:
    """The cooldown's stages as one, from PRUNED to the end of the last."""
    joined: list[Span] = []
    for span in found:
        if joined and span.stage in COOLDOWN and joined[-1].stage in COOLDOWN:
            joined[-1] = replace(joined[-1], end=span.end)
        else:
            joined.append(span)
    return joined


def episodes_section(behaviour: Behaviour) -> Element:
    """The first episode of each family, families that were trained on first."""
    caption = (
        "The policy's first held-out episode of each family: validation accuracy above, below it one lane per slot "
        "over the episode's decisions. A label names the blueprint that germinated there; seeds that are not "
        "fossilized at the end are dropped."
    )
    panels = [_panel(episode, behaviour.sites) for episode in behaviour.episodes]
    drawn = element("div", *panels, class_="panels")
    return section("What the policy does", figure(drawn, caption, stage_legend(), source=_SOURCE))


def stage_legend() -> Element:
    """Colours and letters of the stages."""
    samples = [
        element("span", element("i", GLYPHS[stage], class_=f"stage {stage.name.lower()}"), meaning, class_="entry")
        for stage, meaning in MEANINGS.items()
    ]
    return element("div", *samples, class_="legend")


def _panel(episode: EpisodeTimeline, sites: Sequence[str]) -> Element:
    note = f"score {score(episode.score)}, parameters +{percent(episode.growth)}"
    if episode.split == "transfer":
        note += ", new family"
    return element(
        "div",
        element("h4", f"{episode.family} / {episode.variant}"),
        element("p", note, class_="note"),
        _accuracy(episode),
        lanes(episode.changes, len(episode.accuracy), sites),
    )


def _accuracy(episode: EpisodeTimeline) -> Element:
    steps = len(episode.accuracy)
    plot = Plot(
        counting_axis(steps), axis_for([0.0, 1.0], 3), ACCURACY_HEIGHT, left=LEFT, right=RIGHT, label_ticks=False
    )
    curve = [(step + 1.0, value) for step, value in enumerate(episode.accuracy)]
    marks: list[Node] = [plot.curve(curve, "policy")]
    if episode.drift_step is not None:
        place = plot.across(episode.drift_step)
        marks.append(vertical(place, 0, plot.height, "zero"))
        marks.append(element("svg", text("4", 10, "data drift", "tick start"), x=place))
    return plot.figure(*marks, title="Validation accuracy over the episode")


def lanes(changes: Sequence[StageChange], steps: int, sites: Sequence[str]) -> Element:
    """The stages of each slot over so many decisions."""
    marks: list[Node] = []
    for slot, site in enumerate(sites):
        top = slot * LANE_HEIGHT
        bar = top + LABEL_HEIGHT
        marks.append(element("rect", x=0, y=bar, width="100%", height=BAR_HEIGHT, class_="lane"))
        marks.append(text("-8", bar + 12, site, "tick end"))
        own = spans(changes, slot, steps)
        marks += [_bar(span, bar, steps) for span in own]
        marks += _seed_labels(own, top, steps)
    axis = counting_axis(steps)
    bottom = len(sites) * LANE_HEIGHT + 12
    marks += [text(percentage(axis.share(tick)), bottom, axis.label(tick), "tick middle") for tick in axis.ticks]
    return drawing(bottom + 4, "Stages of the slots over the episode", *marks, left=LEFT, right=RIGHT)


def _bar(span: Span, top: int, steps: int) -> Element:
    """One stage, with its letter, clipped to its time."""
    blueprint = f" ({span.blueprint})" if span.blueprint else ""
    title = f"{span.stage.name.lower()}{blueprint}: decisions {span.start} to {span.end - 1}"
    box = element(
        "rect", element("title", title), width="100%", height=BAR_HEIGHT, class_=f"stage {span.stage.name.lower()}"
    )
    glyph = text("50%", 12, GLYPHS[span.stage], "glyph middle")
    return _clip(span.start, span.end, top, BAR_HEIGHT, steps, box, glyph)


def _seed_labels(own: Sequence[Span], top: int, steps: int) -> list[Node]:
    """The blueprint of each seed above its life, clipped where the next begins."""
    births = [span for span in own if span.stage == Stage.GERMINATED]
    ends = _ends([span.start for span in births], steps)
    return [
        _clip(span.start, end, top, LABEL_HEIGHT, steps, _seed_label(span.blueprint or ""))
        for span, end in zip(births, ends, strict=True)
    ]


def _seed_label(blueprint: str) -> Element:
    return element("text", element("title", blueprint), blueprint, x=0, y=11, class_="seed")


def _ends(starts: Sequence[int], last: int) -> list[int]:
    """Where each time ends that begins at ``starts``: at the next one's start, or at ``last``."""
    return [*starts[1:], last] if starts else []


def _clip(start: int, end: int, top: int, height: int, steps: int, *marks: Node) -> Element:
    left, width = percentage(start / steps), percentage((end - start) / steps)
    return element("svg", *marks, x=left, y=top, width=width, height=height, class_="clip")
