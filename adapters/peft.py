"""Directories of PEFT with a LoRA adapter: `adapter_config.json`, and `adapter_model.safetensors` with two matrices of
each weight that it changes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from adapters.contract import ModelRefused
from adapters.safetensors_file import Stored, read_tensors

PEFT_CONFIG: Final = "adapter_config.json"
PEFT_WEIGHTS: Final = "adapter_model.safetensors"
_PREFIX: Final = "base_model.model."
_CHANGES: Final = ("use_dora", "modules_to_save", "rank_pattern", "alpha_pattern", "trainable_token_indices")
"""Keys that make more of an adapter than one pair of matrices of one scale for each weight."""


@dataclass(frozen=True, slots=True)
class PeftPair:
    """The matrices of one weight: `narrow` of shape (rank, inputs), `wide` of (outputs, rank)."""

    narrow: Stored
    wide: Stored


@dataclass(frozen=True, slots=True)
class PeftLora:
    """An adapter: its matrices by the modules whose weights they change, as transformers names these. Added to a weight
    is their product times `alpha` by the `rank`."""

    pairs: Mapping[str, PeftPair]
    rank: int
    alpha: float


def read_peft(directory: Path) -> PeftLora:
    """Read what the heads of a directory's files say. Raises ModelRefused for all that is more than such pairs."""
    config = _read_config(directory)
    if not (directory / PEFT_WEIGHTS).is_file():
        raise ModelRefused(f"{directory.name}: there is no {PEFT_WEIGHTS} in it")
    sides: dict[str, dict[str, Stored]] = {}
    for key, stored in read_tensors(directory / PEFT_WEIGHTS).items():
        module, _, side = key.removeprefix(_PREFIX).removesuffix(".weight").rpartition(".lora_")
        if side not in ("A", "B") or len(stored.shape) != 2:
            raise ModelRefused(f"{directory.name}: {key} is no matrix of a LoRA adapter of a linear layer")
        sides.setdefault(module, {})[side] = stored
    if not sides:
        raise ModelRefused(f"{directory.name}: {PEFT_WEIGHTS} has no tensors")
    alpha, rank = config.get("lora_alpha"), config.get("r")
    if not isinstance(alpha, int | float) or not isinstance(rank, int) or not alpha or rank < 1:
        raise ModelRefused(f"{directory / PEFT_CONFIG}: lora_alpha {alpha!r} and r {rank!r} are no scale")
    for module, both in sides.items():
        if len(both) < 2:
            raise ModelRefused(f"{directory.name}: {module} has no pair of matrices (lora_A and lora_B)")
        ranks = both["A"].shape[0], both["B"].shape[1]
        if ranks != (rank, rank):
            other = ranks[0] if ranks[0] != rank else ranks[1]
            raise ModelRefused(f"{directory.name}: {module} has the rank {other}, and r is {rank}")
    pairs = {module: PeftPair(both["A"], both["B"]) for module, both in sides.items()}
    return PeftLora(pairs, rank, float(alpha) * (math.sqrt(rank) if config.get("use_rslora") else 1.0))


def read_floats(stored: Stored) -> NDArray[np.float32]:
    """Return a matrix in float32. Raises ModelRefused for another kind of elements."""
    values = stored.values()
    if values.dtype == np.uint16:  # bfloat16: the upper half of a float32
        return (values.astype(np.uint32) << 16).view(np.float32)
    return np.asarray(values, np.float32)


def _read_config(directory: Path) -> Mapping[str, Any]:
    where = directory / PEFT_CONFIG
    try:
        config = json.loads(where.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelRefused(f"{where}: it cannot be read ({error})") from None
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise ModelRefused(f"{where}: peft_type is not LORA")
    if changed := next((key for key in _CHANGES if config.get(key)), ""):
        raise ModelRefused(f"{where}: {changed} is set, and such adapters are not read. Merge it into the model.")
    if config.get("bias", "none") != "none":
        raise ModelRefused(f"{where}: it changes biases, and such adapters are not read. Merge it into the model.")
    return config
