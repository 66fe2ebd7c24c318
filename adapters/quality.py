"""What a prepared model's number format costs, measured and written beside its weights: quality.json."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_FILE = "quality.json"
_FORMAT = 1
_KEY = ("device", "activations", "kv_cache", "exactness")


def log_probabilities(rows: NDArray[Any], following: Sequence[int]) -> list[float]:
    """Return log softmax of each row, (tokens, vocabulary), at the token that follows it."""
    wide = rows.astype(np.float64)
    top = wide.max(axis=1)
    total = top + np.log(np.exp(wide - top[:, None]).sum(axis=1))
    return [float(value) for value in wide[np.arange(len(wide)), np.asarray(following)] - total]


def read_quality(artefact: Path) -> list[dict[str, Any]]:
    """Return the measurements of an artefact, the newest first; [] where there are none, or the file is damaged."""
    try:
        note = json.loads((artefact / _FILE).read_text(encoding="utf-8"))
        whole = note["format"] == _FORMAT
        rows = [dict(row) for row in note["measured"] if isinstance(row["step_ms"] + row["greedy_agreement"], float)]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []
    return rows if whole else []


def add_quality(artefact: Path, measured: Mapping[str, Any]) -> None:
    """Write a measurement; it takes the place of one with the same device, activations, KV cache and exactness.

    Raises OSError. Readers see the file before or after, never half of it.
    """
    others = [row for row in read_quality(artefact) if any(row.get(key) != measured[key] for key in _KEY)]
    text = json.dumps({"format": _FORMAT, "measured": [dict(measured), *others]}, indent=1)
    draft = artefact / f".{_FILE}.{os.getpid()}-{secrets.token_hex(4)}"
    draft.write_text(text, encoding="utf-8")
    draft.replace(artefact / _FILE)
