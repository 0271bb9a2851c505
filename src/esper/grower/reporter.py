"""Who is told of decisions: standard output, and the run in which a grower keeps them."""

from __future__ import annotations

import sys
from collections.abc import Callable

from esper.grower.decision import Ending
from esper.grower.distributed import Processes
from esper.grower.own_run import OwnRun
from esper.grower.recording import Account, Recording


class Reporter:
    """Tells of one growth; of several processes the first one does.

    Args:
        processes: Those that the growth is in.
        own: The run that the grower writes by itself, if it writes one.
        verbose: Whether to print.
    """

    def __init__(self, processes: Processes, own: OwnRun | None, *, verbose: bool) -> None:
        self._processes, self._own, self._verbose = processes, own, verbose
        self.recording: Recording | OwnRun | None = own
        """Where decisions are kept, if anywhere."""
        self._in_own_run(OwnRun.open)

    @property
    def identity(self) -> str | None:
        """By which the grower's own run is known again, in the first process; None without one."""
        return None if self._own is None else self._own.id

    def require_open(self) -> None:
        """Refuse to go on where the grower's own run was closed.

        Raises:
            RunError: it was, or is another grower's.
        """
        self._in_own_run(OwnRun.require_open)

    def resume(self, decisions: int, identity: str | None) -> None:
        """Go on in the grower's own run after so many decisions."""
        self._in_own_run(lambda own: own.resume(decisions, identity))

    def close(self, decisions: int) -> None:
        """Training has ended after so many decisions."""
        self._in_own_run(lambda own: own.close(decisions))

    def tell(self, account: Account) -> None:
        """Of a decision."""
        self._print(str(account))
        self._record(lambda recording: recording.keep(account))

    def tell_ending(self, decisions: int, ending: Ending) -> None:
        """What became of unfinished seeds after so many decisions."""
        self._print(*ending.lines)
        self._record(lambda recording: recording.keep_ending(decisions, ending))

    def tell_failure(self, decisions: int, failure: Exception) -> None:
        """Why nothing goes on after so many decisions."""
        self._record(lambda recording: recording.keep_failure(decisions, failure))

    def _in_own_run(self, act: Callable[[OwnRun], None]) -> None:
        if (own := self._own) is not None:
            self._processes.agree(lambda: act(own))

    def _record(self, keep: Callable[[Recording | OwnRun], None]) -> None:
        if (recording := self.recording) is not None:
            self._processes.agree(lambda: keep(recording))

    def _print(self, *lines: str) -> None:
        if self._verbose and self._processes.first:
            sys.stdout.writelines(f"{line}\n" for line in lines)
            sys.stdout.flush()
