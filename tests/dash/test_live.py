"""Watching a run: what the panel and the lines say, at 80 and 120 columns."""

import asyncio
import io
import re
import sqlite3
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing
from pathlib import Path
from threading import Event

import pytest
from rich.console import Console

from dash.planted_run import Plan, plant
from esper.dash import stream
from esper.dash.output import ProgressReporter
from esper.dash.progress import (
    LINES_PER_RUN,
    MOST_POINTS,
    PACE_WINDOW,
    RECENT,
    TrainingProgress,
    draw_learning_curve,
    moving_average,
    sparkline,
)
from esper.dash.stream import StoreFollower, stream_news
from esper.errors import RunError
from esper.runs.events import CheckpointWritten, RunResumed
from esper.runs.reader import RunReader
from esper.runs.store import RunStore
from esper.train.iteration import Anomaly
from lab.planted import ALARMS, FAMILIES, LEVELS, iteration

WIDTHS = [80, 120]
TERMINAL_ROWS = 24


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def drawn(progress: TrainingProgress, width: int) -> list[str]:
    console = Console(record=True, width=width, file=io.StringIO())
    console.print(progress)
    return [line.rstrip() for line in console.export_text().splitlines()]


def progress_of(count: int, total: int = 40, **update: object) -> TrainingProgress:
    progress = TrainingProgress(Console(), total, levels=LEVELS, clock=Clock())
    for number in range(1, count + 1):
        probe = 0.655 if number == 20 else None
        progress.add(iteration(number, total, objective=0.5 + 0.005 * number, probe=probe, **update))
    return progress


@pytest.mark.parametrize("width", WIDTHS)
def test_the_panel_says_what_matters_and_fits_a_terminal(width: int):
    lines = drawn(progress_of(23), width)
    assert max(map(len, lines)) <= width
    assert len(lines) < TERMINAL_ROWS - 1, "room for an anomaly"
    text = "\n".join(lines)
    for words in ["iteration 23/40", "left", "policy (greedy)", "0.655", "at iteration 20", "heuristic", "0.641"]:
        assert words in text
    for words in ["accuracy", "0.672", "113% of the host's parameters", "layer0 81%", "germinate 18%", "entropy"]:
        assert words in text
    for words in ["0.0042", "explained variance", "0.64", "clipped", "6%", "steps/s", "400"]:
        assert words in text
    assert all(f"{family} {value:.2f}" in text for family, value in FAMILIES.items())
    assert "advance" not in text  # an operation that never occurs
    # Controllers stand in the order of their scores.
    scale = [line for line in lines if "●" in line]
    names = ["policy", "heuristic", "periodic", "all_at_start", "none", "random"]
    assert [line.split()[0] for line in scale] == names
    places = [line.index("●") for line in scale]
    assert places == sorted(places, reverse=True)


def test_before_the_baselines_are_known_and_before_the_first_iteration():
    progress = TrainingProgress(Console(), 40)
    assert "measuring baselines ..." in "\n".join(drawn(progress, 80))
    progress.count_baseline_tasks(4, 7)
    assert "measuring baselines: 4 of 7 ..." in "\n".join(drawn(progress, 80))
    text = "\n".join(drawn(TrainingProgress(Console(), 40, levels=LEVELS), 80))
    assert "heuristic" in text
    assert "accuracy" not in text


def test_an_anomaly_is_explained_and_fades():
    progress = progress_of(3)
    progress.add(iteration(4, anomalies=(ALARMS[Anomaly.KL],)))
    (line,) = [line for line in drawn(progress, 160) if Anomaly.KL.meaning in line]
    assert "kl is 0.4, the bound 0.15" in line
    for number in range(5, 5 + RECENT):
        progress.add(iteration(number))
    assert Anomaly.KL.meaning not in "\n".join(drawn(progress, 120))


def test_time_left_follows_the_recent_pace():
    clock = Clock()
    progress = TrainingProgress(Console(), 20, clock=clock)
    assert progress.left is None
    assert progress.steps_per_second is None
    for number in range(1, 11):
        progress.add(iteration(number, 20))  # each says it took 9.6 s
    assert progress.left == pytest.approx(96)
    assert progress.steps_per_second == pytest.approx(400)
    clock.now += 5
    assert progress.left == pytest.approx(91)
    assert progress.elapsed == 5
    clock.now += 1000
    assert progress.left == 0
    assert PACE_WINDOW < 10  # else this shows nothing


def test_a_resumed_run_knows_its_past_and_curves_are_smoothed():
    progress = TrainingProgress(Console(), 10, [0.5, 0.6])
    progress.add(iteration(3, 10))
    assert progress.done == 3
    assert "iteration 3/10" in "\n".join(drawn(TrainingProgress(Console(), 10, [0.5, 0.6, 0.7], levels=LEVELS), 80))
    assert moving_average([]) == []
    assert moving_average([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]) == pytest.approx([1, 1.5, 2, 2.5, 3, 4])
    assert [sparkline(values, 8) for values in ([0, 1, 2, 3, 4, 5, 6, 7], [1, 1])] == ["▁▂▃▄▅▆▇█", "▁▁"]
    assert len(sparkline(list(range(100)), 8)) == 8


def lines_of(total: int, probes: dict[int, float], anomalies: dict[int, Anomaly]) -> list[str]:
    console = Console(file=io.StringIO(), width=80)
    with TrainingProgress(console, total, clock=Clock()) as view:
        view.add_levels(LEVELS)
        for number in range(1, total + 1):
            found = (ALARMS[anomalies[number]],) if number in anomalies else ()
            view.add(iteration(number, total, probe=probes.get(number), anomalies=found))
    return console.file.getvalue().splitlines()


def test_without_a_terminal_there_are_lines_now_and_then():
    lines = lines_of(200, {}, {})
    assert lines[1].startswith("baselines: none 0.531, random 0.488")
    numbers = [int(line.split()[1].split("/")[0]) for line in lines if line.startswith("iteration")]
    assert numbers == [1, *range(10, 201, 10)]
    assert len(numbers) == LINES_PER_RUN + 1


def test_lines_tell_measurements_and_new_anomalies():
    lines = lines_of(60, {7: 0.65}, {11: Anomaly.ENTROPY, 13: Anomaly.ENTROPY})
    assert [line for line in lines if "greedy policy 0.650 (best baseline heuristic 0.641)" in line]
    told = [line for line in lines if "anomaly" in line]
    assert told == [f"iteration 11: anomaly entropy of slot: {ALARMS[Anomaly.ENTROPY].describe()}"]


def test_the_learning_curve_is_between_the_untrained_policy_and_the_best_baseline():
    levels = {**LEVELS, "untrained": 0.7}  # above all baselines, of which it is none
    probes = [(0, 0.7), *((number, 0.5 + 0.01 * number) for number in range(1, 31))]
    console = Console(record=True, width=100, file=io.StringIO())
    console.print(draw_learning_curve(probes, levels, 56, 100))
    title, first, *curve, best = [line.rstrip() for line in console.export_text().splitlines()]
    assert title.startswith("greedy policy on 56 training problems")
    assert first.split()[:2] == ["untrained", "0.700"]
    assert best.split()[:4] == ["best", "baseline,", "heuristic", "0.641"]
    assert len(curve) <= MOST_POINTS
    assert curve[-1].split()[:3] == ["iteration", "30", "0.800"]
    places = [line.index("●") for line in curve]
    assert places == sorted(places)


def test_a_measurement_is_told_beside_the_best_baseline_and_the_untrained_policy():
    console = Console(file=io.StringIO(), width=200)
    with TrainingProgress(console, 2, clock=Clock()) as view:
        view.add_levels({**LEVELS, "untrained": 0.7}, [(0, 0.7)])
        view.add(iteration(1, 2, probe=0.65))
    (line,) = [line for line in console.file.getvalue().splitlines() if line.startswith("iteration 1/2")]
    assert "greedy policy 0.650 (best baseline heuristic 0.641, untrained 0.700), J while exploring " in line
    assert view.probes == [(0, 0.7), (1, 0.65)]


def test_a_line_tells_of_rollbacks():
    console = Console(file=io.StringIO(), width=80)
    with TrainingProgress(console, 3, clock=Clock()) as view:
        view.add(iteration(1, 3, rollbacks=2))
        view.add(iteration(3, 3))
    _, first, last = console.file.getvalue().splitlines()
    assert first.endswith(", 2 rolled back")
    assert "rolled back" not in last


def test_on_a_terminal_the_panel_redraws_and_leaves_its_last_state():
    console = Console(file=io.StringIO(), width=80, force_terminal=True)
    with TrainingProgress(console, 2, clock=Clock()) as view:
        view.add_levels(LEVELS)
        view.add(iteration(1, 2))
        view.add(iteration(2, 2))
    assert "2/2" in console.file.getvalue()


def test_lines_between_iterations_say_how_many_are_done_and_how_long_it_takes():
    console = Console(file=io.StringIO(), width=200)
    progress = TrainingProgress(console, 3, clock=Clock())
    with ProgressReporter(console, "esper train") as reporter, progress as view:
        view.count_baseline_tasks(2, 8)
        assert reporter.describe_progress().startswith("measuring baselines: 2 of 8 done, ")
        assert reporter.describe_progress().endswith("time left not known yet")
        view.add_levels(LEVELS)
        assert reporter.describe_progress().startswith("training, in iterations: 0 of 3 done, ")
        view.add(iteration(1, 3))
        assert re.fullmatch(r"training, in iterations: 1 of 3 done, .* left", reporter.describe_progress())


# What a browser is sent while it follows a run.


SMALL = Plan(networks=1, slots=1, steps=2, iterations=2, ended=False)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return plant(tmp_path / "run", SMALL)


def newest(store: Path) -> int:
    with closing(sqlite3.connect(store)) as connection:
        return connection.execute("SELECT max(id) FROM events").fetchone()[0]


def test_trouble_is_told_once_and_its_end_too(store: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stream, "MISSING_SECONDS", 0.01)
    monkeypatch.setattr(stream, "POLL_SECONDS", 0.01)
    hidden = store.with_name("hidden.db")
    kinds: list[str] = []

    async def watch() -> None:
        follower = StoreFollower(store, newest(store))
        store.rename(hidden)
        async for message in stream_news(follower, ["step_taken"], lambda: kinds.count("event: reload") > 0):
            kinds.extend(line for line in message.splitlines() if line.startswith("event:"))
            if kinds == ["event: trouble"]:
                await asyncio.sleep(0.1)
                hidden.rename(store)

    asyncio.run(asyncio.wait_for(watch(), 120))
    assert kinds == ["event: trouble", "event: reload"]


# A follower tells of what came since its last look, and of everything that makes what was known doubtful.


STEPS = ["step_taken"]


def emit(store: Path, *iterations: int) -> None:
    with RunStore.open(store) as writer:
        for iteration in iterations:
            writer.emit(CheckpointWritten(iteration=iteration, file="file", sha256="hash"))


def test_only_what_came_since_is_new_and_only_of_the_types_asked_for(store: Path):
    follower, types = StoreFollower(store, newest(store)), ["checkpoint_written"]
    assert follower.poll(types).records == []
    emit(store, 3, 4)
    update = follower.poll(types)
    assert [record.iteration for record in update.records] == [3, 4]
    assert not update.reload
    assert update.last_id == update.records[-1].id == newest(store)
    assert follower.poll(types).records == []
    assert StoreFollower(store).poll(["run_failed"]).records == []


def test_a_follower_takes_up_after_any_event_unless_it_is_far_behind(store: Path, monkeypatch: pytest.MonkeyPatch):
    ids = [record.id for record in StoreFollower(store).poll(STEPS).records]
    assert len(ids) == SMALL.steps * SMALL.iterations
    assert [record.id for record in StoreFollower(store, ids[0]).poll(STEPS).records] == ids[1:]
    monkeypatch.setattr(stream, "BACKLOG", 3)
    follower = StoreFollower(store)
    assert follower.poll(STEPS).reload
    assert not follower.poll(STEPS).reload


def test_closing_waits_for_the_poll_under_way(store: Path, monkeypatch: pytest.MonkeyPatch):
    follower, asked, answer, real = StoreFollower(store), Event(), Event(), RunReader.last_id

    def answer_slowly(reader: RunReader) -> int:
        asked.set()
        answer.wait()
        return real(reader)

    monkeypatch.setattr(RunReader, "last_id", answer_slowly)
    with ThreadPoolExecutor() as threads:
        polled = threads.submit(follower.poll, STEPS)
        asked.wait()
        closed = threads.submit(follower.close)
        early = wait([closed], timeout=0.05).done
        answer.set()
        assert not early
        assert polled.result().records
        closed.result()


def test_a_rewind_makes_everything_known_doubtful_also_when_it_is_made_good_at_once(store: Path):
    before = newest(store)
    follower, early = StoreFollower(store, before), StoreFollower(store, before)
    with RunStore.open(store) as writer:
        writer.rewind(1)
    update = early.poll(STEPS)
    assert (update.reload, update.last_id) == (True, newest(store))
    with RunStore.open(store) as writer:
        while writer.last_id() <= before:
            writer.emit(RunResumed(iteration=1, platform={"esper": "0.1.0"}))
            writer.flush()
    assert follower.poll(["checkpoint_written"]).reload


def test_ids_that_are_given_again_are_noticed(store: Path):
    follower, before = StoreFollower(store), newest(store)
    follower.poll(STEPS)
    with RunStore.open(store) as writer:
        writer.rewind(1)
        while writer.last_id() < before:
            writer.emit(CheckpointWritten(iteration=2, file="file", sha256="hash"))
            writer.flush()
    assert newest(store) == before
    assert follower.poll(STEPS).reload
    assert not follower.poll(STEPS).reload


def test_another_store_in_the_same_place_is_noticed(store: Path):
    follower = StoreFollower(store)
    first = follower._open()
    assert follower._open() is first
    follower.poll(STEPS)
    store.rename(store.with_name("old.db"))
    with pytest.raises(RunError):
        follower.poll(STEPS)
    RunStore.create(store).close()
    assert follower.poll(STEPS).reload
    assert follower._open() is not first


def test_a_rewind_in_the_midst_of_a_poll_loses_nothing(store: Path, monkeypatch: pytest.MonkeyPatch):
    follower, types, real = StoreFollower(store, newest(store)), ["checkpoint_written"], RunReader.last_id
    follower.poll(types)
    emit(store, 3, 4)

    def rewind_afterwards(reader: RunReader) -> int:
        found = real(reader)
        with RunStore.open(store) as writer:
            writer.rewind(2)
        return found

    monkeypatch.setattr(RunReader, "last_id", rewind_afterwards)
    assert [record.iteration for record in follower.poll(types).records] == [3, 4]
    monkeypatch.undo()
    emit(store, 3, 4, 5)
    assert follower.poll(types).reload


def test_another_store_is_noticed_before_the_first_poll(store: Path, tmp_path: Path):
    follower = StoreFollower(store, newest(store))
    follower._open()
    other = plant(tmp_path / "other", Plan(networks=1, slots=1, steps=2, iterations=4, ended=False))
    assert newest(other) > newest(store)
    other.replace(store)
    assert follower.poll(STEPS).reload
