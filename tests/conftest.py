"""Settings for every test."""

import signal
from collections import defaultdict
from collections.abc import Callable

import pytest
import torch
from hypothesis import settings

# Tests run side by side (pytest-xdist); one thread each keeps them from fighting over the cores.
torch.set_num_threads(1)

# A shell that starts the tests in the background makes them ignore Ctrl-C; the tests of Ctrl-C need Python's own way.
signal.signal(signal.SIGINT, signal.default_int_handler)

# A shared core makes single examples slow now and then; that is no failure.
settings.register_profile("esper", deadline=None)
settings.load_profile("esper")

_FIGURE = "figure: "


@pytest.fixture
def count_figure(record_property: Callable[[str, object], None]) -> Callable[[str, int], None]:
    """Report how much a test did ("kills survived", 20); figures of one name are added up and printed at the end."""

    def count(name: str, amount: int) -> None:
        record_property(_FIGURE + name, amount)

    return count


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if isinstance(item, pytest.Function) and "count_figure" in item.fixturenames:
            item.add_marker("reliability")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    totals: dict[str, int] = defaultdict(int)
    for report in terminalreporter.getreports("passed"):
        for name, amount in report.user_properties:
            if name.startswith(_FIGURE) and report.when == "call" and isinstance(amount, int):
                totals[name.removeprefix(_FIGURE)] += amount
    if totals:
        terminalreporter.section("figures")
        for name, total in sorted(totals.items()):
            terminalreporter.write_line(f"{total:>9,}  {name}")
