"""Ratios of pairs: what an engine did beside what Outrider's plain mode did at once before it and at once behind it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider_lab.peers.contract import Answer

Rates = Mapping[str, float]
"""Rates by name; more is better, and 0 says that there is none."""

_DRAWS = 2000
_SEED = 20261
_LEVELS = (2.5, 97.5)


@dataclass(frozen=True, slots=True)
class Pair:
    """One answer (or wave) of an engine in one turn, by the prompt's `key`, between two of Outrider's plain mode."""

    key: str
    own: Rates
    before: Rates
    after: Rates

    def ratio(self, name: str) -> float | None:
        """Return the engine's rate over the geometric mean of its two neighbours'; None where one is missing."""
        own, before, after = (one.get(name, 0.0) for one in (self.own, self.before, self.after))
        return own / (before * after) ** 0.5 if own and before and after else None


def rates_of(answer: Answer) -> dict[str, float]:
    """Return an answer's tokens/s (`tok_s`), those behind its first token (`tpot`), and its first token's rate
    (`ttft`)."""
    return {
        "tok_s": divide(answer.generated, answer.last_s),
        "tpot": divide(answer.generated - 1, answer.last_s - answer.first_s),
        "ttft": divide(1.0, answer.first_s),
    }


def compare_pairs(pairs: Sequence[Pair], names: Sequence[str]) -> dict[str, Any]:
    """Return of each rate the ratio, `NAME_quartiles` of all pairs, and `NAME_interval`.

    The ratio is the geometric mean over prompts of the median over a prompt's pairs: what a burst of other work spoils
    is one pair of several. The interval holds 95 % of the ratios that pairs drawn anew would give (percentile
    bootstrap, Efron 1979), drawn within each prompt: it is what another run of the same prompts may show.
    """
    found: dict[str, Any] = {}
    for name in names:
        groups = group_ratios(pairs, name)
        if not groups:
            continue
        every = np.concatenate(groups)
        found[name] = _middle(groups)
        if len(every) > 1:
            found[f"{name}_quartiles"] = [float(one) for one in np.percentile(every, (25, 75))]
        if len(every) > len(groups):
            found[f"{name}_interval"] = _interval(groups)
    return found


def group_ratios(pairs: Sequence[Pair], name: str) -> list[NDArray[np.float64]]:
    groups: dict[str, list[float]] = defaultdict(list)
    for pair in pairs:
        if (ratio := pair.ratio(name)) is not None:
            groups[pair.key].append(ratio)
    return [np.asarray(one) for one in groups.values()]


def _middle(groups: Sequence[NDArray[np.float64]]) -> float:
    return float(np.exp(np.mean([np.log(np.median(one)) for one in groups])))


def _interval(groups: Sequence[NDArray[np.float64]]) -> list[float]:
    random = np.random.default_rng(_SEED)
    medians = [np.median(random.choice(one, (_DRAWS, len(one))), axis=1) for one in groups]
    return [float(one) for one in np.percentile(np.exp(np.mean(np.log(medians), axis=0)), _LEVELS)]


def divide(upper: float, lower: float) -> float:
    return upper / lower if lower else 0.0
