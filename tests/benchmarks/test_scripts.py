"""Benchmarks and examples, which take too long to be run by tests, at least find in Esper what they import."""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(path for folder in ("benchmarks", "examples") for path in (ROOT / folder).glob("*.py"))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_what_a_script_imports_is_there(path: Path) -> None:
    imports = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
    imported = [(node.module, name.name) for node in imports for name in node.names if node.module]
    ours = [(module, name) for module, name in imported if module.partition(".")[0] == "esper"]
    missing = [f"{module}.{name}" for module, name in ours if not hasattr(import_module(module), name)]
    assert missing == []
