"""Looks whether each number at the top of a module says what it is worth, or what bounds it.

`make lint` calls it. A number there needs a comment directly above it or on its line, or a docstring below it. Of whole
numbers 0, 1 and -1 need none. What comments name as "ADR 0029" has to be there.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase
from itertools import pairwise
from pathlib import Path

ROOMS = ("adapters", "orchestrator", "policies")
CODE = (*ROOMS, "device_profiles", "tests", "tools")
EXCEPT = {
    "*FORMAT": "a format's number: another one is another format",
    "*VERSION": "a protocol's number, as above",
    "*OPSET": "of ONNX, as above",
    "*DIGEST_BYTES": "of a digest: any length that is safe does, and another one is another identity",
    "*HASH_BYTES": "as above",
    "*ID_BYTES": "of a random name, as above",
    "*KEY_BYTES": "of a key, as above",
    "*NAME_BYTES": "of a name that is a digest, as above",
    "*SCOPE_BYTES": "as above",
    "*MASK": "bits of a number",
    "*MASK64": "as above",
}
"""Patterns of names that say all there is to say, and why."""

_NAMED = re.compile(r"\bADRs? (\d{4}(?:(?:, | and )\d{4})*)|docs/adr/(\d{4})")
_BREAK = re.compile(r"\s*\n\s*(?:#\s*)?")


def list_numbers(node: ast.expr) -> list[int | float] | None:
    """Return the numbers that a value is made of: alone, computed, in a container or a call. None of any other."""
    match node:
        case ast.Constant(value=bool()):
            return None
        case ast.Constant(value=int() | float() as number):
            return [number]
        case ast.UnaryOp(operand=operand):
            return list_numbers(operand)
        case ast.BinOp(left=ast.Name(), right=part) | ast.BinOp(left=part, right=ast.Name()):
            return list_numbers(part)
        case ast.BinOp(left=left, right=right):
            return list_numbers(ast.Tuple([left, right]))
        case ast.Tuple(elts=values) | ast.List(elts=values) | ast.Dict(values=values) | ast.Call(args=values):
            if not values or (isinstance(node, ast.Call) and node.keywords):
                return None
            parts = [list_numbers(value) for value in values]
            return None if None in parts else [number for part in parts for number in part or ()]
        case _:
            return None


def is_tuned(value: ast.expr) -> bool:
    """Return whether a value is a number that says nothing by itself, or is made of such."""
    return any(isinstance(number, float) or number not in (0, 1) for number in list_numbers(value) or ())


def list_names(target: ast.expr) -> Iterator[str]:
    for node in ast.walk(target):
        if isinstance(node, ast.Name):
            yield node.id


def find_bare_numbers(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of each constant of a module that should say more."""
    lines, body = text.split("\n"), ast.parse(text).body
    for node, below in pairwise((*body, None)):
        match node:
            case (
                ast.Assign(targets=[target, *_], value=value) | ast.AnnAssign(target=target, value=ast.expr() as value)
            ):
                name = next(list_names(target), "")
            case _:
                continue
        is_except = any(fnmatchcase(name, pattern) for pattern in EXCEPT)
        has_comment = lines[node.lineno - 2].startswith("#") or "#" in lines[(node.end_lineno or node.lineno) - 1]
        match below:
            case ast.Expr(value=ast.Constant(value=str())):
                has_comment = True
        if name.isupper() and is_tuned(value) and not is_except and not has_comment:
            yield node.lineno, name


def find_missing_decisions(text: str, numbers: frozenset[str]) -> list[str]:
    """Return the numbers of decisions that a text names and that are not there."""
    named = [number for match in _NAMED.finditer(_BREAK.sub(" ", text)) for number in re.findall(r"\d{4}", match[0])]
    return sorted(set(named) - numbers)


def main() -> int:
    """Print what says too little; return 1 where there is something."""
    parser = argparse.ArgumentParser(description="Check that constants say what they are worth.")
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent, help="Check this tree.")
    root: Path = parser.parse_args().root
    numbers = frozenset(path.name[:4] for path in (root / "docs/adr").glob("[0-9]*.md"))
    count = 0
    for path in sorted(path for room in CODE for path in (root / room).rglob("*.py")):
        name, text = path.relative_to(root).as_posix(), path.read_text(encoding="utf-8")
        for line, constant in find_bare_numbers(text) if name.partition("/")[0] in ROOMS else ():
            print(f"{name}:{line}: {constant}: say above it what it is worth and which ADR, or what bounds it")
            count += 1
        for number in find_missing_decisions(text, numbers):
            print(f"{name}: names ADR {number}, which docs/adr does not have")
            count += 1
    print(f"{count} constants and decisions to mend (limit 0)")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
