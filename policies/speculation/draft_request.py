"""How many tokens a server is asked for at once that answers only when it has all of them.

A token more is worth asking for while the chance that it is accepted, with all before it, is above its price
(`gate.token_price`). And what is not there when it is needed is of no use: the request has to end in time. At a server
that drafts for others, too, a request waits for theirs first. So whoever shares one asks for less, or leaves it alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import log

from policies.running_mean import update_mean
from policies.speculation.gate import token_price

# Weight of the newest answer in running means: the last ten count. Not tuned.
_NEWEST = 0.1
_HOPEFUL = 0.8  # the chance of a token before there was any
# Chances are kept apart from 0 and 1, of which no length follows. Not tuned.
_LEAST_CHANCE, _MOST_CHANCE = 0.01, 0.99


@dataclass(frozen=True, slots=True)
class ServerPace:
    """Running means of a server's answers: what a token takes (0 ms: not measured yet), how likely a token is, and how
    long a request waits there before the server begins."""

    token_ms: float = 0.0
    chance: float = _HOPEFUL
    queue_ms: float = 0.0


def observe_server_answer(
    pace: ServerPace, confidences: tuple[float, ...], took_ms: float, read: int, queue_ms: float = 0.0
) -> ServerPace:
    """Take in an answer, for which the server read `read` tokens that it did not know, after `queue_ms`."""
    pace = replace(pace, queue_ms=update_mean(pace.queue_ms, queue_ms, _NEWEST))
    tokens = len(confidences)
    if not tokens:
        return pace
    chance = update_mean(pace.chance, sum(confidences) / tokens, _NEWEST)
    if read > 2 * tokens:  # its time is that of reading
        return replace(pace, chance=chance)
    token_ms = took_ms / tokens
    return replace(pace, token_ms=update_mean(pace.token_ms or token_ms, token_ms, _NEWEST), chance=chance)


def count_asked_tokens(pace: ServerPace, limit: int, within_ms: float, round_ms: float) -> int:
    """Return how many tokens to ask for: at least one, at most `limit`, and no more than `within_ms` allow (0: any
    time). `round_ms`: what a round takes that waits for them (0: none does)."""
    if pace.token_ms <= 0.0:
        return limit
    most = float(limit)
    if within_ms > 0.0:
        most = min(most, (within_ms - pace.queue_ms) / pace.token_ms)
    price = token_price(pace.token_ms, round_ms)
    if price > 0.0:
        chance = min(_MOST_CHANCE, max(_LEAST_CHANCE, pace.chance))
        most = min(most, log(price) / log(chance))
    return int(max(1.0, most))
