"""What a benchmark runs of all that it could run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Protocol, TypeVar

from orchestrator.worker.measuring.prompts import PromptText
from outrider_lab.bench.errors import BenchError

_Named = TypeVar("_Named", bound="Named")


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


def take_of_each(texts: Sequence[PromptText], count: int) -> list[PromptText]:
    """Return the first `count` prompts of each category: the first of all of them, then the second, and so on, so that
    prompts that run together are of several categories."""
    kinds: dict[str, list[PromptText]] = {}
    for text in texts:
        kinds.setdefault(text.category, []).append(text)
    return [of_kind[index] for index in range(count) for of_kind in kinds.values() if index < len(of_kind)]
