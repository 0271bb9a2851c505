"""Put one defect after the other into Esper, and check that the fast tests catch each.

    python tools/mutations.py [NUMBER ...]

Each defect is a replacement of one line, made in a copy of the working tree, and the tests of its room that `make test`
runs are run on the copy. Exits with 1 if one survives.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
FAST = "not slow and not landing and not matrix"
"""The selection of `make test`."""


@dataclass(frozen=True)
class Mutation:
    """A defect: in which file of ``src/esper`` which text becomes which, and where the tests are."""

    file: str
    before: str
    after: str
    tests: str


MUTATIONS = (
    Mutation("lifecycle/rules.py", "contribution >= -rules.harm_tolerance", "contribution >= -1.0", "lifecycle"),
    Mutation("lifecycle/transitions.py", "(table.stage_age >= steps)", "(table.stage_age > steps)", "lifecycle"),
    Mutation("lifecycle/legality.py", "op[:, Op.WAIT] = True", "pass", "lifecycle rl"),
    Mutation(
        "population/governor/detectors.py",
        "self._unusual >= settings.patience]",
        "self._unusual > settings.patience]",
        "population",
    ),
    Mutation(
        "population/parameters.py",
        "new = self._make_untrained_rows(values, buffers, learning_rates, self.owners[rows])",
        "new = replace(self.select(rows), values=values, buffers=dict(buffers), learning_rates=learning_rates)",
        "population",
    ),
    Mutation(
        "rl/ppo.py",
        "torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)",
        "torch.maximum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)",
        "rl",
    ),
    Mutation(
        "rl/ppo.py",
        "rewards + gamma * next_values - values, gamma * lam",
        "rewards + gamma * next_values - values, lam",
        "rl",
    ),
    Mutation(
        "growth/promise.py", "_apply_step(halves[0], second)", "_apply_step(halves[0], first)", "growth population"
    ),
    Mutation("population/optimizers.py", ".clamp(max=1)", ".clamp(max=2)", "population"),
    Mutation("population/learning.py", "if settings.clip_norm is not None:", "if False:", "population"),
)


def main() -> int:
    """Apply the mutations of the given numbers, or all; returns the exit code."""
    numbers = [int(word) for word in sys.argv[1:]] or list(range(1, len(MUTATIONS) + 1))
    survivors: list[int] = []
    for number in numbers:
        mutation, began = MUTATIONS[number - 1], time.monotonic()
        with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
            copy = Path(folder)
            for part in ("src", "tests", "benchmarks", "examples", "pyproject.toml"):
                (shutil.copytree if (ROOT / part).is_dir() else shutil.copy)(ROOT / part, copy / part)
            path = copy / "src" / "esper" / mutation.file
            text = path.read_text()
            if (count := text.count(mutation.before)) != 1:
                sys.exit(f"{mutation.file} has {mutation.before!r} {count} times, not once: adapt mutation {number}")
            path.write_text(text.replace(mutation.before, mutation.after))
            words = [
                sys.executable,
                "-m",
                "pytest",
                "-x",
                "-m",
                FAST,
                *(f"tests/{room}" for room in mutation.tests.split()),
            ]
            environment = {**os.environ, "PYTHONPATH": str(copy / "src")}
            ran = subprocess.run(words, cwd=copy, env=environment, capture_output=True, text=True, check=False)
        caught = re.search(r"\d+ failed", ran.stdout) is not None
        survivors += [] if caught else [number]
        outcome = "caught" if caught else f"SURVIVED (pytest ended with {ran.returncode})"
        seconds = time.monotonic() - began
        print(f"{number:2} {outcome}  {mutation.file}: {mutation.before}  {seconds:.0f} s", flush=True)  # noqa: T201
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
