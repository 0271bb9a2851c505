"""The `esper` command.

One line in `COMMANDS` adds a command. Its target is a function: tyro turns its signature into options and its docstring
into the help, and it may return an exit code. A target is imported only when its command runs, so `esper --help` does
not wait for torch, and needs no extra.
"""

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from esper import __version__
from esper.errors import ConfigError, EsperError, did_you_mean
from esper.extras import EXTRAS, require_extra
from esper.signals import raise_terminated
from esper.tasks.suite_files import allow_files

EXIT_OK = 0
EXIT_ERROR = 2
EXIT_INTERRUPTED = 130


@dataclass(frozen=True)
class Command:
    """A command: its name, for instance `bench suite`; its function as `module:name`; one line of help."""

    name: str
    target: str
    help: str
    ends: bool = True
    """Whether it computes something and ends; one that serves until it is stopped reports no progress."""

    def load(self) -> Callable[..., int | None]:
        """Import the function."""
        module, _, function = self.target.partition(":")
        return getattr(importlib.import_module(module), function)


COMMANDS = (
    Command("train", "esper.commands.train:command", "Train a growth controller, or resume a run."),
    Command("evaluate", "esper.commands.evaluate:command", "Compare a controller with baselines on new instances."),
    Command("compare", "esper.commands.compare:command", "Train several configurations and test which is better."),
    Command("sweep", "esper.commands.sweep:command", "Search over settings with an Optuna study."),
    Command("report", "esper.commands.report:command", "Write the report of a run or a comparison, with figures."),
    Command("dash", "esper.commands.dash:command", "Show runs in the browser, live.", ends=False),
    Command("runs", "esper.commands.runs:command", "List the runs in a folder."),
    Command("doctor", "esper.commands.doctor:command", "Check this installation and this machine."),
    Command("bench suite", "esper.commands.bench:measure_suite", "Measure how much control a suite rewards."),
    Command("bench search", "esper.commands.bench:measure_search", "Compare a controller with a search over networks."),
)
_SCRIPT = "is now a script in Esper's repository: python"
MOVED: Mapping[str, str] = {
    **{
        f"bench {name}": f"{_SCRIPT} benchmarks/{name}.py" for name in ("attach", "exploits", "population", "telemetry")
    },
    "bench train": f"{_SCRIPT} benchmarks/train_speed.py",
    **{name: f"{_SCRIPT} examples/{name}.py" for name in ("grow", "look")},
    "adapt": "was removed: attach with freeze_host=True and use esper.Grower (docs/how-to/frozen.md)",
    "tune": f"{_SCRIPT} benchmarks/tune_rules.py",
    "watch": "was removed: use `esper dash`, which also works over ssh (docs/ui.md)",
    "query": "was removed: read run.db with sqlite3 or pandas (docs/ui.md; views in docs/reference/events.md)",
    "export-events": "was removed: read the events in run.db with pandas and write any format (docs/ui.md)",
    "bridge": "was removed: use `esper train --logger tensorboard` (or wandb, mlflow) (docs/ui.md)",
}
"""Former commands, and what a user does instead, as the end of a sentence."""


def main(argv: Sequence[str] | None = None, commands: Sequence[Command] = COMMANDS) -> int:
    """Run one command and return its exit code.

    An EsperError prints one sentence on stderr and returns 2; Ctrl-C returns 130; SIGTERM closes open resources and
    exits with 143. Anything else is a defect and propagates.
    """
    try:
        with raise_terminated():
            return _dispatch(list(sys.argv[1:] if argv is None else argv), commands)
    except EsperError as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_ERROR
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _dispatch(arguments: list[str], commands: Sequence[Command]) -> int:
    for command in commands:
        name = command.name.split()
        if arguments[: len(name)] == name:
            require_extra("train", f"`esper {command.name}`", *EXTRAS["train"])
            from esper.commands.options import run_command  # noqa: PLC0415 (needs the extra)

            allow_files(arguments)
            code = run_command(command.load(), f"esper {command.name}", arguments[len(name) :], command.ends)
            return EXIT_OK if code is None else code
    if arguments == ["--version"]:
        sys.stdout.write(f"esper {__version__}\n")
        return EXIT_OK

    # No command: list those whose names begin with the arguments, which are all where there are none.
    names = [argument for argument in arguments if argument not in ("-h", "--help")]
    matches = [command for command in commands if command.name.split()[: len(names)] == names]
    if not matches:
        raise ConfigError(_describe_unknown(names, commands))
    sys.stdout.write(_format_overview(matches))
    return EXIT_OK


def _describe_unknown(arguments: Sequence[str], commands: Sequence[Command]) -> str:
    for former, replacement in MOVED.items():
        if list(arguments[: len(former.split())]) == former.split():
            return f"`{former}` {replacement}"
    depth = max(len(command.name.split()) for command in commands)
    name = " ".join(arguments[:depth])
    names = [command.name for command in commands]
    hints = (
        did_you_mean(text, names, spell=lambda near: f"`{near}`", limit=1, separator=",")
        for text in (name, arguments[0])
    )
    advice = next(filter(None, hints), ", `esper --help` lists all commands")
    return f"unknown command `{name}`{advice}"


def _format_overview(commands: Sequence[Command]) -> str:
    width = max(len(command.name) for command in commands)
    lines = "\n".join(f"  {command.name.ljust(width)}  {command.help}" for command in commands)
    return (
        "Esper grows neural networks while they train.\n\n"
        f"usage: esper COMMAND [OPTIONS]\n\n{lines}\n\n"
        "Use `esper COMMAND --help` for the options of a command, and `esper --version` for the version.\n"
    )
