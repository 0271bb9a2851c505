"""The page stands alone, shows what the files hold, and lets no text become markup."""

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from esper.config.loading import dump_settings
from esper.dash.formats import MINUS
from esper.errors import RunError
from esper.lab.evaluate import Behaviour, EpisodeTimeline, Plant, Usage, write_behaviour
from esper.lab.exhibit import Column, Drawing, Files, Table
from esper.lab.report import Report, Section, report_on, write_report
from esper.runs.events import PPOUpdated, RunStarted
from esper.runs.reader import J_MEANING, SCORE_MEANING
from esper.runs.run_directory import RunDirectory
from esper.runs.store import RunStore
from esper.train.iteration import LEVELS
from esper.train.results import KeptPair, Result, SeedShapley, SeedValue, write_results
from esper.train.settings import TrainSettings
from lab import planted as training
from train.results_cases import planted

pytestmark = pytest.mark.landing

ITERATIONS = 12
MEANS = {"policy": 0.7, "untrained": 0.55, "none": 0.5, "heuristic": 0.6}
EPISODE = EpisodeTimeline(
    instance="order/far/1",
    family="order",
    variant="far",
    split="heldout",
    score=0.61,
    growth=0.4,
    drift_step=5,
    accuracy=tuple(0.3 + 0.05 * step for step in range(10)),
    changes=(
        training.change(1, 0, "dormant", "germinated", "token_mix", "germinate"),
        training.change(2, 0, "germinated", "blending", "token_mix", "tick"),
        training.change(6, 0, "blending", "fossilized", "token_mix", "fossilize"),
    ),
)
BEHAVIOUR = Behaviour(
    iteration=ITERATIONS,
    sites=("layer0", "layer1"),
    blueprints=("token_mix", "norm"),
    usage=(
        Usage("order", "heldout", 20, {"wait": 0.9, "germinate": 0.1}, (Plant(0, "token_mix", 1.2, 0.85),)),
        Usage("pointer", "transfer", 8, {"wait": 1.0, "germinate": 0.0}, ()),
    ),
    episodes=(EPISODE, replace(EPISODE, family="pointer", split="transfer", drift_step=None, changes=())),
)


EARNINGS = tuple(
    SeedShapley(
        f"order/far/{number}",
        "order",
        (SeedValue(0, "token_mix", 0.2 + number / 100, 0.0), SeedValue(1, "norm", -0.05, 0.0)),
        (KeptPair(0, 1, 0.01),),
    )
    for number in range(8)
)


class Page(HTMLParser):
    """A page's tags, text and attributes; refuses tags that do not match."""

    VOID = frozenset({"meta", "br", "hr"})

    def __init__(self, html: str) -> None:
        super().__init__()
        self.html = html
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    def values(self, tag: str, name: str) -> list[str | None]:
        """The values of an attribute, in order."""
        return [value for one, other, value in self.attributes if (one, other) == (tag, name)]

    def classed(self, tag: str, kind: str) -> int:
        return sum(
            one == tag and name == "class" and kind in (value or "").split() for one, name, value in self.attributes
        )


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run that was trained but not evaluated."""
    run = RunDirectory.create(tmp_path / "run")
    dump_settings(TrainSettings(iterations=ITERATIONS), run.config)
    with RunStore.create(run.store) as store:
        store.emit(RunStarted(iteration=0, platform={"esper": "9.8.7"}, seed=0))
        store.set_metadata({LEVELS: training.LEVELS})
        for number in range(1, ITERATIONS + 1):
            scalars = {"objective": 0.5 + 0.01 * number, "environment_steps": 1000, "seconds": 2.0, "accuracy": 0.6}
            update = {"ppo/entropy": 1 - 0.02 * number, "ppo/kl": 0.01, "ppo/gradient_norm": float("nan"), "added": 1.0}
            store.record_scalars(number, {**scalars, **update})
            done = {"optimizer_steps": 4, "stopped_early": False, "kl": 0.01, "metrics": {}}
            store.emit(PPOUpdated(iteration=number, **done, anomalies=("explained variance",) * (number == 3)))
        store.record_scalars(ITERATIONS, {"probe_score": 0.655})
    return run


@pytest.fixture
def evaluated(run: RunDirectory) -> RunDirectory:
    write_results(run.evaluation, [*planted(MEANS), *planted(MEANS, 12, split="transfer")])
    write_behaviour(run.behaviour, BEHAVIOUR)
    return run


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages without drawings, which take time, for tests of the texts."""
    monkeypatch.setattr("esper.lab.report.draw_svg", lambda figure: "")


def page_of(run: RunDirectory) -> Page:
    return Page(write_report(run).read_text())


def test_the_page_stands_alone_and_its_drawings_have_captions_and_its_colours(evaluated: RunDirectory):
    page = page_of(evaluated)
    assert not {"script", "link", "img", "iframe", "object", "image"} & set(page.tags)
    assert not re.search(r"https?:|url\((?!#)|href=\"(?!#)|@import|//[a-z]", page.html)
    assert ("meta", "content", "default-src 'none'; style-src 'unsafe-inline'") in page.attributes
    labels = page.values("svg", "aria-label")
    assert len(labels) == page.tags.count("svg") == page.values("svg", "role").count("img") > 5
    assert all(label and label in page.text for label in labels)
    drawings = "".join(re.findall(r"<svg.*?</svg>", page.html, re.DOTALL))
    assert "var(--ink)" in drawings
    assert not re.search("#1c2430|#5b6675|#e3e7ed|#ffffff|#000000", drawings)
    used, defined = (set(re.findall(pattern, drawings)) for pattern in (r'(?:url\(|=")#(\w+)', r' id="(\w+)"'))
    assert used == defined != set()
    # Episodes with their stages.
    for words in ("g: germinated", "b: blending in", "F: fossilized: kept for good", "order / far", "pointer / far"):
        assert words in page.text
    assert page.text.count("data drift") == 1
    assert "score 0.610, parameters +40%, new family" in page.text


def test_a_run_that_was_not_evaluated_shows_how_it_learned_and_how_to_evaluate_it(run: RunDirectory):
    page = page_of(run)
    for words in (
        *(
            "Not evaluated yet",
            f"esper evaluate {run.path}",
            "greedy policy",
            "J while exploring, mean of 5",
            "explained variance (1)",
        ),
        "the greedy policy scored 0.655 and the best baseline, heuristic, 0.641. This is not yet an answer",
        *(f"{name} {level:.3f}" for name, level in training.LEVELS.items()),
        *(f"esper train --config {run.config} --run-dir runs/again", "esper 9.8.7", "learning_rate: "),
    ):
        assert words in page.text, words
    assert "nan" not in page.html, "gaps in a curve are not numbers"


@pytest.mark.usefixtures("undrawn")
def test_the_answer_comes_first_and_every_part_is_linked_and_explained(evaluated: RunDirectory):
    page = page_of(evaluated)
    linked = page.values("a", "href")
    assert linked == [f"#{anchor}" for anchor in page.values("section", "id")]
    assert len(set(linked)) == page.tags.count("h2") == len(linked) > 5
    text = page.text[page.text.index("Did learning to grow networks help?") :]
    assert text.index(SCORE_MEANING) < text.index("How the policy learned")
    for words in (
        *(
            J_MEANING,
            "Yes",
            "On 60 held-out instances this policy scores",
            "above its untrained self",
            "controller, heuristic",
        ),
        *("On families it never trained on: yes.", "Is it better than the baselines?", "0.85 of 1.20"),
        "Does it generalize to new families?",
    ):
        assert words in text, words
    drawn = {value for tag, name, value in page.attributes if (tag, name) == ("figure", "id")}
    for split in ("heldout", "transfer"):
        assert {f"figure-evaluation_{split}_{kind}" for kind in ("scores", "costs")} <= drawn
        assert {f"table-evaluation_{split}", f"table-evaluation_{split}_families"} <= drawn


def test_charts_take_the_width_of_the_page_alone_or_in_pairs(evaluated: RunDirectory):
    for section in report_on([evaluated.path]).sections:
        placed = list(section.place_exhibits())
        narrow = [exhibit.name for exhibit, is_wide in placed if not is_wide]
        assert len(narrow) % 2 == 0, section.title
        for exhibit, is_wide in placed:
            if isinstance(exhibit, Drawing):
                assert (exhibit.columns == 2) == is_wide, exhibit.name
    assert not re.search(r"svg\s*{[^}]*max-width", page_of(evaluated).html)


def test_narrow_tables_share_the_width_in_pairs():
    def make_table(columns: int) -> Table:
        names = [f"column {number}" for number in range(columns)]
        return Table("table", "", Files(""), tuple(map(Column, names)), "", rows=[dict.fromkeys(names, 1)])

    section = Section("A", [make_table(columns) for columns in (2, 7, 2, 8, 3)])
    assert [is_wide for _, is_wide in section.place_exhibits()] == [False, False, True, True, True]


@pytest.mark.usefixtures("undrawn")
def test_optional_columns_without_a_value_are_left_out():
    columns = (Column("name"), Column("full", optional=True), Column("empty", optional=True))
    rows = [{"name": "a", "full": None, "empty": None}, {"name": "b", "full": 0, "empty": None}]
    table = Table("table", "", Files(""), columns, "", rows=rows)
    assert [column.name for column in table.shown_columns] == ["name", "full"]
    assert "<span>empty</span>" not in Report("", "", "", [], [Section("A", [table])], [table]).render()


@pytest.mark.usefixtures("undrawn")
def test_what_kept_seeds_earned(evaluated: RunDirectory):
    write_behaviour(
        evaluated.behaviour, replace(BEHAVIOUR, earnings=(*EARNINGS, replace(EARNINGS[0], seeds=(), pairs=())))
    )
    page = page_of(evaluated)
    assert "What kept seeds contributed" in page.text
    assert re.search(r"token_mix8 in 89%\+0\.235 \[\+0\.2\d\d to \+0\.2\d\d\]0%", page.text)
    assert "norm8 in 89%-0.050 [-0.050 to -0.050]100%" in page.text.replace(MINUS, "-")
    assert "layer0, layer18+0.010 [+0.010 to +0.010]" in page.text
    assert page.classed("b", "below") == 1


@pytest.mark.usefixtures("undrawn")
def test_a_few_earnings_have_no_interval(evaluated: RunDirectory):
    write_behaviour(evaluated.behaviour, replace(BEHAVIOUR, earnings=EARNINGS[:1]))
    text = page_of(evaluated).text
    assert "token_mix1 in 100%+0.200 too few for an interval0%" in text
    assert "layer0, layer11+0.010 too few for an interval" in text


@pytest.mark.usefixtures("undrawn")
def test_earnings_that_there_are_not(evaluated: RunDirectory):
    assert "What kept seeds contributed" not in page_of(evaluated).text  # an old file
    write_behaviour(evaluated.behaviour, replace(BEHAVIOUR, earnings=()))
    assert "The policy kept no seeds." in page_of(evaluated).text


@pytest.mark.usefixtures("undrawn")
def test_health_counts_rollbacks(run: RunDirectory):
    assert "No network diverged." in page_of(run).text
    with RunStore.open(run.store) as store:
        for environment, trouble in enumerate(("not_finite", "exploded", "not_finite")):
            store.emit(training.rolled_back(trouble, iteration=3, episode=3, environment=environment, step=9))
    assert "rolled back diverged networks 3 times (exploded 1, not finite 2)" in (page_of(run).text)


def test_hostile_names_stay_text(run: RunDirectory):
    evil = '<script>alert("&")</script>'
    results = [
        Result(**{**vars(one), "family": evil, "controller": evil if one.controller == "none" else one.controller})
        for one in planted(MEANS)
    ]
    write_results(run.evaluation, results)
    write_behaviour(
        run.behaviour, replace(BEHAVIOUR, sites=(evil, "layer1"), episodes=(replace(EPISODE, variant=evil),))
    )
    page = page_of(run)
    assert "script" not in page.tags
    assert page.text.count(evil) >= 5


@pytest.mark.usefixtures("undrawn")
def test_a_run_without_an_iteration_has_a_report(tmp_path: Path):
    run = RunDirectory.create(tmp_path / "run")
    dump_settings(TrainSettings(), run.config)
    RunStore.create(run.store).close()
    assert "No iteration has finished yet" in page_of(run).text


@pytest.mark.usefixtures("undrawn")
def test_an_outdated_evaluation_is_named(evaluated: RunDirectory):
    write_behaviour(evaluated.behaviour, replace(BEHAVIOUR, iteration=5))
    assert "The policy of iteration 5 was evaluated." in page_of(evaluated).text


@pytest.mark.usefixtures("undrawn")
def test_a_damaged_evaluation_is_refused(evaluated: RunDirectory):
    evaluated.evaluation.write_text("{")
    with pytest.raises(RunError, match="recreate it with `esper evaluate"):
        write_report(evaluated)
