"""Prompt files: JSON lines in the format of Spec-Bench.

The texts that acceptance is measured on where nobody names others: a few kinds of chat requests.

Answers of one kind differ by a factor of two in what drafts are worth, so there are several of each. The first
CATEGORIES are one of each, and so are the next.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from orchestrator.errors import OutriderError

TEXTS = (
    ("explaining", "Explain in three sentences why ships float."),
    ("listing", "List the days of the week and one thing that people often do on each of them."),
    ("rewriting", "Write this again with every name replaced by 'the captain': Anna told Ben that Anna was late."),
    ("writing", "Write the beginning of a short story about a lighthouse keeper and a storm."),
    ("coding", "Write a Python function that returns the largest of three numbers, with a docstring."),
    ("reasoning", "A train leaves at 9:40 and arrives at 11:15. How long does it travel? Show each step."),
    ("explaining", "Explain what a vaccine does in the body."),
    ("listing", "List six tools that a carpenter uses and what each is for."),
    ("rewriting", "Rewrite this politely: Send me the report now, I have no time to wait for it."),
    ("writing", "Write a short poem about the first snow."),
    ("coding", "Write a Python function that checks whether a word is a palindrome."),
    ("reasoning", "Tom has 3 boxes with 12 apples each and gives away 7 apples. How many are left?"),
    ("explaining", "Why do leaves change their colour in autumn?"),
    ("listing", "Name five planets and say one fact about each."),
    ("rewriting", "Put this into the past tense: The boy runs to the river and throws a stone into the water."),
    ("writing", "Write an e-mail in which you ask a neighbour to water your plants."),
    ("coding", "Write a SQL query that counts the orders of each customer."),
    ("reasoning", "If all roses are flowers and some flowers fade quickly, do all roses fade quickly? Explain."),
    ("explaining", "Explain how a bicycle stays upright while it moves."),
    ("listing", "List ten words that describe good food."),
    (
        "rewriting",
        "Make this shorter: The meeting that was planned for Monday has been moved to Tuesday because of the weather.",
    ),
    ("writing", "Describe a market on a summer morning."),
    ("coding", "Write a Python class for a bank account with deposit and withdraw."),
    ("reasoning", "A rectangle is 8 m long and 5 m wide. What are its area and its perimeter?"),
)
"""(category, text)."""
CATEGORIES = len({category for category, _ in TEXTS})
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
