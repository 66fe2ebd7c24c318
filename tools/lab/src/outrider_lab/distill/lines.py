"""The texts as rows of one length for training: texts follow one another, and every position knows what to learn.

A row may begin within a text and hold several. Nothing is masked between them: a draft that has seen far-away tokens
that do not matter is not surprised by a long prompt.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from orchestrator.generating.data import Text
from orchestrator.generating.prompts import KINDS

_HELD_OUT_ONE_IN = 25
NOTHING = -1
"""Where a position has no label."""


@dataclass(frozen=True, slots=True)
class Rows:
    """`tokens` (R, length) int32. Of position i, what comes behind it:

    - `top_ids` (R, length, K) int32: indexes of the draft's outputs, NOTHING where it cannot say that token or there is
      no label.
    - `chances` (R, length, K) float16.
    """

    tokens: NDArray[np.int32]
    top_ids: NDArray[np.int32]
    chances: NDArray[np.float16]


def is_held_out(number: int) -> bool:
    """Say whether a conversation is kept from training: one in twenty-five, by its number."""
    return zlib.crc32(f"held out {number}".encode()) % _HELD_OUT_ONE_IN == 0


def category(number: int) -> str:
    """Return the kind of prompt that a conversation began with."""
    return KINDS[number % len(KINDS)]


def indexes_of(outputs: NDArray[np.int64], vocabulary_size: int) -> NDArray[np.int32]:
    """Return the output index of each token, NOTHING for those left out, shape (vocabulary,)."""
    found = np.full(vocabulary_size, NOTHING, np.int32)
    found[outputs] = np.arange(len(outputs), dtype=np.int32)
    return found


def rows_of(texts: Sequence[Text], indexes: NDArray[np.int32], length: int, order: NDArray[np.int64]) -> Rows:
    """Lay the texts behind one another in `order` and cut the line into rows. A last short row is left out, unless it
    is the only one. Then it is filled up with its own beginning, unlabelled."""
    top = texts[0].top_ids.shape[1]
    tokens = np.concatenate([texts[index].tokens for index in order])
    ids = np.full((len(tokens), top), NOTHING, np.int32)
    chances = np.zeros((len(tokens), top), np.float16)
    start = 0
    for index in order:
        text = texts[index]
        first, behind = start + text.head - 1, start + len(text.tokens) - 1
        ids[first:behind] = indexes[text.top_ids]
        chances[first:behind] = np.exp(text.top_logs.astype(np.float32))
        start += len(text.tokens)
    if len(tokens) < length:
        tokens = np.resize(tokens, length)
        ids = np.concatenate([ids, np.full((length - len(ids), top), NOTHING, np.int32)])
        chances = np.concatenate([chances, np.zeros((length - len(chances), top), np.float16)])
    count = len(tokens) // length
    cut = count * length
    return Rows(
        tokens[:cut].reshape(count, length),
        ids[:cut].reshape(count, length, top),
        chances[:cut].reshape(count, length, top),
    )


def split_held_out(texts: Iterable[Text]) -> tuple[list[Text], dict[str, list[Text]]]:
    training: list[Text] = []
    kept: dict[str, list[Text]] = {}
    for text in texts:
        if len(text.tokens) == text.head:
            continue
        if is_held_out(text.number):
            kept.setdefault(category(text.number), []).append(text)
        else:
            training.append(text)
    return training, dict(sorted(kept.items()))
