"""Settings for every test."""

import signal
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

# Tests run side by side (pytest-xdist); one thread each keeps them from fighting over the cores.
torch.set_num_threads(1)

# A shell that starts the tests in the background makes them ignore Ctrl-C; the tests of Ctrl-C need Python's own way.
signal.signal(signal.SIGINT, signal.default_int_handler)

# A shared core makes single examples slow now and then; that is no failure.
settings.register_profile("first ring", deadline=None, max_examples=20)
settings.register_profile("esper", deadline=None)

TESTS = Path(__file__).parent
EXTRAS = tuple(
    TESTS / name
    for name in (
        "benchmarks",
        "conformance",
        "dash/test_browser.py",
        "documentation/test_site.py",
        "growth/test_language_models.py",
        "growth/test_pretrained.py",
        "integrations",
        "lab/test_sweep.py",
        "runs/test_loggers.py",
        "train/test_ray.py",
    )
)
"""Left to `make landing`: scripts, and tests that import `LIBRARIES`, which takes each process ten seconds."""
LIBRARIES = frozenset(
    ("lightning", "mlflow", "onnxruntime", "optuna", "peft", "playwright", "ray", "stable_baselines3", "tensordict")
) | {"torchrl", "transformers", "wandb"}

LOADED: set[str] = set()
"""Those of them that were imported to find the tests."""

_FIGURE = "figure: "


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("first ring" if _is_first_ring(config) else "esper")


def _is_first_ring(config: pytest.Config) -> bool:
    return "not landing" in config.option.markexpr


def _needs_extras(path: Path) -> bool:
    return any(path.is_relative_to(place) for place in EXTRAS)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return True if _is_first_ring(config) and _needs_extras(collection_path) else None


def pytest_collection_finish(session: pytest.Session) -> None:
    if _is_first_ring(session.config):
        LOADED.update(LIBRARIES & set(sys.modules))


@pytest.fixture
def count_figure(record_property: Callable[[str, object], None]) -> Callable[[str, int], None]:
    """Report how much a test did ("kills survived", 20); figures of one name are added up and printed at the end."""

    def count(name: str, amount: int) -> None:
        record_property(_FIGURE + name, amount)

    return count


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    matrices: dict[tuple[str, str], list[pytest.Function]] = defaultdict(list)
    for item in items:
        if _needs_extras(item.path):
            item.add_marker("landing")
        if isinstance(item, pytest.Function):
            if "count_figure" in item.fixturenames:
                item.add_marker("reliability")
            if hasattr(item, "callspec"):
                matrices[item.nodeid.partition("[")[0], item.originalname].append(item)
    for cells in matrices.values():
        few = cells[0].get_closest_marker("few")
        cover = select_cover(cells)[: few.args[0] if few else None]
        for cell in set(cells) - set(cover):
            cell.add_marker("matrix")


def select_cover(cells: Sequence[pytest.Function]) -> list[pytest.Function]:
    """Cells of a parametrized test in which every value of every parameter occurs, by few of them.

    First those in which all values are new, a diagonal of the matrix; then one for each value that is left.
    """
    chosen: list[pytest.Function] = []
    covered: set[Any] = set()
    for enough in (all, any):
        for cell in cells:
            values = {_value_key(name, value) for name, value in cell.callspec.params.items()}
            if cell not in chosen and enough(value not in covered for value in values):
                chosen.append(cell)
                covered |= values
    return chosen


def _value_key(name: str, value: Any) -> tuple[Any, ...]:
    try:
        hash(value)
    except TypeError:
        return name, id(value)
    return name, type(value), value


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


@pytest.fixture
def loaded_to_find_tests() -> set[str]:
    """The optional libraries that the first ring imported to find its tests; none in other rings."""
    return LOADED
