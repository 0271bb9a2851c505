"""`esper bench attach`."""

from __future__ import annotations

import json

import pytest

from esper.cli import EXIT_ERROR, EXIT_OK, main


def test_the_last_line_tells_the_overhead(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "attach", "--repeats", "3", "--batch-size", "2", "--json"]) == EXIT_OK
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert record["overhead"] == record["slots"]["median"]
    for one in (record["slots"], record["grower"]):
        assert -1 < one["lower"] <= one["median"] <= one["upper"]
    assert record["step_seconds"] > 0


@pytest.mark.parametrize("option", [("--repeats", "0"), ("--batch-size", "1"), ("--device", "cuda:77")])
def test_what_cannot_be_measured_is_refused(option: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "attach", *option]) == EXIT_ERROR
    assert capsys.readouterr().err.startswith("error: ")
