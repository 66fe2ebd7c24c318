"""How a request's tokens are chosen, and the distribution that its filters leave."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Row = NDArray[np.float32]
Shape = Callable[[Row, Sequence[int]], Row | None]
"""Called with a row and the drafts accepted before it; gives the row as it is to be judged there (bias, penalties,
grammar), None where nothing may follow. At least one of its logits is finite."""

Acceptance = Literal["coupled", "rejection", "tolerance"]
Rule = Literal["greedy", "coupled", "rejection", "tolerance"]

_WIDTHS = (4.0, 8.0, 16.0, math.inf)  # how far below the best candidates are looked for, in nats


class NotFinite(ValueError):
    """A row of logits holds NaN or infinity: the device computed garbage."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen: temperature, then min-p, then top-k, then top-p (vLLM's order).

    Temperature 0 is greedy. `top_k` 0, `top_p` 1 and `min_p` 0 switch a filter off. `seed` is taken modulo 2**64.
    Before all that come `logit_bias` ((token, bias) pairs, each token once) and the penalties of `policies/penalties`.
    `acceptance` is the rule by which drafts become output.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    acceptance: Acceptance = "coupled"

    @property
    def rule(self) -> Rule:
        """The rule in effect: at temperature 0 all that lose nothing are one."""
        return "greedy" if self.temperature == 0.0 and self.acceptance != "tolerance" else self.acceptance

    @property
    def draws_drafts(self) -> bool:
        """True where a drafter draws its own tokens and says what from; else it makes the target's choice."""
        return self.temperature > 0.0 and self.acceptance != "coupled"

    @property
    def unfiltered(self) -> bool:
        """True where every token of the vocabulary may be chosen."""
        return self.top_k == 0 and self.top_p >= 1.0 and self.min_p == 0.0


def finite_top(row: Row) -> float:
    """Return the best logit of a row. Raises NotFinite."""
    top = float(row.max())
    if not math.isfinite(top):
        raise NotFinite("the logits are not finite")
    return top


def scaled(row: Row, top: float, tokens: NDArray[np.uint32], sampling: Sampling) -> NDArray[np.float64]:
    """Return the logits of some tokens relative to the best, in nats at the request's temperature."""
    return (row[tokens].astype(np.float64) - top) / sampling.temperature


def distribution(row: Row, sampling: Sampling) -> tuple[NDArray[np.uint32], NDArray[np.float64]]:
    """Return what a sampled token is distributed as: ids (shape (kept,)) and their probabilities, which sum to 1.

    The temperature must be above 0. Raises NotFinite.
    """
    top = finite_top(row)
    ids = np.arange(len(row), dtype=np.uint32) if sampling.unfiltered else filtered(row, sampling)
    shares = np.exp(scaled(row, top, ids, sampling))
    return ids, shares / shares.sum()


def filtered(row: Row, sampling: Sampling) -> NDArray[np.uint32]:
    """Return the ids that survive min-p, top-k and top-p, best first (the lower id first among equals)."""
    top = float(row.max())
    floor = math.log(sampling.min_p) if sampling.min_p > 0.0 else -math.inf
    mass_all = _mass(row, top, sampling) if sampling.top_p < 1.0 and sampling.top_k == 0 else math.nan
    for width in _WIDTHS:
        low = max(-width, floor)
        ids = _at_least(row, top + low * sampling.temperature)
        complete = -width <= floor
        if sampling.top_k and len(ids) >= sampling.top_k:
            ids, complete = ids[: sampling.top_k], True
        if sampling.top_p >= 1.0:
            if complete:
                return ids
            continue
        shares = np.exp(scaled(row, top, ids, sampling))
        # Under top-k or min-p the nucleus is taken from what they kept; alone, from the whole vocabulary.
        total = float(shares.sum()) if complete else mass_all
        within = np.cumsum(shares) >= sampling.top_p * total
        if not math.isnan(total) and (complete or within.any()):
            return ids[: int(within.argmax()) + 1] if within.any() else ids
    return ids


def _at_least(row: Row, low: float) -> NDArray[np.uint32]:
    ids = np.flatnonzero(row >= np.float32(low) if math.isfinite(low) else row > -np.inf)
    return ids[np.argsort(-row[ids], kind="stable")].astype(np.uint32)


def _mass(row: Row, top: float, sampling: Sampling) -> float:
    floor = math.log(sampling.min_p) if sampling.min_p > 0.0 else -math.inf
    nats = (row - np.float32(top)) / np.float32(sampling.temperature)
    shares = np.exp(nats)
    return float(shares.sum(dtype=np.float64) if floor == -math.inf else shares[nats >= floor].sum(dtype=np.float64))
