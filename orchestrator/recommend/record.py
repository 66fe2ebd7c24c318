"""What is recorded of each request that is decoded in this process."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from device_profiles.units import MS_PER_S
from orchestrator.errors import OutriderError
from orchestrator.protocol.commands import Submit
from orchestrator.protocol.rounds import RequestStats, RoundReport
from orchestrator.worker.engine.loop import DecodeLoop

Mode = Literal["plain", "spec", "control"]
"""`control` is plain once more: what its figures differ by from plain's is the machine's, not the drafts'."""


@dataclass(frozen=True, slots=True)
class Prompt:
    key: str
    category: str
    tokens: list[int]
    stop_tokens: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Record:
    """One request. Times are seconds from its submission."""

    tokens: list[int] = field(default_factory=list)
    first_s: float = 0.0
    last_s: float = 0.0
    stats: RequestStats | None = None


@dataclass(slots=True)
class ModeRun:
    """One mode over all prompts. Round times are milliseconds, of rounds that only decode."""

    mode: Mode
    records: dict[str, Record] = field(default_factory=dict)
    wall_s: float = 0.0
    round_ms: float = 0.0
    device_ms: float = 0.0
    rounds: int = 0

    def note_round(self, done: RoundReport, decoding: bool) -> None:
        """Count a round; those with a prefill in them only as a number."""
        self.rounds += 1
        if decoding:
            self.round_ms += done.round_ms
            self.device_ms += done.device_ms


def measure_decoding(loop: DecodeLoop, submits: Sequence[Submit], outcome: ModeRun) -> None:
    """Decode the requests to their ends, noting when each token came. Raises OutriderError for a refused one."""
    started = time.perf_counter()
    for submit in submits:
        refused = loop.submit(submit)
        if refused is not None:
            raise OutriderError(f"request {submit.request_id}: {refused.message}")
        outcome.records[submit.request_id] = Record()
    while not loop.idle:
        done = loop.run_round_strictly()
        now_s = time.perf_counter() - started
        # A round without a prefill has a token for each of its sequences, and none of them is a first one.
        decoding = len(done.deltas) == done.sequences
        for delta in done.deltas:
            record = outcome.records[delta.request_id]
            decoding = decoding and bool(record.tokens)
            record.first_s = record.first_s or now_s
            record.last_s = now_s
            record.tokens.extend(delta.tokens)
            record.stats = delta.stats
        outcome.note_round(done, decoding)
    outcome.wall_s += time.perf_counter() - started


def tpot_ms(records: Iterable[Record]) -> float:
    several = [record for record in records if len(record.tokens) > 1]
    steps = sum(len(record.tokens) - 1 for record in several)
    return sum(record.last_s - record.first_s for record in several) * MS_PER_S / steps if steps else 0.0
