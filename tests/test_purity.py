"""Policies have no effects that import-linter cannot see: no open(), print() or numpy I/O and randomness."""

import ast
from pathlib import Path

import pytest

POLICIES = Path(__file__).parent.parent / "policies"
FORBIDDEN_CALLS = {"open", "print", "input", "exec", "eval", "__import__", "breakpoint"}
FORBIDDEN_NUMPY = {
    "random",
    "load",
    "save",
    "savez",
    "savetxt",
    "loadtxt",
    "fromfile",
    "memmap",
    "genfromtxt",
}


def offences(source: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in FORBIDDEN_CALLS:
            found.append(f"{node.lineno}: {node.func.id}()")
        if (
            isinstance(node, ast.Attribute)
            and node.attr in FORBIDDEN_NUMPY
            and isinstance(node.value, ast.Name)
            and node.value.id in {"np", "numpy"}
        ):
            found.append(f"{node.lineno}: numpy.{node.attr}")
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("numpy.random"):
            found.append(f"{node.lineno}: from {node.module}")
        if isinstance(node, (ast.Global, ast.Nonlocal)):
            found.append(f"{node.lineno}: {type(node).__name__.lower()}")
    return found


@pytest.mark.parametrize("path", sorted(POLICIES.glob("**/*.py")), ids=lambda path: path.name)
def test_policies_are_pure(path):
    assert offences(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "seeded",
    [
        "open('x')",
        "print(1)",
        "import numpy as np\nnp.random.default_rng()",
        "import numpy\nnumpy.load('x')",
        "from numpy.random import default_rng",
        "def f():\n    global x\n    x = 1",
    ],
)
def test_the_test_sees_seeded_offences(seeded):
    assert offences(seeded)
