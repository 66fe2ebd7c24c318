"""Rotary frequencies from the parameters that a config names: plain, linear, Llama 3 and YaRN scaling."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adapters.decoder.spec import MOST_COUNT, Rope

_Frequencies = NDArray[np.float64]
_MOST = 1e30  # more is damage, and would become an infinity


class RopeRefused(ValueError):
    """The parameters are incomplete or of a kind that is not supported."""


def rope_from(parameters: Mapping[str, Any], head_dim: int) -> Rope:
    """Return the rope of `head_dim` elements that Hugging Face's `rope_parameters` describe.

    Raises RopeRefused for an unknown `rope_type`, a missing number, or a rope over part of the head.
    """
    kind = _read_kind(parameters)
    if _number(parameters, "partial_rotary_factor", 1.0) != 1.0:
        raise RopeRefused("a rope over part of each head (partial_rotary_factor) is not supported")
    base = _number(parameters, "rope_theta")
    plain = base ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    magnitude = 1.0
    if kind == "linear":
        plain = plain / _number(parameters, "factor")
    elif kind == "llama3":
        plain = _llama3(plain, parameters)
    elif kind == "yarn":
        plain, magnitude = _yarn(plain, parameters, base)
    elif kind != "default":
        raise RopeRefused(f"the rope_type {kind!r} is not supported; default, linear, llama3 and yarn are")
    return Rope(tuple(float(value) for value in plain), magnitude)


def extend_context(parameters: Mapping[str, Any], trained: int) -> int:
    """Return how many tokens a model reads that was trained with so many: YaRN extends the original ones by its factor.

    Raises RopeRefused for a missing number, and for more tokens than any model counts.
    """
    if _read_kind(parameters) != "yarn":
        return trained
    extended = _number(parameters, "original_max_position_embeddings") * _number(parameters, "factor")
    if extended > MOST_COUNT:
        raise RopeRefused(f"it extends the context to {extended:.0f} tokens")
    return max(trained, int(extended))


def _read_kind(parameters: Mapping[str, Any]) -> Any:
    return parameters.get("rope_type") or parameters.get("type") or "default"


def _number(parameters: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = parameters.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= _MOST:
        raise RopeRefused(f"{key} is {value!r}, not a positive number")
    return float(value)


def _llama3(plain: _Frequencies, parameters: Mapping[str, Any]) -> _Frequencies:
    """Slow frequencies are divided by `factor`, fast ones stay, and those between are blended (Llama 3.1)."""
    factor, low, high, context = (
        _number(parameters, key)
        for key in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    )
    if high <= low:
        raise RopeRefused("high_freq_factor is not above low_freq_factor")
    turns = context * plain / (2.0 * math.pi)  # how often a frequency turns within the original context
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return plain * (keep + (1.0 - keep) / factor)


def _yarn(plain: _Frequencies, parameters: Mapping[str, Any], base: float) -> tuple[_Frequencies, float]:
    """YaRN (arXiv 2309.00071): a ramp over dimensions instead of frequencies, and a magnitude above one."""
    factor, context = (_number(parameters, key) for key in ("factor", "original_max_position_embeddings"))
    if base <= 1.0:
        raise RopeRefused(f"rope_theta is {base!r}, and YaRN divides by its logarithm")
    half = len(plain)

    def dimension(turns: float) -> float:
        return half * math.log(context / (turns * 2.0 * math.pi)) / math.log(base)

    first = dimension(_number(parameters, "beta_fast", 32.0))
    last = dimension(_number(parameters, "beta_slow", 1.0))
    if parameters.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * half - 1)
    ramp = np.clip((np.arange(half) - first) / max(last - first, 0.001), 0.0, 1.0)
    return plain * (1.0 - ramp + ramp / factor), _yarn_magnitude(factor, parameters)


def _yarn_magnitude(factor: float, parameters: Mapping[str, Any]) -> float:
    given = parameters.get("attention_factor")
    if given is not None:
        return _number(parameters, "attention_factor")

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0

    if parameters.get("mscale") and parameters.get("mscale_all_dim"):
        return scale(_number(parameters, "mscale")) / scale(_number(parameters, "mscale_all_dim"))
    return scale(1.0)
