"""Prompt files: JSON lines in the format of Spec-Bench."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from orchestrator.errors import OutriderError
from orchestrator.worker.measuring.texts import CATEGORIES, TEXTS

_T = TypeVar("_T")


class MeasurementError(OutriderError):
    """Something cannot be measured as asked, or what was measured is not what it must be."""


@dataclass(frozen=True, slots=True)
class PromptText:
    """One prompt as it stands in the file; `key` is its `question_id`, or its line."""

    key: str
    category: str
    text: str


OWN_PROMPTS = tuple(
    PromptText(f"own-{number}", category, text) for number, (category, text) in enumerate(TEXTS[:CATEGORIES])
)
"""Short prompts for measurements that are given no file, and for warming up."""


def read_texts(path: Path) -> list[PromptText]:
    """Return the prompts of a file: of each line the first of `turns`, or `prompt`.

    Raises MeasurementError naming file and line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise MeasurementError(f"{path}: cannot be read: {reason}") from error
    prompts = [_parse(path, number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not prompts:
        raise MeasurementError(
            f"{path}: there is no prompt in it; write one JSON object with `turns` or `prompt` a line"
        )
    return prompts


def _parse(path: Path, number: int, line: str) -> PromptText:
    try:
        row = json.loads(line)
        text = row["turns"][0] if "turns" in row else row["prompt"]
    except (ValueError, KeyError, IndexError, TypeError):
        text = None
    if not isinstance(text, str):
        raise MeasurementError(f"{path}:{number}: not a JSON object with `turns` or `prompt`")
    return PromptText(str(row.get("question_id", number)), str(row.get("category", "all")), text)


def spread(items: Sequence[_T], count: int) -> list[_T]:
    """Return `count` items: evenly spread over all of them, or, where there are fewer, all of them in turn."""
    size = len(items)
    if count >= size:
        return [items[index % size] for index in range(count)]
    return [items[index * size // count] for index in range(count)]
