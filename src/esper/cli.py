"""The `esper` command.

tyro turns the signature of a command's function into options, and its docstring into the help. A function is imported
only when its command runs, so `esper --help` does not wait for torch, and needs no extra.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pkgutil import resolve_name

from esper import __version__
from esper.errors import ConfigError, EsperError, did_you_mean
from esper.extras import EXTRAS, require_extra
from esper.signals import raise_terminated
from esper.tasks.suite_files import allow_files

EXIT_OK, EXIT_ERROR, EXIT_INTERRUPTED = 0, 2, 130


@dataclass(frozen=True)
class Command:
    """A command: its name, its function as `module:name`, and a line of help."""

    name: str
    target: str
    help: str
    ends: bool = True
    """Whether it computes something and ends; one that serves reports no progress."""


COMMANDS = (
    Command("train", "esper.commands.train:command", "Train a growth controller, or resume a run."),
    Command("evaluate", "esper.commands.evaluate:command", "Compare a controller with baselines on new instances."),
    Command("compare", "esper.commands.compare:command", "Train several configurations and test which is better."),
    Command("sweep", "esper.commands.sweep:command", "Search over settings with an Optuna study."),
    Command("report", "esper.commands.evaluate:report", "Write the report of a run or comparison, with figures."),
    Command("dash", "esper.commands.runs:serve_runs", "Show runs in the browser, live.", ends=False),
    Command("runs", "esper.commands.runs:print_runs", "List the runs in a folder."),
    Command("doctor", "esper.commands.doctor:command", "Check this installation and this machine."),
    Command("bench suite", "esper.commands.bench:measure_suite", "Measure how much control a suite rewards."),
    Command("bench search", "esper.commands.bench:measure_search", "Compare a controller with a search over networks."),
)


def main(argv: Sequence[str] | None = None, commands: Sequence[Command] = COMMANDS) -> int:
    """Run one command and return its exit code.

    An EsperError prints one sentence and returns 2; Ctrl-C returns 130; SIGTERM closes resources and exits with 143.
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
            function = resolve_name(command.target)
            code = run_command(function, f"esper {command.name}", arguments[len(name) :], command.ends)
            return EXIT_OK if code is None else code
    if arguments == ["--version"]:
        sys.stdout.write(f"esper {__version__}\n")
        return EXIT_OK

    # No command: list those whose names begin with the arguments, which are all where there are none.
    names = [argument for argument in arguments if argument not in ("-h", "--help")]
    matches = [command for command in commands if command.name.split()[: len(names)] == names]
    if matches:
        width = max(len(command.name) for command in matches)
        lines = "\n".join(f"  {command.name.ljust(width)}  {command.help}" for command in matches)
        sys.stdout.write(
            "Esper grows neural networks while they train.\n\n"
            f"usage: esper COMMAND [OPTIONS]\n\n{lines}\n\n"
            "Use `esper COMMAND --help` for the options of a command, and `esper --version` for the version.\n"
        )
        return EXIT_OK
    known = [command.name for command in commands]
    given = " ".join(names[: max(len(name.split()) for name in known)])
    hints = (
        did_you_mean(text, known, spell=lambda near: f"`{near}`", limit=1, separator=",") for text in (given, names[0])
    )
    advice = next(filter(None, hints), ", `esper --help` lists all commands")
    raise ConfigError(f"unknown command `{given}`{advice}")
