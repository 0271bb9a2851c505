"""Who learns of a grower's decisions: the terminal, in a line each, and the store of a run."""

from __future__ import annotations

import sys

from esper.grower.decision import Ending
from esper.grower.distributed import Processes
from esper.grower.recording import Account, OwnRun, Recording


class DecisionReporter:
    """Reports decisions from the first process, to the terminal and to the store of a run.

    Args:
        processes: All that there are.
        own: The run that the grower writes itself, if any; it is opened.
        verbose: Whether to print a line per decision.

    Raises:
        RunError: the folder for the run holds something else, is in use, or cannot be written.
    """

    def __init__(self, processes: Processes, own: OwnRun | None, *, verbose: bool) -> None:
        self.recording: Recording | OwnRun | None = own
        """Where decisions are kept, if anywhere."""
        self._processes, self._own, self._verbose = processes, own, verbose
        if own is not None:
            processes.agree(own.open)

    @property
    def run(self) -> str | None:
        """Name of the grower's own run, if it writes one."""
        return None if self._own is None else self._own.id

    def resume(self, done: int, run: str | None) -> None:
        """Go on after so many decisions, with a grower that was saved in that ``run``; raises `RunError`."""
        if (own := self._own) is not None:
            self._processes.agree(lambda: own.resume(done, run))

    def require_open(self) -> None:
        """Raise `RunError` if the run's folder is not this grower's to write."""
        if self._own is not None:
            self._processes.agree(self._own.require_open)

    def report(self, account: Account) -> None:
        """What was decided."""
        self._print(format_line(account))
        if (recording := self.recording) is not None:
            self._processes.agree(lambda: recording.keep(account))

    def report_ending(self, done: int, ending: Ending) -> None:
        """How growth ended, after so many decisions."""
        self._print(*ending.lines)
        if (recording := self.recording) is not None:
            self._processes.agree(lambda: recording.keep_ending(done, ending.changes, ending.contributions))

    def report_failure(self, done: int, error: Exception) -> None:
        """That training cannot go on, after so many decisions."""
        if (recording := self.recording) is not None:
            self._processes.agree(lambda: recording.keep_failure(done, error))

    def close(self, done: int) -> None:
        """That nothing more comes, after so many decisions."""
        if (own := self._own) is not None:
            self._processes.agree(lambda: own.close(done))

    def _print(self, *lines: str) -> None:
        if self._verbose and self._processes.first:
            sys.stdout.writelines(f"{one}\n" for one in lines)
            sys.stdout.flush()


def format_line(account: Account) -> str:
    """``decision 7: germinate mlp in layer2; loss 0.4123 (training 0.3987), accuracy 0.873; layer2 +0.012``."""
    loss = f"loss {account.decision.loss:.4g} (training {account.train_loss:.4g})"
    earned = ", ".join(f"{slot} {value:+.3g}" for slot, value in account.decision.contributions.items())
    decided = f"decision {account.decision.number}: {account.decision.what}"
    return "; ".join(filter(None, [decided, f"{loss}{account.decision.measured}", earned]))
