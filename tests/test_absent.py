"""What defects of an earlier system were made of is nowhere in the code."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import esper

pytestmark = pytest.mark.landing

SOURCES = sorted(Path(esper.__file__).parent.rglob("*.py"))
NAMES = {
    "call Stream": "a CUDA stream beside the one that everything runs on",
    "call GradScaler": "a scale of gradients, which float16 needs",
    "float16": "a type that needs a scale of gradients",
    "_foreach_norm": "a private function of torch",
    "_orig_mod": "a module fished out of a compiled one",
    "locals": "decisions by which names happen to be bound",
}


def named(tree: ast.AST) -> Iterator[str]:
    """All names and attributes that a program reads."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            yield f"call {node.func.id if isinstance(node.func, ast.Name) else node.func.attr}"
        # Devices are compared by their type, not by how they are written.
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "startswith":
            yield from (f"startswith {one.value}" for one in node.args if isinstance(one, ast.Constant))


@pytest.mark.parametrize("name", [*NAMES, "startswith cuda"])
def test_what_defects_were_made_of_is_nowhere_in_the_code(name: str):
    found = [path.name for path in SOURCES if name in named(ast.parse(path.read_text()))]
    assert found == []
