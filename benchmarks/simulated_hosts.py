"""Hosts that this machine simulates (Linux): each has a network, processes, memory and temporary files of its own.

A host is a process in new namespaces, plugged into a bridge of the head's. The program that asks for hosts becomes the
head: it begins anew in namespaces of its own. So nothing has to be cleaned up: with the program, whatever ends it, the
kernel ends all processes and undoes all networks and mounts.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

RAY_FILES = "/tmp/ray"
"""Where Ray keeps its sockets and logs, on every host."""
_NAMESPACES = ("--net", "--mount", "--pid", "--uts", "--fork", "--mount-proc", "--kill-child")
_INSIDE = "ESPER_SIMULATED_HEAD"
_BRIDGE = "bridge0"
_CARD = "eth0"
_NETWORK = "10.77.0.{}"
_HEAD = 1
_SHARED_MEMORY = "256m"
_OWN_FILES = (
    f"mkdir -p {RAY_FILES}; mount -t tmpfs none {RAY_FILES}; mount -t tmpfs -o size={_SHARED_MEMORY} none /dev/shm; "
    "ip link set lo up; "
)
_QUEUE = ("burst", "128kb", "latency", "50ms")

HEAD_ADDRESS = _NETWORK.format(_HEAD)


@dataclass(frozen=True)
class Traffic:
    """Bytes that crossed a host's network card, headers and all."""

    received: int
    sent: int

    def __sub__(self, before: Traffic) -> Traffic:
        return Traffic(self.received - before.received, self.sent - before.sent)


@dataclass(frozen=True)
class Host:
    """A host that runs one command and whatever that starts."""

    name: str
    process: subprocess.Popen[str]
    log: Path
    """What the command writes."""

    def traffic(self) -> Traffic:
        """All since it was plugged in."""
        for line in Path("/proc/net/dev").read_text().splitlines():
            name, _, counters = line.partition(":")
            if name.strip() == self.name:
                figures = counters.split()
                return Traffic(received=int(figures[8]), sent=int(figures[0]))  # what the bridge sent and received
        raise LookupError(f"{self.name} is not plugged in")

    def end(self, *, silently: bool) -> None:
        """End all its processes; silently as a power cut does: not even a connection is closed."""
        if silently:
            _run("ip", "link", "set", self.name, "down")
        self.process.kill()
        self.process.wait()


def become_head() -> None:
    """Begin this program anew as the head, unless it is; leaves it with a sentence where that cannot be."""
    if _INSIDE in os.environ:
        return
    for program in ("unshare", "ip"):
        if shutil.which(program) is None:
            sys.exit(f"simulated hosts need Linux and its program `{program}`, which is not here")
    words = [*_unshare(), sys.executable, *sys.argv]
    tried = subprocess.run([*_unshare(), "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        sys.exit(f"simulated hosts need namespaces, which are not to be had here ({tried.stderr.strip()}): try as root")
    os.execvpe(words[0], words, {**os.environ, _INSIDE: "1"})


def make_network() -> None:
    """Give the head files and a bridge of its own, in the namespaces of `become_head`."""
    _run("sh", "-ec", _OWN_FILES)
    _run("ip", "link", "add", _BRIDGE, "type", "bridge")
    _run("ip", "addr", "add", f"{HEAD_ADDRESS}/24", "dev", _BRIDGE)
    _run("ip", "link", "set", _BRIDGE, "up")


def start_host(number: int, command: Sequence[str], environment: Mapping[str, str], rate: str | None) -> Host:
    """A host that runs the command, in which ``{address}`` stands for its own; ``rate`` as for `tc`, both ways."""
    name, address = f"host{number}", _NETWORK.format(_HEAD + number)
    limit = ["tc", "qdisc", "add", "dev", _CARD, "root", "tbf", "rate", rate, *_QUEUE] if rate else ["true"]
    steps = (
        f"hostname {name}; {_OWN_FILES} echo separate; read plugged; "
        f"ip addr add {address}/24 dev {_CARD}; ip link set {_CARD} up; {shlex.join(limit)}; "
        f"exec {shlex.join(word.format(address=address) for word in command)} >&2"
    )
    log, pipe = Path(RAY_FILES, f"{name}.log"), subprocess.PIPE
    with log.open("w") as file:
        words = [*_unshare(), "sh", "-ec", steps]
        process = subprocess.Popen(words, env=environment, stdin=pipe, stdout=pipe, stderr=file, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    if not process.stdout.readline():
        sys.exit(f"{name} could not be started: {log.read_text()}")
    _run("ip", "link", "add", name, "type", "veth", "peer", "name", _CARD, "netns", str(process.pid))
    _run("ip", "link", "set", name, "master", _BRIDGE, "up")
    if rate:
        _run("tc", "qdisc", "add", "dev", name, "root", "tbf", "rate", rate, *_QUEUE)
    process.stdin.write("plugged\n")
    process.stdin.close()
    return Host(name, process, log)


def _unshare() -> list[str]:
    return ["unshare", *([] if os.geteuid() == 0 else ["--map-root-user"]), *_NAMESPACES]


def _run(*words: str) -> None:
    subprocess.run(words, check=True)
