"""No command is silent for more than 20 seconds where there is no terminal, and says how much is left."""

import io
import sys
import threading

import pytest
from rich.console import Console

from esper.cli import COMMANDS, Command, main
from esper.commands import options
from esper.dash.output import PACE_WINDOW, SECONDS_BETWEEN_LINES, Clock, ProgressReporter, print_line, report_progress


class FakeClock(Clock):
    """Time that passes when a test lets it; whoever waits for it has acted before that returns."""

    def __init__(self) -> None:
        self._moment = 100.0
        self._changed = threading.Condition()
        self._waits_until = 0.0

    def now(self) -> float:
        return self._moment

    def wait(self, ended: threading.Event, seconds: float) -> bool:
        with self._changed:
            self._waits_until = self._moment + seconds
            self._changed.notify_all()
            while self._moment < self._waits_until and not ended.is_set():
                self._changed.wait(0.01)  # the event does not notify
        return ended.is_set()

    def pass_by(self, seconds: float) -> None:
        """Let time pass, as far as the next line at a time."""
        end = self._moment + seconds
        with self._changed:
            while True:
                assert self._changed.wait_for(lambda: self._waits_until > self._moment, 60)
                self._moment = min(end, self._waits_until)
                self._changed.notify_all()
                if self._moment < self._waits_until:
                    return
                assert self._changed.wait_for(lambda: self._waits_until > self._moment, 60)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def output() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def console(output: io.StringIO) -> Console:
    return Console(file=output, width=80)


def test_a_line_comes_after_15_seconds_without_one_and_says_how_much_is_left(
    clock: FakeClock, output: io.StringIO, console: Console
):
    with ProgressReporter(console, "esper test", clock), report_progress(console, "playing", 10) as progress:
        clock.pass_by(14)
        assert output.getvalue() == ""
        clock.pass_by(1)
        progress.update(1)
        clock.pass_by(15)
        progress.update(2, name="playing on")
        clock.pass_by(5)
        print_line(console, "news")
        clock.pass_by(14)
        assert output.getvalue().endswith("news\n")
        clock.pass_by(1)
    assert output.getvalue().splitlines() == [
        "playing: 0 of 10 done, 0:15 elapsed, time left not known yet",
        "playing: 1 of 10 done, 0:30 elapsed, about 2:00 left",
        "news",
        "playing on: 2 of 10 done, 0:50 elapsed, about 1:53 left",
    ]


def test_outside_of_phases_lines_name_the_command(clock: FakeClock, output: io.StringIO, console: Console):
    with ProgressReporter(console, "esper test", clock):
        clock.pass_by(15)
        with report_progress(console, "drawing"):
            clock.pass_by(15)
        clock.pass_by(15)
    assert output.getvalue().splitlines() == [
        "esper test: 0:15 elapsed",
        "drawing: 0:30 elapsed",
        "esper test: 0:45 elapsed",
    ]


def test_the_time_left_goes_by_the_recent_pace_and_not_by_what_was_done_before(clock: FakeClock, console: Console):
    with ProgressReporter(console, "esper test", clock) as reporter, report_progress(console, "training", 100) as phase:
        phase.skip_to(50)
        for done in range(51, 51 + PACE_WINDOW):
            clock.pass_by(2)
            phase.update(done)
        assert reporter.describe_progress() == "training: 58 of 100 done, 0:16 elapsed, about 1:24 left"
        for done in range(59, 59 + PACE_WINDOW):
            clock.pass_by(1)
            phase.update(done)
        assert reporter.describe_progress().endswith("66 of 100 done, 0:24 elapsed, about 0:34 left")
        phase.update(0, 4)  # something else
        assert reporter.describe_progress().endswith("0 of 4 done, 0:24 elapsed, time left not known yet")
        clock.pass_by(6)
        phase.update(1.5)
        assert reporter.describe_progress().endswith("1.5 of 4 done, 0:30 elapsed, about 0:10 left")


def test_a_terminal_has_a_bar_and_no_lines(clock: FakeClock, output: io.StringIO):
    console = Console(file=output, width=80, force_terminal=True)
    with ProgressReporter(console, "esper test", clock), report_progress(console, "[playing]", 10) as progress:
        progress.update(3)
        clock.pass_by(95)
    assert "[playing]" in output.getvalue()
    assert "3 of 10 done, 1:35 elapsed, about 1:11 left" in output.getvalue()
    assert output.getvalue().count("\n") == 1  # redrawn in place


def test_a_phase_without_a_command_line_reports_by_itself(output: io.StringIO, console: Console):
    assert SECONDS_BETWEEN_LINES <= 15, "lines come every 20 seconds also where a busy machine delays them"
    with report_progress(console, "playing", 2) as progress:
        progress.update(1)
        assert progress.describe_progress().startswith("playing: 1 of 2 done, ")
    assert output.getvalue() == ""


def work_in_silence() -> None:
    """Work."""
    FOR_COMMANDS.pass_by(3 * SECONDS_BETWEEN_LINES)


FOR_COMMANDS: FakeClock | None = None


def test_no_command_is_silent_for_longer_whatever_it_does(
    clock: FakeClock, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    assert [command.name for command in COMMANDS if not command.ends] == ["dash"]  # serves until it is stopped
    monkeypatch.setattr(sys.modules[__name__], "FOR_COMMANDS", clock)
    monkeypatch.setattr(options, "ProgressReporter", lambda console, name: ProgressReporter(console, name, clock))
    assert main(["bench", "suite"], (Command("bench suite", f"{__name__}:work_in_silence", ""),)) == 0
    assert capsys.readouterr().err.splitlines() == [
        f"esper bench suite: {time} elapsed" for time in ("0:15", "0:30", "0:45")
    ]
