"""Writes the tables of spans, attributes and metrics into docs/observability.md.

python -m tools.write_trace_names
"""

from __future__ import annotations

from pathlib import Path

from orchestrator.daemon.tracing.names import ATTRIBUTES, METRICS, SPANS

PAGE = Path(__file__).parents[1] / "docs" / "observability.md"
BEGIN, END = "<!-- names: begin. PYTHONPATH=. python -m tools.write_trace_names -->\n", "<!-- names: end -->\n"


def fill_page(text: str) -> str:
    """Return the page with the tables as they are now. Raises ValueError where it has no place for them."""
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{PAGE}: has no lines {BEGIN.strip()} and {END.strip()}")
    return f"{head}{begin}\n{format_tables()}\n\n{end}{tail}"


def format_tables() -> str:
    """Return the tables of docs/observability.md, as Markdown."""
    spans = [f"| `{name}` | {f'`{parent}`' if parent else ''} | {meaning} |" for name, parent, meaning in SPANS]
    attributes = [
        f"| `{name}` | {', '.join(f'`{span}`' for span in spans)} | {meaning} |" for name, spans, meaning in ATTRIBUTES
    ]
    metrics = [
        f"| `{name}` | {meaning} | {', '.join(f'{bound:g}' for bound in bounds_s)} |"
        for name, meaning, bounds_s in METRICS
    ]
    return "\n".join(
        [
            "| span | parent | what it is |\n|---|---|---|",
            *spans,
            "\n| attribute | spans | meaning |\n|---|---|---|",
            *attributes,
            "\n| metric (seconds) | meaning | buckets |\n|---|---|---|",
            *metrics,
        ]
    )


if __name__ == "__main__":
    PAGE.write_text(fill_page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
