"""What comes of a question: a table, what it is drawn as, and what was taken for granted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

Series = Mapping[str, Sequence[tuple[float, float]]]


@dataclass(frozen=True, slots=True)
class Plot:
    """Lines of (x, y), by what they are called."""

    name: str
    x_label: str
    y_label: str
    series: Series


@dataclass(frozen=True, slots=True)
class Answer:
    """`columns` say how the values of a row are printed, by their keys; None is printed as nothing."""

    name: str
    question: str
    columns: Mapping[str, str]
    rows: Sequence[Mapping[str, Any]]
    plots: Sequence[Plot] = ()
    assumed: Sequence[str] = field(default_factory=tuple)

    def build_json(self) -> dict[str, Any]:
        """Return all of it as plain values."""
        told = asdict(self)
        told["columns"] = list(self.columns)
        return told


def read_points(rows: Sequence[Mapping[str, Any]], x: str, y: str) -> list[tuple[float, float]]:
    """Return the points of a line: of the rows that have both."""
    return [(row[x], row[y]) for row in rows if row.get(x) is not None and row.get(y) is not None]
