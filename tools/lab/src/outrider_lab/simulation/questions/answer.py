"""What comes of a question: a table, and what was taken for granted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Answer:
    """`columns` say how the values of a row are printed, by their keys; None is printed as nothing."""

    name: str
    question: str
    columns: Mapping[str, str]
    rows: Sequence[Mapping[str, Any]]
    assumed: Sequence[str] = field(default_factory=tuple)

    def build_json(self) -> dict[str, Any]:
        told = asdict(self)
        told["columns"] = list(self.columns)
        return told
