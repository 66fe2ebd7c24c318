"""Mutants change what a program does: neither its texts and types nor its declarations."""

import pytest

pytest.importorskip("cosmic_ray")

from tools import mutant_sample
from tools.mutant_sample import draw_mutants, list_mutants, make_source

TEXTS = '''"""One of 2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import logging

__all__ = ["one" + "two"]
Number = int | float


@dataclass(frozen=True)
class Held(Any, total=False):
    limit: int = 3


def count(log: logging.Logger, /, rows: list[int | None], *, most: int | None) -> tuple[int | None, int]:
    log.info("counted", rows=len(rows) + 1)
    assert len(rows) > 1
    raise ValueError(f"{len(rows) + 1} rows", list(zip(rows, rows, strict=True)))
'''


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setattr(mutant_sample, "ROOT", tmp_path)
    (tmp_path / "package").mkdir()
    return tmp_path


def test_texts_types_and_declarations_are_left_alone(root):
    (root / "package/texts.py").write_text(TEXTS)
    assert [mutant for mutant in list_mutants("package/texts.py") if make_source(mutant)] == []


def test_a_mutant_tells_where_it_is_and_what_it_changes(root):
    (root / "package/limits.py").write_text("LIMIT = 3\n\n\ndef fits(rows):\n    return rows < LIMIT\n")
    made = {mutant["operator"]: mutant for mutant in list_mutants("package/limits.py")}
    assert (
        make_source(made["ReplaceComparisonOperator_Lt_LtE"])
        == "LIMIT = 3\n\n\ndef fits(rows):\n    return rows <= LIMIT\n"
    )
    assert made["ReplaceComparisonOperator_Lt_LtE"]["line"] == 5
    assert made["ReplaceComparisonOperator_Lt_LtE"]["diff"] == "-    return rows < LIMIT\n+    return rows <= LIMIT"


def test_a_seed_draws_the_same_mutants_and_one_of_a_line(root):
    (root / "package/sums.py").write_text("".join(f"SUM_{row} = {row} + {row} * 2\n" for row in range(20)))
    drawn = draw_mutants(["package"], 8, seed=1)
    assert drawn == draw_mutants(["package"], 8, seed=1) != draw_mutants(["package"], 8, seed=2)
    assert len({mutant["line"] for mutant in drawn}) == len(drawn) == 8
