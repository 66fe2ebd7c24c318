"""The prompt files of the benchmarks: JSON lines in the format of Spec-Bench."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from orchestrator.errors import OutriderError
from orchestrator.measuring.texts import CATEGORIES, TEXTS

_T = TypeVar("_T")
_Named = TypeVar("_Named", bound="Named")


class BenchError(OutriderError):
    """The benchmark cannot run as asked, or what it measured is not what it must be."""


@dataclass(frozen=True, slots=True)
class PromptText:
    """One prompt as it stands in the file; `key` is its `question_id`, or its line."""

    key: str
    category: str
    text: str


OWN_PROMPTS = tuple(
    PromptText(f"own-{number}", category, text) for number, (category, text) in enumerate(TEXTS[:CATEGORIES])
)
"""Short prompts for benchmarks that are given no file, and for warming up."""


def read_texts(path: Path) -> list[PromptText]:
    """Return the prompts of a file: of each line the first of `turns`, or `prompt`.

    Raises BenchError naming file and line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise BenchError(f"{path}: cannot be read: {reason}") from error
    found = [_parse(path, number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not found:
        raise BenchError(f"{path}: there is no prompt in it; write one JSON object with `turns` or `prompt` a line")
    return found


def _parse(path: Path, number: int, line: str) -> PromptText:
    try:
        row = json.loads(line)
        text = row["turns"][0] if "turns" in row else row["prompt"]
    except (ValueError, KeyError, IndexError, TypeError):
        text = None
    if not isinstance(text, str):
        raise BenchError(f"{path}:{number}: not a JSON object with `turns` or `prompt`")
    return PromptText(str(row.get("question_id", number)), str(row.get("category", "all")), text)


class Named(Protocol):
    """What a benchmark runs several of."""

    @property
    def name(self) -> str: ...


def select_by_name(only: str, every: Sequence[_Named]) -> list[_Named]:
    """Return those whose name the regular expression of `--only` finds. Raises BenchError."""
    try:
        return [one for one in every if re.search(only, one.name)]
    except re.error as error:
        raise BenchError(f"--only {only!r} is no regular expression: {error}") from error


def spread(items: Sequence[_T], count: int) -> list[_T]:
    """Return `count` items: evenly spread over all of them, or, where there are fewer, all of them in turn."""
    size = len(items)
    if count >= size:
        return [items[index % size] for index in range(count)]
    return [items[index * size // count] for index in range(count)]


def take_of_each(texts: Sequence[PromptText], count: int) -> list[PromptText]:
    """Return the first `count` prompts of each category: the first of all of them, then the second, and so on, so that
    prompts that run together are of several categories."""
    kinds: dict[str, list[PromptText]] = {}
    for text in texts:
        kinds.setdefault(text.category, []).append(text)
    return [of_kind[index] for index in range(count) for of_kind in kinds.values() if index < len(of_kind)]
