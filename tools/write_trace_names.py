"""Writes the tables of spans, attributes and metrics into docs/observability.md.

python -m tools.write_trace_names
"""

from __future__ import annotations

from pathlib import Path

from orchestrator.daemon.tracing.names import format_tables

PAGE = Path(__file__).parents[1] / "docs" / "observability.md"
BEGIN, END = "<!-- names: begin. PYTHONPATH=. python -m tools.write_trace_names -->\n", "<!-- names: end -->\n"


def fill_page(text: str) -> str:
    """Return the page with the tables as they are now. Raises ValueError where it has no place for them."""
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{PAGE}: has no lines {BEGIN.strip()} and {END.strip()}")
    return f"{head}{begin}\n{format_tables()}\n\n{end}{tail}"


if __name__ == "__main__":
    PAGE.write_text(fill_page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
