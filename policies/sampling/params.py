"""How a request's tokens are chosen, and the scale that its temperature gives the logits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Row = NDArray[np.float32]
Ids = NDArray[np.uint32]
Shape = Callable[[Row, Sequence[int]], Row | None]
"""Called with a row and the drafts accepted before it; gives the row as it is to be judged there (bias, penalties,
grammar), None where nothing may follow. At least one of its logits is finite."""

Acceptance = Literal["coupled", "rejection", "tolerance"]
Rule = Literal["greedy", "coupled", "rejection", "tolerance"]


class NotDecided(Exception):
    """What is known of a row does not decide its token: the whole row does."""


class NotFinite(ValueError):
    """A row of logits holds NaN or infinity: the device computed garbage."""


Breaker = tuple[tuple[int, ...], tuple[int, ...]]
"""Tokens each of which breaks a repetition where the others follow; () where none has to."""


class BestRow(NamedTuple):
    """What is known of a row beside its best logits. Of these the best comes first, the lower id first among equals.

    `ids`: whose they are. `mass`: what the shares of all tokens come to at the request's temperature, the best one's
    being 1; it may be off by one in a thousand. `read` returns all logits."""

    ids: Ids
    mass: float
    read: Callable[[], Row]


class BestRows(NamedTuple):
    """The same of several rows. `read` takes the number of one."""

    ids: Ids
    masses: NDArray[np.float32]
    read: Callable[[int], Row]

    def take_row(self, index: int) -> BestRow:
        return BestRow(self.ids[index], float(self.masses[index]), partial(self.read, index))

    def cut(self, first: int, end: int) -> BestRows:
        return BestRows(self.ids[first:end], self.masses[first:end], lambda index: self.read(first + index))


@dataclass(frozen=True, slots=True)
class Dry:
    """The penalty on repetitions of policies/sampling/dry. `last_tokens`: of so many tokens of prompt and output, -1:
    of all."""

    multiplier: float
    base: float
    allowed_length: int
    last_tokens: int
    breakers: tuple[Breaker, ...]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen: temperature, then min-p, then top-k, then top-p (vLLM's order), then typical sampling and
    XTC (policies/sampling/narrowing).

    Temperature 0 is greedy. `top_k` 0, `top_p` 1, `min_p` 0, `typical_p` 1 and `xtc_probability` 0 switch a filter off.
    `seed` is taken modulo 2**64. Before all that come `logit_bias` ((token, bias) pairs, each token once) and the
    penalties of `policies/sampling/penalties`. `acceptance` is the rule by which drafts become output.
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
    typical_p: float = 1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    dry: Dry | None = None

    @property
    def rule(self) -> Rule:
        """The rule in effect: at temperature 0 all that lose nothing are one."""
        return "greedy" if self.temperature == 0.0 and self.acceptance != "tolerance" else self.acceptance

    def count_best_logits(self, most: int) -> int:
        """Return how many of a row's best logits are to be known, as BestRow has them, to decide its token, with its
        mass where a nucleus ends. There are `most` to be had. 0: all of them may decide."""
        if self.rule == "greedy":
            return min(1, most)
        if self.rule != "coupled" or (self.narrows and not self.top_k):
            return 0
        if self.top_k:
            return self.top_k if self.top_k <= most else 0
        return most if self.has_nucleus != (self.min_p > 0.0) else 0  # with both the mass is that of what min-p keeps

    @property
    def has_nucleus(self) -> bool:
        """True where top-p ends at a share of the mass of all tokens."""
        return self.top_p < 1.0 and not self.top_k

    @property
    def draws_drafts(self) -> bool:
        """True where a drafter draws its own tokens and says what from; else it makes the target's choice."""
        return self.temperature > 0.0 and self.acceptance != "coupled"

    @property
    def unfiltered(self) -> bool:
        """True where every token of the vocabulary may be chosen."""
        return self.cuts_nothing and not self.narrows

    @property
    def cuts_nothing(self) -> bool:
        """True where min-p, top-k and top-p are off."""
        return self.top_k == 0 and self.top_p >= 1.0 and self.min_p == 0.0

    @property
    def narrows(self) -> bool:
        """True where a filter of policies/sampling/narrowing is on."""
        return self.typical_p < 1.0 or self.xtc_probability > 0.0


def finite_top(row: Row) -> float:
    """Return the best logit of a row. Raises NotFinite."""
    top = float(row.max())
    if not math.isfinite(top):
        raise NotFinite("the logits are not finite")
    return top


def require_finite(row: Row) -> None:
    """Raise NotFinite where a row holds NaN or infinity, or no number at all."""
    finite_top(row)


def scale_logits(row: Row, top: float, tokens: NDArray[np.uint32], sampling: Sampling) -> NDArray[np.float64]:
    """Return the logits of some tokens relative to the best, in nats at the request's temperature."""
    return relative(row[tokens], top, sampling)


def relative(logits: Row, top: float, sampling: Sampling) -> NDArray[np.float64]:
    """Return some logits relative to the best, in nats at the request's temperature."""
    nats = logits.astype(np.float64)
    nats -= top
    nats /= sampling.temperature
    return nats
