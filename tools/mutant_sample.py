"""Draws mutants of the source, made by Cosmic Ray, for `tools.mutants`."""

from __future__ import annotations

import ast
import difflib
import random
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator

ROOT = Path(__file__).resolve().parent.parent
_COMPARED = "Lt_LtE Lt_GtE LtE_Lt LtE_Gt Gt_GtE Gt_LtE GtE_Gt GtE_Lt Eq_NotEq NotEq_Eq Is_IsNot IsNot_Is"
_COMPUTED = "Add_Sub Sub_Add Mul_Div Div_Mul FloorDiv_Mul Mod_Mul Pow_Mul BitOr_BitAnd BitAnd_BitOr BitXor_BitOr"
_REPLACED = "TrueWithFalse FalseWithTrue AndWithOr OrWithAnd BreakWithContinue ContinueWithBreak"
OPERATORS = (
    *(f"ReplaceComparisonOperator_{pair}" for pair in _COMPARED.split()),
    *(f"ReplaceBinaryOperator_{pair}" for pair in _COMPUTED.split()),
    *(f"Replace{pair}" for pair in _REPLACED.split()),
    *("ReplaceUnaryOperator_Delete_Not", "ReplaceUnaryOperator_USub_UAdd"),
    *("AddNot", "ExceptionReplacer", "NumberReplacer", "ZeroIterationForLoop"),
)
"""Those of Cosmic Ray's operators that seldom make a mutant that does the same, or one that no import survives."""

Position = tuple[int, int]
Mutant = dict[str, Any]


def identify(mutant: Mutant) -> tuple[str, str, int]:
    return mutant["module"], mutant["operator"], mutant["occurrence"]


def is_not_behaviour(node: ast.AST) -> bool:
    """Return whether a mutant of this part of the program would be a matter of text, types or declarations."""
    match node:
        case ast.JoinedStr() | ast.Assert() | ast.keyword(arg="strict") | ast.Name(id="TYPE_CHECKING"):
            return True
        case ast.Assign(targets=[ast.Name(id="__all__")]) | ast.Assign(value=ast.BinOp(op=ast.BitOr())):
            return True
        case ast.Call(func=ast.Attribute(value=ast.Name(id=name))) if name.strip("_") in ("log", "logger"):
            return True
    return False


def list_skipped(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the parts of a program that are not mutated."""
    for node in ast.walk(tree):
        if is_not_behaviour(node):
            yield node
        yield from getattr(node, "decorator_list", ())
        if isinstance(node, ast.ClassDef):
            yield from (*node.keywords, *(field for field in node.body if isinstance(field, ast.AnnAssign)))
        yield from (
            part for name in ("annotation", "returns") if isinstance(part := getattr(node, name, None), ast.AST)
        )


def list_mutants(module: str) -> Iterator[Mutant]:
    source = (ROOT / module).read_text(encoding="utf-8")
    spans = [
        ((part.lineno, part.col_offset), (part.end_lineno, part.end_col_offset))  # type: ignore[attr-defined]
        for part in list_skipped(ast.parse(source))
    ]
    nodes = list(ast_nodes(get_ast(source)))
    for name in OPERATORS:
        operator = get_operator(f"core/{name}")()
        places: Iterator[Position] = (start for node in nodes for start, _ in operator.mutation_positions(node))
        for occurrence, place in enumerate(places):
            marks_parameters = source.splitlines()[place[0] - 1][place[1] :].startswith(("*,", "/,"))
            if not marks_parameters and not any(start <= place < end for start, end in spans):
                yield {"module": module, "line": place[0], "operator": name, "occurrence": occurrence}


def make_source(mutant: Mutant) -> str | None:
    source = (ROOT / mutant["module"]).read_text(encoding="utf-8")
    made = mutate_code(source, get_operator(f"core/{mutant['operator']}")(), mutant["occurrence"])
    try:
        ast.parse(made)
    except SyntaxError:
        return None
    changed = list(difflib.unified_diff(source.splitlines(), made.splitlines(), n=0, lineterm=""))[3:]
    mutant["diff"] = "\n".join(changed)
    return str(made)


def draw_mutants(packages: Iterable[str], number: int, seed: int) -> list[Mutant]:
    """Return mutants, at most one of a line, spread over the packages by their lines, in an order by chance."""
    chance = random.Random(seed)  # noqa: S311
    drawn: list[Mutant] = []
    modules = {package: sorted((ROOT / package).rglob("*.py")) for package in packages}
    lines = {package: sum(len(path.read_text().splitlines()) for path in paths) for package, paths in modules.items()}
    for package, paths in modules.items():
        by_line: dict[tuple[str, int], dict[str, list[Mutant]]] = defaultdict(lambda: defaultdict(list))
        for mutant in (mutant for path in paths for mutant in list_mutants(str(path.relative_to(ROOT)))):
            by_line[mutant["module"], mutant["line"]][mutant["operator"]].append(mutant)
        shuffled = chance.sample(list(by_line.values()), len(by_line))
        tried = (chance.choice(chance.choice(list(by_operator.values()))) for by_operator in shuffled)
        sound = (mutant for mutant in tried if make_source(mutant) is not None)
        drawn += islice(sound, round(number * lines[package] / sum(lines.values())))
    return chance.sample(drawn, len(drawn))
