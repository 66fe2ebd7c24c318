"""Units shared by every package: names carry them (`rtt_ms`, `bytes_per_token`), these functions convert them."""

from __future__ import annotations

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB
MS_PER_S = 1000.0
US_PER_S = 1_000_000.0
NS_PER_S = 1_000_000_000
S_PER_MINUTE = 60.0
S_PER_HOUR = 3600.0
MILLION = 1_000_000.0


def human_bytes(count: float) -> str:
    """Return a byte count as a short text for people, in binary units ("1.5 GiB")."""
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < KIB:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= KIB
    return f"{count:.1f} GiB"


def compute_cost_per_million(price_per_hour: float, tokens_per_s: float) -> float:
    """Return what a million tokens cost, in the units of the price, at so many tokens a second (above 0)."""
    return price_per_hour / S_PER_HOUR / tokens_per_s * MILLION


def ceil_div(amount: int, size: int) -> int:
    """Return how many pieces of `size` hold `amount` (both non-negative, size positive)."""
    return -(-amount // size)
