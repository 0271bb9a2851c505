"""Optional parts of Esper: whether what they need is installed, and the one command that installs it."""

import importlib.util
import json
from collections.abc import Iterable
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from urllib.parse import unquote, urlsplit

from esper.errors import ConfigError, EsperError

DISTRIBUTION = "esper-growth"
EXTRAS = {
    "train": ("gymnasium", "jinja2", "matplotlib", "rich", "scipy", "sklearn", "tyro", "yaml"),
    "ui": ("starlette", "uvicorn"),
    "onnx": ("onnx", "onnxruntime", "onnxscript"),
    "ray": ("ray",),
    "lightning": ("lightning",),
    "hf": ("accelerate", "datasets", "transformers"),
    "tensorboard": ("tensorboardX",),
    "wandb": ("wandb",),
    "mlflow": ("mlflow",),
    "sweep": ("optuna",),
}
"""The modules that each extra installs. All commands and `esper.train` need those of `train`."""


def require_extra(extra: str, what: str, *modules: str, error: type[EsperError] = ConfigError) -> None:
    """Refuse a feature, the sentence's subject ``what``, where ``modules`` that the extra installs are missing."""
    if missing := list_missing(modules):
        raise error(describe_missing(extra, what, *missing))


def list_missing(modules: Iterable[str]) -> list[str]:
    """Those of the modules that are not installed."""
    return [name for name in modules if importlib.util.find_spec(name) is None]


def describe_missing(extra: str, what: str, *modules: str | None) -> str:
    """The sentence that ``what`` needs these modules, with the command that installs the extra."""
    return f"{what} needs {', '.join(map(str, modules))}: {find_install_command(extra)}"


def find_install_command(extra: str) -> str:
    """The command that adds an extra to this installation of Esper."""
    try:
        return build_install_command(distribution(DISTRIBUTION), extra)
    except PackageNotFoundError:
        return f"pip install -e '.[{extra}]' in Esper's folder"


def build_install_command(esper: Distribution, extra: str) -> str:
    """The command that installs an extra from where ``esper`` was installed.

    That is the folder, file or repository that `direct_url.json` names (PEP 610), or else the package index.
    """
    # How Esper was installed: from a folder, a repository, a file, or the index.
    origin = json.loads(esper.read_text("direct_url.json") or "{}")
    name = f"{DISTRIBUTION}[{extra}]"
    if "dir_info" in origin:
        editable = "-e " if origin["dir_info"].get("editable") else ""
        return f"pip install {editable}'{unquote(urlsplit(str(origin['url'])).path)}[{extra}]'"
    if "vcs_info" in origin:
        return f"pip install '{name} @ {origin['vcs_info']['vcs']}+{origin['url']}'"
    return f"pip install '{name} @ {origin['url']}'" if "url" in origin else f"pip install '{name}'"
