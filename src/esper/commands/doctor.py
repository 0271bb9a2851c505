"""`esper doctor`."""

import platform
from typing import Any

import torch
from torch import nn

from esper import Grower, Validation, __version__, attach
from esper.dash.output import console_beside, print_json, print_line
from esper.errors import TaskError
from esper.extras import EXTRAS, find_install_command, list_missing
from esper.numerics.devices import list_devices
from esper.tasks.registry import FILE_SUITES, get_suite, suite_names

TOLERANCE = 1e-4
"""The largest difference of an output, in single precision, that is attributed to rounding."""


def command(json: bool = False) -> int:
    """Check this installation, and grow a small model on each device. Exits with 1 if there is a problem.

    Args:
        json: Print a final line of JSON.
    """
    console, problems = console_beside(json), list[str]()
    versions = {"esper": __version__, "python": platform.python_version(), "torch": str(torch.__version__)}
    record: dict[str, Any] = {"versions": versions, "extras": {}, "data": {}, "devices": {}, "problems": problems}
    print_line(console, ", ".join(f"{name} {number}" for name, number in versions.items()))
    for extra, modules in EXTRAS.items():
        missing = record["extras"][extra] = list_missing(modules)
        state = f"lacks {', '.join(missing)}: {find_install_command(extra)}" if missing else "complete"
        print_line(console, f"extra {extra}: {state}")
    for suite in (*suite_names(), *FILE_SUITES):
        try:
            source = get_suite(suite).source
            record["data"][suite] = source.description
            if not source.exists:
                problems.append(f"suite {suite}: {source.path} is missing ({source.description}): reinstall it")
        except TaskError as error:
            record["data"][suite] = f"not available: {error}"
        print_line(console, f"suite {suite}: {record['data'][suite]}")
    for device in list_devices():
        try:
            difference = record["devices"][device] = grow_small_model(device)
        except RuntimeError as error:
            reason = str(error).strip().partition("\n")[0]
            problems.append(f"torch cannot compute on {device} ({reason}): use another device, or repair its driver")
            continue
        print_line(console, f"{device}: grew a small model")
        if not difference <= TOLERANCE:
            problems.append(
                f"on {device} a finalized model computes otherwise than it grew (a difference of {difference:.1e}): "
                "report this with the output of `esper doctor --json`"
            )
    for line in [f"problem: {problem}" for problem in problems] or ["no problems found"]:
        print_line(console, line)
    if json:
        print_json(record)
    return 1 if problems else 0


def grow_small_model(device: str) -> float:
    """The largest difference between the outputs of a small model that grew on ``device`` and of what it becomes."""
    torch.manual_seed(0)
    inputs = torch.randn(64, 8, device=device)
    labels = (inputs[:, 0] * inputs[:, 1] > 0).long()
    host = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)).to(device)
    model = attach(host, {"0": ["mlp"]}, example_input=inputs[:2])
    optimizer = torch.optim.AdamW(model.parameter_groups(lr=1e-2))
    validation = Validation("classification", [(inputs, labels)])
    grower = Grower(model, optimizer, evaluate=validation, controller="all_at_start", horizon=6)
    for _ in range(6):
        loss = nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        grower.step(train_loss=loss.item())
    grower.finish()
    with torch.no_grad():
        return (model(inputs) - model.finalize()(inputs)).abs().max().item()
