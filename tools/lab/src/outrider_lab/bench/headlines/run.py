"""Runs the parts of `outrider bench headlines` one after the other, and sets what they give beside the claims."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adapters.contract import AdapterError
from device_profiles.units import MILLION, MS_PER_S, S_PER_HOUR
from outrider_lab.bench.headlines.claims import CLAIMS, Finding, set_beside
from outrider_lab.bench.headlines.parts import (
    FOUR_BIT,
    Size,
    measure_cluster,
    measure_four_bit,
    measure_grammars,
    measure_one_device,
    measure_overlapped,
    measure_slow_link,
    plan_costs,
)
from outrider_lab.bench.overlap.measure import OverlapPair
from outrider_lab.bench.overlap.run import deepen_pair
from orchestrator.errors import OutriderError
from orchestrator.loading.options import EngineOptions

_STANDS_FOR = (
    "the target is deepened from its draft, for a larger model: the draft is right wherever rounding lets it be"
)
_SEPARATE = "draft and target on a core each, beside the target alone on both"
_RUN = "outrider bench headlines"

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class HeadlinesJob:
    """What is measured. `draft`: a GGUF source, of which a deeper target is made in `store`. `options`: of the
    configured target, for structured output. `cores`: those that may be used."""

    options: EngineOptions
    draft: str
    adapter: str
    store: Path
    cores: list[int]
    size: Size


def measure_headlines(
    job: HeadlinesJob, tell: Callable[[str], object], note: Callable[[str], object] = lambda line: None
) -> dict[str, Any]:
    """Return `summary` (an object for each claim), `identical`, and `parts` with their figures and seconds. A part that
    cannot be measured here takes its claims with it, and says why. `tell` hears what begins, `note` what is done."""
    with ExitStack() as stack:
        parts = _Parts(tell, note)
        pair: OverlapPair | None = None
        try:
            tell("a deeper target is made")
            pair = stack.enter_context(deepen_pair(job.draft, job.size.layers, job.adapter, job.store, job.cores))
        except (AdapterError, OutriderError) as error:
            parts.failed = dict.fromkeys(("overlap", "overlap_4bit", "one_device", "wan"), str(error))
        if pair is not None:
            _measure_pair(parts, pair, job.size)
        parts.try_part("structured", lambda: measure_grammars(job.options, job.size, tell))
        parts.try_part("plan", plan_costs)
        if job.size.hosts:
            parts.try_part("cluster", lambda: measure_cluster(job.store, job.size, job.cores, tell))
        else:
            parts.failed["cluster"] = "left out by --quick: `outrider bench cluster` makes hosts, as root"
    found = list_findings(parts.rows, parts.failed, job.size.layers)
    return {
        "summary": set_beside(CLAIMS, found),
        "identical": all(row.get("identical", True) for row in parts.rows.values()),
        "took_s": sum(parts.took_s.values()),
        "parts": {name: {"took_s": parts.took_s[name], **row} for name, row in parts.rows.items()},
        "failed": parts.failed,
    }


class _Parts:
    """The rows of the parts, what each took, and why others have none."""

    def __init__(self, tell: Callable[[str], object], note: Callable[[str], object]) -> None:
        self.rows: dict[str, Row] = {}
        self.failed: dict[str, str] = {}
        self.took_s: dict[str, float] = {}
        self._tell, self._note = tell, note

    def try_part(self, name: str, measure: Callable[[], Row]) -> None:
        """Measure a part; where it cannot be, note why."""
        self._tell(name.replace("_", " "))
        started_s = time.perf_counter()
        try:
            self.rows[name] = measure()
        except (AdapterError, OutriderError) as error:
            self.failed[name] = str(error)
        self.took_s[name] = time.perf_counter() - started_s
        self._note(f"{name.replace('_', ' ')}: {self.failed.get(name) or 'measured'} ({self.took_s[name]:.0f} s)")


def _measure_pair(parts: _Parts, pair: OverlapPair, size: Size) -> None:
    if pair.draft_cores:
        parts.try_part("overlap", lambda: measure_overlapped(pair, size))
        if (as_it_is := parts.rows.get("overlap")) is not None:
            parts.try_part("overlap_4bit", lambda: measure_four_bit(pair, size, as_it_is))
        else:
            parts.failed["overlap_4bit"] = parts.failed["overlap"]
        parts.try_part("wan", lambda: measure_slow_link(pair, size))
    else:
        alone = "target and draft need a core each, and there is one"
        parts.failed |= dict.fromkeys(("overlap", "overlap_4bit", "wan"), alone)
    parts.try_part("one_device", lambda: measure_one_device(pair, size, FOUR_BIT))


def list_findings(rows: Mapping[str, Row], failed: Mapping[str, str], layers: int) -> dict[str, Finding]:
    """Return what was found for each claim, by its name."""
    overlap = f"outrider bench overlap --layers {layers}"
    wan, hosts = f"outrider bench wan --layers {layers}", "outrider bench cluster --cores 0 --cores 1 --concurrency 12"
    describe: dict[str, tuple[str, str, Callable[[Row], Finding]]] = {
        "latency, draft as it is": ("overlap", overlap, _find_latency),
        "latency, 4-bit draft": ("overlap_4bit", f"{_RUN} (its draft with weights: {FOUR_BIT})", _find_latency),
        "p90 latency": ("one_device", _RUN, _find_p90),
        "acceptance": ("overlap_4bit", _RUN, _find_acceptance),
        "one device": ("one_device", _RUN, _find_one_device),
        "structured output": ("structured", _RUN, _find_structured),
        "slow link": ("wan", wan, _find_slow_link),
        "cost": ("overlap", overlap, lambda row: _find_cost(row, rows.get("plan"))),
        "cluster": ("cluster", hosts, _find_cluster),
    }
    return {
        claim: _with_command(find(rows[part]), command)
        if part in rows
        else Finding(command, why=failed.get(part, "it was not measured"))
        for claim, (part, command, find) in describe.items()
    }


def _with_command(found: Finding, command: str) -> Finding:
    return Finding(command, found.value, found.figures, found.note, found.why)


def _find_latency(row: Row) -> Finding:
    figures = f"{row['plain_ms']:.1f} -> {row['spec_ms']:.1f} ms, acceptance {row['acceptance_rate']:.2f}"
    return Finding("", 1.0 - row["spec_ms"] / row["plain_ms"], figures, f"{_SEPARATE}; {_STANDS_FOR}")


def _find_p90(row: Row) -> Finding:
    plain_ms, spec_ms = row["plain_p90_ms"], row["spec_p90_ms"]
    note = f"over requests, draft of 4-bit weights in the target's process; {_STANDS_FOR}"
    return Finding("", 1.0 - spec_ms / plain_ms, f"{plain_ms:.1f} -> {spec_ms:.1f} ms", note)


def _find_acceptance(row: Row) -> Finding:
    note = f"of the 4-bit draft, whose weights are not the target's; {_STANDS_FOR}"
    return Finding("", row["acceptance_rate"], f"of {row['drafted']} tokens", note)


def _find_one_device(row: Row) -> Finding:
    figures = (
        f"TPOT {row['plain_tpot_ms']:.1f} -> {row['spec_tpot_ms']:.1f} ms, acceptance {row['acceptance_rate']:.2f}"
    )
    note = f"draft of 4-bit weights in the target's process, both on all cores; {_STANDS_FOR}"
    return Finding("", row["tpot_speed_up"], figures, note)


def _find_structured(row: Row) -> Finding:
    figures = f"{row['plain_tokens_per_s']:.1f} -> {row['spec_tokens_per_s']:.1f} tokens/s, {row['requests']} requests"
    return Finding("", row["speed_up"], figures, "the configured target and drafts; both ways under the same grammars")


def _find_slow_link(row: Row) -> Finding:
    figures = f"{row['plain_ms']:.1f} -> {row['spec_ms']:.1f} ms a token, {row['measured_rtt_ms']:.1f} ms round trip"
    note = f"whole answers, seen from the edge, where the draft is; {_STANDS_FOR}"
    return Finding("", 1.0 - row["spec_ms"] / row["plain_ms"], figures, note)


def _find_cost(row: Row, planned: Row | None) -> Finding:
    note = f"at the machine's one price a token costs what its time costs; {_SEPARATE}; {_STANDS_FOR}"
    if planned is not None:
        note += f"; the cheapest plan for a made-up fleet costs {planned['saved']:.0%} less with drafts (datasheets)"
    hours = (f"{row[name] / MS_PER_S * MILLION / S_PER_HOUR:.1f}" for name in ("plain_ms", "spec_ms"))
    return Finding("", 1.0 - row["spec_ms"] / row["plain_ms"], f"{' -> '.join(hours)} hours a million tokens", note)


def _find_cluster(row: Row) -> Finding:
    figures = f"{row['single']:.0f} -> {row['together']:.0f} tokens/s, 12 requests at once"
    return Finding(
        "", row["ratio"], figures, "two hosts of this machine, network namespaces with Ray; simulated devices"
    )
