"""Optional parts of Esper: whether what they need is installed, and the one command that installs it."""

from __future__ import annotations

import importlib.util
import json
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from urllib.parse import unquote, urlsplit

from esper.errors import ConfigError, EsperError

DISTRIBUTION = "esper-growth"


def require(extra: str, what: str, *modules: str, error: type[EsperError] = ConfigError) -> None:
    """Refuse ``what``, of which the sentence is, where ``modules`` that the extra installs are missing.

    Raises:
        EsperError: of the type ``error``; it says how to install the extra.
    """
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise error(describe_missing(extra, what, *missing))


def describe_missing(extra: str, what: str, *modules: str | None) -> str:
    """The sentence that ``what`` needs these modules, which the extra installs."""
    return f"{what} needs {', '.join(map(str, modules))}: {find_install_command(extra)}"


def find_install_command(extra: str) -> str:
    """What completes this installation by an extra, from where Esper itself came."""
    try:
        return build_install_command(distribution(DISTRIBUTION), extra)
    except PackageNotFoundError:
        return f"pip install -e '.[{extra}]' in Esper's folder"


def build_install_command(esper: Distribution, extra: str) -> str:
    """As `find_install_command`: the folder, file or repository that `direct_url.json` names (PEP 610), else the index."""
    origin = json.loads(esper.read_text("direct_url.json") or "{}")
    name = f"{DISTRIBUTION}[{extra}]"
    if "dir_info" in origin:
        editable = "-e " if origin["dir_info"].get("editable") else ""
        return f"pip install {editable}'{unquote(urlsplit(str(origin['url'])).path)}[{extra}]'"
    if "vcs_info" in origin:
        return f"pip install '{name} @ {origin['vcs_info']['vcs']}+{origin['url']}'"
    return f"pip install '{name} @ {origin['url']}'" if "url" in origin else f"pip install '{name}'"
