"""The rate that a fixed depth would bring at a known acceptance: what depths are judged by."""

from __future__ import annotations

from collections.abc import Sequence

from device_profiles.cost import estimate_round_tokens
from device_profiles.units import MS_PER_S
from policies.speculation.cost_model import CostModel


def curve(
    acceptance: Sequence[float],
    cost: CostModel,
    *,
    sequences: int,
    context_tokens: float,
    most: int,
    min_rows: int = 1,
) -> list[float]:
    """Return the expected tokens per second at every depth from 0 to `most`, the same for all `sequences`.

    `acceptance`: the chance that draft i is accepted if all before it are (not empty). `min_rows`: the least rows that
    a sequence is charged for.
    """
    return [
        MS_PER_S
        * sequences
        * estimate_round_tokens(acceptance, depth)
        / cost.ms(sequences * max(depth + 1, min_rows), sequences, context_tokens)
        for depth in range(most + 1)
    ]


def cap(rates: Sequence[float], *, margin: float = 0.0) -> int:
    """Return the depth beyond which the marginal token does not pay, by the rates of `curve`. It is the best of them,
    or 0 where none is better than plain decoding by more than `margin` (0.02: two percent)."""
    best = max(range(len(rates)), key=lambda depth: rates[depth])
    return best if rates[best] > rates[0] * (1.0 + margin) else 0
