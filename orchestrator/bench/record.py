"""What `outrider bench decode` records of each request, and the figures made of it."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from device_profiles.units import MS_PER_S
from orchestrator.engine.loop import DecodeLoop
from orchestrator.errors import OutriderError
from orchestrator.workers.messages import RequestStats, RoundReport, Submit

Mode = Literal["plain", "spec", "control"]
"""`control` is plain once more: what its figures differ by from plain's is the machine's, not the drafts'."""

FORMULAS = {
    "ttft_ms": "time from submission to the first token",
    "tpot_ms": "sum(latency - TTFT) / sum(n - 1) over all requests with n > 1 tokens",
    "tok_s": "generated tokens / wall time of the mode, prefill included",
    "acceptance_rate": "accepted / drafted tokens",
    "mean_acceptance_length": "1 + accepted / verification steps (counts the recovered or bonus token)",
    "speed_up": "spec tok/s / plain tok/s",
    "tpot_speed_up": "plain TPOT / spec TPOT",
    "worst_category_vs_plain": "plain TPOT / spec TPOT of the category where that is least",
    "control_ratio": "plain TPOT / TPOT of a second plain run, taken in turn with the others",
    "overhead_share": "1 - sum(the runtime's forward time) / sum(round time), speculative decode rounds",
}


@dataclass(frozen=True, slots=True)
class Prompt:
    """An encoded prompt."""

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

    def rows(self, prompts: Sequence[Prompt]) -> dict[str, Any]:
        """Return the mode's figures for each prompt, for the JSON output."""
        return {
            "mode": self.mode,
            "wall_s": self.wall_s,
            "rounds": self.rounds,
            "requests": [
                {
                    "key": prompt.key,
                    "category": prompt.category,
                    "prompt_tokens": len(prompt.tokens),
                    "generated": len(record.tokens),
                    "ttft_ms": record.first_s * MS_PER_S,
                    "latency_ms": record.last_s * MS_PER_S,
                    "drafted": record.stats.drafted if record.stats else 0,
                    "accepted": record.stats.accepted if record.stats else 0,
                    "steps": record.stats.steps if record.stats else 0,
                }
                for prompt, record in zip(prompts, self.records.values(), strict=True)
            ],
        }


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


def control_ratio(plain: ModeRun, control: ModeRun) -> float:
    """Return by how much two plain runs differ: FORMULAS says how."""
    return _ratio(tpot_ms(plain.records.values()), tpot_ms(control.records.values()))


def _ratio(upper: float, lower: float) -> float:
    return upper / lower if lower else 0.0


def figures(plain: Sequence[Record], spec: Sequence[Record]) -> dict[str, float]:
    """Return the figures of a set of prompts that do not need wall time."""
    stats = [record.stats for record in spec if record.stats]
    drafted, accepted = sum(s.drafted for s in stats), sum(s.accepted for s in stats)
    plain_tpot_ms, spec_tpot_ms = tpot_ms(plain), tpot_ms(spec)
    return {
        "prompts": len(plain),
        "plain_ttft_ms": _ratio(sum(r.first_s for r in plain) * MS_PER_S, len(plain)),
        "spec_ttft_ms": _ratio(sum(r.first_s for r in spec) * MS_PER_S, len(spec)),
        "plain_tpot_ms": plain_tpot_ms,
        "spec_tpot_ms": spec_tpot_ms,
        "tpot_speed_up": _ratio(plain_tpot_ms, spec_tpot_ms),
        "acceptance_rate": _ratio(accepted, drafted),
        "mean_acceptance_length": 1.0 + _ratio(accepted, sum(s.steps for s in stats)),
    }


def summarise_modes(plain: ModeRun, spec: ModeRun, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """Return `summary`: the named figures over all prompts, and the same per category."""
    pairs = list(zip(prompts, plain.records.values(), spec.records.values(), strict=True))
    mismatches = [prompt.key for prompt, a, b in pairs if a.tokens != b.tokens]
    by_category: dict[str, list[tuple[Record, Record]]] = defaultdict(list)
    for prompt, a, b in pairs:
        by_category[prompt.category].append((a, b))
    plain_tok_s = _ratio(sum(len(r.tokens) for r in plain.records.values()), plain.wall_s)
    spec_tok_s = _ratio(sum(len(r.tokens) for r in spec.records.values()), spec.wall_s)
    categories = {
        name: figures([a for a, _ in found], [b for _, b in found]) for name, found in sorted(by_category.items())
    }
    return {
        "identical": not mismatches,
        "mismatches": len(mismatches),
        "mismatched_prompts": mismatches,
        **figures(list(plain.records.values()), list(spec.records.values())),
        "plain_tok_s": plain_tok_s,
        "spec_tok_s": spec_tok_s,
        "speed_up": _ratio(spec_tok_s, plain_tok_s),
        "overhead_share": 1.0 - _ratio(spec.device_ms, spec.round_ms),
        "plain_overhead_share": 1.0 - _ratio(plain.device_ms, plain.round_ms),
        "worst_category_vs_plain": min((one["tpot_speed_up"] for one in categories.values()), default=0.0),
        "categories": categories,
    }
