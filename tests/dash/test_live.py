"""Watching a run: what the panel and the lines say, at 80 and 120 columns."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from esper.dash.output import sparkline
from esper.dash.progress import (
    LINES_PER_RUN,
    PACE_WINDOW,
    RECENT,
    LineView,
    PanelView,
    TrainingPanel,
    TrainingProgress,
    moving_average,
    view_training,
)
from esper.dash.reporter import ProgressReporter
from esper.rl.diagnostics import Anomaly
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
    console.print(TrainingPanel(progress))
    return [line.rstrip() for line in console.export_text().splitlines()]


def progress_of(count: int, total: int = 40, **update: object) -> TrainingProgress:
    progress = TrainingProgress(total, levels=LEVELS, clock=Clock())
    for number in range(1, count + 1):
        probe = 0.655 if number == 20 else None
        progress.add(iteration(number, total, objective=0.5 + 0.005 * number, probe=probe, **update))
    return progress


@pytest.mark.parametrize("width", WIDTHS)
def test_everything_fits_a_terminal(width: int):
    progress = progress_of(23)
    progress.add(iteration(24, anomalies=(ALARMS[Anomaly.EXPLAINED_VARIANCE],)))
    lines = drawn(progress, width)
    assert max(map(len, lines)) <= width
    assert len(lines) < TERMINAL_ROWS


@pytest.mark.parametrize("width", WIDTHS)
def test_the_panel_says_what_matters(width: int):
    text = "\n".join(drawn(progress_of(23), width))
    for words in ["iteration 23/40", "left", "policy (greedy)", "0.655", "at iteration 20", "heuristic", "0.641"]:
        assert words in text
    for words in ["accuracy", "0.672", "113% of the host's parameters", "layer0 81%", "germinate 18%", "entropy"]:
        assert words in text
    for words in ["0.0042", "explained variance", "0.64", "clipped", "6%", "steps/s", "400"]:
        assert words in text
    assert all(f"{family} {value:.2f}" in text for family, value in FAMILIES.items())
    assert "advance" not in text  # an operation that never occurs


def test_controllers_stand_in_order_of_their_scores():
    lines = drawn(progress_of(23), 80)
    names = [line.split()[0] for line in lines if line.endswith("●") or "●" in line]
    assert names == ["policy", "heuristic", "periodic", "all_at_start", "none", "random"]
    places = [line.index("●") for line in lines if "●" in line]
    assert places == sorted(places, reverse=True)


def test_before_the_baselines_are_known_and_before_the_first_iteration():
    assert "finding the baselines' level" in "\n".join(drawn(TrainingProgress(40), 80))
    text = "\n".join(drawn(TrainingProgress(40, levels=LEVELS), 80))
    assert "heuristic" in text
    assert "accuracy" not in text


def test_one_level_alone_can_be_drawn():
    assert any("none" in line for line in drawn(TrainingProgress(40, levels={"none": 0.5}), 80))


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
    progress = TrainingProgress(20, clock=clock)
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


def test_a_resumed_run_knows_its_past():
    progress = TrainingProgress(10, [0.5, 0.6])
    progress.add(iteration(3, 10))
    assert progress.done == 3
    assert "iteration 3/10" in "\n".join(drawn(TrainingProgress(10, [0.5, 0.6, 0.7], levels=LEVELS), 80))


def test_smoothing_is_the_mean_of_the_last_five():
    assert moving_average([]) == []
    assert moving_average([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]) == pytest.approx([1, 1.5, 2, 2.5, 3, 4])


def test_sparklines_span_the_blocks():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([1, 1], 8) == "▁▁"
    assert len(sparkline(list(range(100)), 8)) == 8


def lines_of(total: int, probes: dict[int, float], anomalies: dict[int, Anomaly]) -> list[str]:
    console = Console(file=io.StringIO(), width=80)
    view = view_training(console, TrainingProgress(total, clock=Clock()))
    assert isinstance(view, LineView)
    with view:
        view.show_baselines(LEVELS)
        for number in range(1, total + 1):
            found = (ALARMS[anomalies[number]],) if number in anomalies else ()
            view.add_iteration(iteration(number, total, probe=probes.get(number), anomalies=found))
    assert isinstance(console.file, io.StringIO)
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


def test_a_line_tells_of_rollbacks():
    console = Console(file=io.StringIO(), width=80)
    with LineView(console, TrainingProgress(3, clock=Clock())) as view:
        view.add_iteration(iteration(1, 3, rollbacks=2))
        view.add_iteration(iteration(3, 3))
    assert isinstance(console.file, io.StringIO)
    _, first, last = console.file.getvalue().splitlines()
    assert first.endswith(", 2 rolled back")
    assert "rolled back" not in last


def test_lines_are_not_wrapped():
    told = [line for line in lines_of(20, {}, {}) if line.startswith("iteration")]
    assert told
    assert all("steps/s" in line for line in told)


def test_on_a_terminal_the_panel_redraws_and_leaves_its_last_state():
    console = Console(file=io.StringIO(), width=80, force_terminal=True)
    view = view_training(console, TrainingProgress(2, clock=Clock()))
    assert isinstance(view, PanelView)
    with view:
        view.show_baselines(LEVELS)
        view.add_iteration(iteration(1, 2))
        view.add_iteration(iteration(2, 2))
    assert isinstance(console.file, io.StringIO)
    assert "2/2" in console.file.getvalue()


def test_lines_tell_the_newest_objective_like_all_other_figures():
    output = io.StringIO()
    with LineView(Console(file=output, width=200), TrainingProgress(2, levels=LEVELS, clock=Clock())) as view:
        for number, objective in ((1, 0.1), (2, 0.5)):
            view.add_iteration(iteration(number, 2, objective=objective))
    assert "iteration 2/2, J 0.500," in output.getvalue()


def test_lines_between_iterations_say_how_many_are_done_and_how_long_it_takes():
    console = Console(file=io.StringIO(), width=200)
    progress = TrainingProgress(3, clock=Clock())
    with ProgressReporter(console, "esper train") as reporter, LineView(console, progress) as view:
        view.count_baseline_tasks(2, 8)
        assert (
            reporter.describe_progress()
            == "finding the baselines' level: 2 of 8 done, 0:00 elapsed, time left not known yet"
        )
        view.show_baselines(LEVELS)
        assert reporter.describe_progress().startswith("training, in iterations: 0 of 3 done, ")
        view.add_iteration(iteration(1, 3))
        assert reporter.describe_progress() == "training, in iterations: 1 of 3 done, 0:00 elapsed, about 0:00 left"
