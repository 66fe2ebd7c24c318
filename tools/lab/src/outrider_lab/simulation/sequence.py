"""A sequence of a simulated worker, and the figures of its end."""

from __future__ import annotations

from zlib import crc32

from device_profiles.units import MS_PER_S
from orchestrator.protocol.commands import Submit
from orchestrator.protocol.rounds import RequestStats


class SimulatedSequence:
    """A sequence. `known`: tokens to be read before it decodes, of which `unread` are left. `zero` and `end`: the
    worker's rounds at which its course began, and ends. It has `base` tokens from before its course."""

    __slots__ = (
        "base",
        "course",
        "end",
        "first_s",
        "key",
        "known",
        "left",
        "prefix",
        "prefix_tokens",
        "queued_s",
        "reused",
        "sent_id",
        "started_s",
        "told",
        "unread",
        "zero",
    )

    def __init__(self, key: str, submit: Submit, output: tuple[int, int, str, int], now_s: float) -> None:
        self.key = key
        tokens, self.course, self.prefix, self.prefix_tokens = output
        self.sent_id = submit.request_id
        self.base = self.told = len(submit.committed)
        self.known = self.unread = len(submit.prompt) + self.base
        self.left = max(1, tokens - self.base)
        self.queued_s = now_s
        self.started_s = self.first_s = -1.0
        self.zero = self.end = self.reused = 0

    def say(self, until: int, bits: int) -> list[int]:
        """Return the tokens of its output that were not said yet, up to so many of them."""
        first, self.told = bits + self.told, until
        return list(range(first, bits + until))


def name_bits(group: str) -> int:
    """Return the first token of every output of a group of equal bits; each token is one more than that before it. So a
    token says its place, and who computed it."""
    return crc32(group.encode()) << 32


def sum_up(one: SimulatedSequence, now_s: float) -> RequestStats:
    """Return what its worker says of a sequence now."""
    first_s = one.first_s if one.first_s >= 0.0 else now_s
    return RequestStats(
        *(one.known, one.base + one.left, 0, 0, 0),
        queue_ms=(one.started_s - one.queued_s) * MS_PER_S,
        prefill_ms=(first_s - one.started_s) * MS_PER_S,
        reused=one.reused,
    )
