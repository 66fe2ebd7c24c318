"""A comparison as a document in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider_lab.bench.compare.table import (
    BESIDE_HEADS,
    REST_HEADS,
    SPEED_HEADS,
    beside_cells,
    format_figure,
    list_beside,
    list_figures,
    list_notes,
    rest_cells,
    speed_cells,
)


@dataclass(frozen=True, slots=True)
class Section:
    """One part of the document: `rows` with the heads first, else `lines` of a list."""

    title: str
    rows: Sequence[Sequence[str]] = ()
    lines: Sequence[str] = ()


def write_report(directory: Path, result: dict[str, Any]) -> None:
    """Write report.md into a directory that is there. Raises OSError."""
    (directory / "report.md").write_text(as_markdown(list_sections(result)), encoding="utf-8")


def list_sections(result: dict[str, Any]) -> Iterator[Section]:
    rows = [row for row in result["summary"] if row.get("tok_s")]
    yield Section("Speed", [SPEED_HEADS, *(speed_cells(row) for row in rows)])
    yield Section("Quality, determinism, memory", [REST_HEADS, *(rest_cells(row) for row in rows)])
    yield Section("Tokens/s by category, over Outrider plain", _list_categories(rows))
    if beside := result["beside_peers"]:
        yield Section("Times another engine's best mode", [BESIDE_HEADS, *map(beside_cells, beside)])
        yield Section("The same by category, tokens/s", lines=list_beside(result))
        yield Section("Beside the best of all", lines=list_figures(result))
    facts = sorted({name for row in rows for name in row["runs"]})
    ran = [[f"{row['engine']} {row['mode']}", *(row["runs"].get(name, "") for name in facts)] for row in rows]
    yield Section("What really ran", [["engine", *facts], *ran])
    yield Section("What is missing, and why", lines=list_notes(result))
    yield Section("Commands", lines=result["commands"])
    about = result["environment"]
    yield Section("Environment", lines=[f"{name}: {_as_text(value)}" for name, value in about.items()])
    yield Section("Formulas", lines=[f"{name}: {formula}" for name, formula in result["formulas"].items()])


def as_markdown(sections: Iterable[Section]) -> str:
    lines = ["# Outrider beside other engines", ""]
    for one in sections:
        lines += [f"## {one.title}", ""]
        if one.rows:
            heads, *rows = one.rows
            lines += [_join(heads), _join(["---", *["---:"] * (len(heads) - 1)]), *map(_join, rows), ""]
        lines += [f"- {line}" for line in one.lines]
        lines.append("")
    return "\n".join(lines)


def _list_categories(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    names = sorted({name for row in rows for name in row["categories"]})
    found = [
        [
            f"{row['engine']} {row['mode']}",
            *(format_figure(row["categories"].get(name, {}).get("tok_s_vs_outrider"), "{:.2f}") for name in names),
        ]
        for row in rows
    ]
    return [["engine", *names], *found]


def _join(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _as_text(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
