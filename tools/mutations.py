"""Put one defect after the other into Esper, and check that the fast tests catch each.

    python tools/mutations.py [NUMBER ...]

Each defect is a replacement of one line, made in a copy of the working tree, and the tests of its room that `make test`
runs are run on the copy. Exits with 1 if one survives.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
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
    Mutation("lifecycle/legality.py", "allowed[:, Op.WAIT] = True", "pass", "lifecycle rl"),
    Mutation(
        "engine/governor.py",
        "self._unusual >= settings.patience]",
        "self._unusual > settings.patience]",
        "engine",
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
    Mutation("engine/governor.py", "self._monitor.restore(rows)", "pass", "engine"),
    Mutation("engine/governor.py", "diagnosis.good & running", "diagnosis.good", "engine population"),
    Mutation("engine/engine.py", "due | intervention.rows[:, None]", "due", "engine"),
    Mutation("engine/engine.py", "np.where(due, promises.missing, self._overdue)", "self._overdue", "engine grower"),
    Mutation("engine/engine.py", "self.decisions - running", "self.decisions", "engine rl"),
    Mutation("engine/history.py", "improves(evaluation.progress, self.best_progress)", "lower", "engine grower"),
    Mutation("engine/gradients.py", "* fossils).sum(1)", ").sum(1)", "engine population"),
    Mutation("engine/recorder.py", "(reasons != self.reasons) | ", "", "train grower"),
    Mutation("grower/backend.py", "(0.0, 0.0) if constant", "(0.0, 0.0) if False", "grower"),
    Mutation("grower/grower.py", "disallowed.add(Op.FOSSILIZE)", "pass", "grower"),
    Mutation("grower/grower.py", "disallowed.discard(Op.PRUNE)", "pass", "grower"),
)


def main(words: Sequence[str] | None = None) -> int:
    """Apply the mutations of these numbers, or all; returns the exit code."""
    all_numbers = range(1, len(MUTATIONS) + 1)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    help_text = f"defects, 1 to {len(MUTATIONS)}; by default all"
    parser.add_argument("numbers", nargs="*", type=int, choices=all_numbers, metavar="NUMBER", help=help_text)
    survivors: list[int] = []
    for number in parser.parse_args(words).numbers or all_numbers:
        mutation, start = MUTATIONS[number - 1], time.monotonic()
        with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
            copy = Path(folder)
            for part in ("src", "tests", "benchmarks", "examples", "pyproject.toml"):
                (shutil.copytree if (ROOT / part).is_dir() else shutil.copy)(ROOT / part, copy / part)
            path = copy / "src" / "esper" / mutation.file
            text = path.read_text()
            if (count := text.count(mutation.before)) != 1:
                sys.exit(f"{mutation.file} has {mutation.before!r} {count} times, not once: adapt mutation {number}")
            path.write_text(text.replace(mutation.before, mutation.after))
            command = [
                sys.executable,
                "-m",
                "pytest",
                "-x",
                "-m",
                FAST,
                *(f"tests/{room}" for room in mutation.tests.split()),
            ]
            environment = {**os.environ, "PYTHONPATH": str(copy / "src")}
            completed = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)
        caught = re.search(r"\d+ failed", completed.stdout) is not None
        survivors += [] if caught else [number]
        outcome = "caught" if caught else f"SURVIVED (pytest ended with {completed.returncode})"
        seconds = time.monotonic() - start
        print(f"{number:2} {outcome}  {mutation.file}: {mutation.before}  {seconds:.0f} s", flush=True)  # noqa: T201
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
