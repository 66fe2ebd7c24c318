"""Whether a stream that is moved takes its KV cache along: what copying it takes, against computing it again.

Pages are copied twice, out of one worker and into the other. Tokens that the next worker remembers cost nothing there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from device_profiles.units import MIB, MS_PER_S
from policies.running_mean import update_mean

MOST_BYTES = 1024 * MIB
"""Of shared memory for all moves that are under way. ADR 0051. Not tuned: four streams of 8,000 tokens of the default
model take 740 MiB."""
MOST_MOVES = 4
"""That are under way at a time: each holds up the rounds of two workers. ADR 0051: 94 MB hold a worker's other streams
for 54 ms."""

_FIRST_BYTES_PER_S = 300.0 * MIB
"""Both copies, until one was measured. ADR 0051: what was measured is this and more; the default model breaks even at
23 MB/s."""
# Weight of the newest move. Not tuned: moves are few, and break even is far away (ADR 0051).
_NEWEST = 0.3
_LEAST_BYTES = 64 * 1024
"""Of a move that shows a rate: in a smaller one fixed costs are most of it. Not tuned."""
_LEAST_MS = 0.01  # a shorter time is the clock's
_FIXED_MS = 5.0
"""Commands and events there and back. ADR 0051: it decides in practice: below about ten tokens a stream is computed
again."""
# Times what a move is predicted to take. Not tuned: 146 to 337 ms were seen of one move (ADR 0051).
_PATIENCE = 4.0
_LEAST_PATIENCE_S = 3.0  # not tuned: a round of the old worker lies in it
# By then computing again had been quicker: 12 s for 4,096 tokens (ADR 0051).
_MOST_PATIENCE_S = 30.0


@dataclass(frozen=True, slots=True)
class CopyRate:
    """How fast pages are copied, both times together; 0 where nothing was measured."""

    bytes_per_s: float = 0.0

    @property
    def assumed_bytes_per_s(self) -> float:
        return self.bytes_per_s or _FIRST_BYTES_PER_S


@dataclass(frozen=True, slots=True)
class MovePrice:
    """What moving and computing again take. `moves`: the pages go along; `reason` is one line."""

    move_ms: float
    recompute_ms: float

    @property
    def moves(self) -> bool:
        return self.move_ms < self.recompute_ms

    @property
    def reason(self) -> str:
        sign = "less" if self.moves else "no less"
        return f"its pages take {self.move_ms:.0f} ms, {sign} than {self.recompute_ms:.0f} ms to compute them again"

    @property
    def patience_s(self) -> float:
        """How long to wait for its pages before they are computed again: far longer than they take, but bounded."""
        return min(_MOST_PATIENCE_S, max(_LEAST_PATIENCE_S, _PATIENCE * self.move_ms / MS_PER_S))


def observe_copy(rate: CopyRate, length_bytes: int, took_ms: float) -> CopyRate:
    """Take in one move: both copies together took so long."""
    if length_bytes < _LEAST_BYTES or took_ms < _LEAST_MS:
        return rate
    own = length_bytes * MS_PER_S / took_ms
    return replace(rate, bytes_per_s=update_mean(rate.bytes_per_s or own, own, _NEWEST))


def price_move(
    rate: CopyRate, *, tokens: int, remembered_tokens: int, bytes_per_token: float, prefill_ms_per_token: float
) -> MovePrice:
    """Return what either way takes for a stream of so many tokens, some of which the next worker remembers."""
    move_ms = _FIXED_MS + tokens * bytes_per_token * MS_PER_S / rate.assumed_bytes_per_s
    return MovePrice(move_ms, max(0, tokens - remembered_tokens) * prefill_ms_per_token)


def may_begin(under_way_bytes: int, under_way: int, length_bytes: int) -> bool:
    """Whether one more move may begin now."""
    return under_way < MOST_MOVES and under_way_bytes + length_bytes <= MOST_BYTES
