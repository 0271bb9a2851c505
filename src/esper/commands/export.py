"""`esper export`."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console

from esper.dash.output import print_line
from esper.dash.reporter import report_progress
from esper.errors import ConfigError
from esper.growth.export import export
from esper.growth.persist import load


def command(
    folder: Annotated[Path, tyro.conf.Positional],
    host: Annotated[str, tyro.conf.arg(metavar="FILE.py:FUNCTION")],
    to: Literal["pt2", "onnx", "safetensors"],
    out: Path,
    fixed_batch: bool = False,
) -> None:
    """Write a grown model as a file that does not need Esper.

    The file is first loaded in a process that cannot import Esper, and must reproduce the model's outputs.

    Args:
        folder: Folder that `esper.save` wrote.
        host: Function that returns the model as built before `esper.attach`, and an example input, as for `esper.load`.
            The file is run as Python and may import modules from its folder.
        to: Format: pt2 (for torch.export.load), onnx (extra `onnx`), or safetensors (weights only).
        out: File to write; the suffix must be .pt2, .onnx or .safetensors.
        fixed_batch: Fix the batch size to that of the example input, for models that cannot be traced otherwise.
    """
    console = Console()
    with report_progress(console, f"loading {folder}") as progress:
        network, example_input = _call_function(host)
        plain = load(folder, network, example_input).finalize()
        progress.update(0, name=f"writing {out} and checking it in a process without Esper")
        export(plain, example_input, to, out, fixed_batch=fixed_batch)
    print_line(console, f"exported: {out}")


def _call_function(address: str) -> tuple[Any, Any]:
    """Call the function at ``FILE.py:FUNCTION``, and return its two values.

    Raises:
        ConfigError: there is no such file or function, it fails, or it does not return two values.
    """
    path, _, name = address.rpartition(":")
    file = Path(path).expanduser().resolve()
    if file.suffix != ".py" or not file.is_file():
        raise ConfigError(
            f"--host {address}: give FILE.py:FUNCTION, a function that returns the host and an example input"
        )
    spec = spec_from_file_location(f"esper_host_{file.stem}", file)
    assert spec is not None  # a path that ends in .py has one
    assert spec.loader is not None
    # In `sys.modules`, so that its classes can be found by name, and with its folder on the path, as a script would be.
    module = sys.modules[spec.name] = module_from_spec(spec)
    sys.path.insert(0, str(file.parent))
    try:
        spec.loader.exec_module(module)
        network, example_input = getattr(module, name)()
    except (Exception, SystemExit) as error:  # a user's file may raise anything
        raise ConfigError(
            f"--host {address} does not return a host and an example input: {type(error).__name__}: {error}"
        ) from error
    return network, example_input
