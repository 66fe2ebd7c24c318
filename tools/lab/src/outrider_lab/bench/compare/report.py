"""A comparison as a document, in Markdown and in HTML, with its plots beside it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from outrider_lab.bench.compare.plots import draw_comparison
from outrider_lab.bench.compare.table import (
    BESIDE_HEADS,
    REST_HEADS,
    SPEED_HEADS,
    beside_cells,
    format_figure,
    list_beside,
    list_notes,
    rest_cells,
    speed_cells,
)

_STYLE = (
    "body{font:15px/1.45 sans-serif;max-width:64em;margin:2em auto;padding:0 1em}"
    "table{border-collapse:collapse}td,th{border:1px solid #bbb;padding:.2em .5em;text-align:right}"
    "td:first-child,th:first-child{text-align:left}img{max-width:100%}"
)


@dataclass(frozen=True, slots=True)
class Section:
    """One part of the document: `rows` with the heads first, else `lines` of a list; `images` as (title, file name)."""

    title: str
    rows: Sequence[Sequence[str]] = ()
    lines: Sequence[str] = ()
    images: Sequence[tuple[str, str]] = ()


def write_report(directory: Path, result: dict[str, Any]) -> None:
    """Write report.md, report.html and the plots into a directory that is there. Raises OSError."""
    rows = [row for row in result["summary"] if row.get("tok_s")]
    images = [(title, path.name) for title, path in draw_comparison(directory, rows)] if rows else []
    sections = list(list_sections(result, images))
    (directory / "report.md").write_text(as_markdown(sections), encoding="utf-8")
    (directory / "report.html").write_text(as_html(sections), encoding="utf-8")


def list_sections(result: dict[str, Any], images: Sequence[tuple[str, str]]) -> Iterator[Section]:
    """Yield the parts of the document."""
    rows = [row for row in result["summary"] if row.get("tok_s")]
    yield Section("Speed", [SPEED_HEADS, *(speed_cells(row) for row in rows)], images=images)
    yield Section("Quality, determinism, memory", [REST_HEADS, *(rest_cells(row) for row in rows)])
    yield Section("Tokens/s by category, over Outrider plain", _list_categories(rows))
    if beside := result["beside_peers"]:
        yield Section("Times another engine's best mode", [BESIDE_HEADS, *map(beside_cells, beside)])
        yield Section("The same by category, tokens/s", lines=list_beside(result))
    facts = sorted({name for row in rows for name in row["runs"]})
    ran = [[f"{row['engine']} {row['mode']}", *(row["runs"].get(name, "") for name in facts)] for row in rows]
    yield Section("What really ran", [["engine", *facts], *ran])
    yield Section("What is missing, and why", lines=list_notes(result))
    yield Section("Commands", lines=result["commands"])
    about = result["environment"]
    yield Section("Environment", lines=[f"{name}: {_as_text(value)}" for name, value in about.items()])
    yield Section("Formulas", lines=[f"{name}: {formula}" for name, formula in result["formulas"].items()])


def as_markdown(sections: Sequence[Section]) -> str:
    """Return the document in Markdown."""
    lines = ["# Outrider beside other engines", ""]
    for one in sections:
        lines += [f"## {one.title}", ""]
        if one.rows:
            heads, *rows = one.rows
            lines += [_join(heads), _join(["---", *["---:"] * (len(heads) - 1)]), *map(_join, rows), ""]
        lines += [f"- {line}" for line in one.lines]
        for title, name in one.images:
            lines += [f"![{title}]({name})", ""]
        lines.append("")
    return "\n".join(lines)


def as_html(sections: Sequence[Section]) -> str:
    """Return the document in HTML, with nothing that is loaded from elsewhere but the plots beside it."""
    parts = [f"<!doctype html><meta charset=utf-8><title>Outrider beside other engines</title><style>{_STYLE}</style>"]
    parts.append("<h1>Outrider beside other engines</h1>")
    for one in sections:
        parts.append(f"<h2>{escape(one.title)}</h2>")
        if one.rows:
            heads, *rows = one.rows
            parts.append(
                "<table>" + _html_row(heads, "th") + "".join(_html_row(row, "td") for row in rows) + "</table>"
            )
        if one.lines:
            parts.append("<ul>" + "".join(f"<li>{escape(line)}</li>" for line in one.lines) + "</ul>")
        for title, name in one.images:
            parts.append(f'<figure><figcaption>{escape(title)}</figcaption><img src="{escape(name)}" alt=""></figure>')
    return "\n".join(parts)


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


def _html_row(cells: Sequence[str], tag: str) -> str:
    return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"


def _join(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _as_text(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
