"""A short text and what a float32 reference says of it: what a loaded model has to be near to, to be sane.

`python -m adapters.decoder.short_text SOURCE TARGET` writes it as JSON. It is a process of its own, because the
reference holds every weight in four bytes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from adapters.contract import ModelRefused, Precision
from adapters.decoder.reference import Reference, Rows, TextCache
from adapters.decoder.source import open_source
from adapters.parent_process import end_with_parent
from device_profiles.whole_file import replace_file

# Given; the reference says the rest, so that it is text of the model's own (ADR 0040).
_SEED_TOKENS = 4
# ADR 0040: 28 are enough, as half of them decide and garbage keeps none.
_TOKENS = 28


@dataclass(frozen=True, slots=True)
class ShortText:
    """`tokens`, those from place `seed` on chosen greedily by the reference; `log_probabilities` of these, in nats."""

    tokens: list[int]
    seed: int
    log_probabilities: list[float]


def write_short_text(source: Path, target: Path) -> None:
    """Compute the text of a model's file and write it, whole or not at all. Raises ModelRefused, OSError."""
    weights = open_source(source, Precision.FP32)
    reference, text = Reference(weights), TextCache()
    tokens, count = seed_tokens(weights.spec.vocabulary_size)
    scores: list[float] = []
    new = list(tokens)
    for _ in range(count):
        row = log_softmax(reference.extend([text], [new])[0][-1:])[0]
        new = [int(row.argmax())]
        tokens += weights.output_ids[new[0] : new[0] + 1] or new
        scores.append(float(row[new[0]]))
        new = tokens[-1:]
    save_short_text(ShortText(tokens, _SEED_TOKENS, scores), target)


def seed_tokens(size: int) -> tuple[list[int], int]:
    """Return what a text in a vocabulary of `size` begins with, and how many tokens the reference says behind it."""
    return [(7 * place * place + 11 * place + 3) % size for place in range(_SEED_TOKENS)], _TOKENS


def save_short_text(text: ShortText, target: Path) -> None:
    """Write a text, whole or not at all. Raises OSError."""
    with replace_file(target) as file:
        file.write(json.dumps(asdict(text)).encode())


def read_short_text(path: Path) -> ShortText | None:
    """Return what `write_short_text` wrote; None where it is not there or damaged."""
    try:
        return ShortText(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def log_softmax(rows: Rows) -> Rows:
    """Return log-probabilities of rows of logits, shape (rows, outputs), in nats."""
    shifted = rows - rows.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)), np.float32)


def run_command(write: Callable[[Path, Path], None], failures: tuple[type[Exception], ...]) -> int:
    """Write the text of the paths of the command line; 0 on success, 1 with the reason on standard error."""
    end_with_parent()
    try:
        write(Path(sys.argv[1]), Path(sys.argv[2]))
    except failures as error:
        sys.stderr.write(f"{error or type(error).__name__}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(run_command(write_short_text, (ModelRefused, OSError, MemoryError)))
