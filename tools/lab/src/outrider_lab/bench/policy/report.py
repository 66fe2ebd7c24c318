"""The whole result: what was run beside what is replayed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import Progress

from outrider_lab.bench.policy.figures import (
    BARS,
    FORMULAS,
    Mixes,
    cell_rows,
    control_ratios,
    load_rows,
    mix_rows,
    policy_us,
    sample_rows,
    summary_of,
)
from outrider_lab.bench.policy.real import Real
from outrider_lab.bench.policy.replays import cells, mixes
from outrider_lab.simulation.recording import Recording


def build_report(recording: Recording, real: Real | None) -> dict[str, Any]:
    """Replay everything; return `summary`, `bars`, `formulas` and what they are made of."""
    kinds, loads = len(recording.kinds), len(recording.concurrencies)
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("replaying", total=kinds * (2 * loads + 1))

        def advance_bar() -> None:
            bar.advance(task)

        replayed = cells(recording, advance_bar)
        mixed = mixes(recording, advance_bar)
    found = real.found if real is not None else None
    rows = cell_rows(found, replayed) if found is not None else []
    return {
        "summary": summary_of(rows, replayed, mixed, found),
        "bars": BARS,
        "formulas": FORMULAS,
        "scope": _scope(recording, real),
        "cells": rows,
        "control": control_ratios(found) if found is not None else [],
        "sample": sample_rows(found) if found is not None else [],
        "mismatches": found.mismatches if found is not None else [],
        "policy_sequences": policy_us(found)[1] if found is not None else 0,
        "replay": _replay_value(replayed, mixed),
        "environment": recording.environment,
    }


def _scope(recording: Recording, real: Real | None) -> list[str]:
    """Say what was really run, and what is replayed."""
    drafts = "good drafts (suffix), bad ones (random tokens) and ones that turn every 50 tokens"
    replayed = "all fixed depths, hindsight and adaptive over the mix, at every load"
    if real is None:
        return [f"replayed alone: {replayed}; {drafts}"]
    plan = real.plan
    uncounted = ", ".join(f"{cell.category} at {cell.concurrency}" for cell in real.found.uncounted)
    return [
        f"really run: plain and adaptive, {len(plan.categories)} categories x "
        f"{', '.join(map(str, plan.concurrencies))} at once x {drafts}, {plan.tokens} tokens a request; "
        f"every policy over the mix at {', '.join(map(str, plan.sampled))} at once; "
        f"{real.found.compared} outputs compared with plain decoding's",
        f"replayed, on what was recorded of these runs: {replayed}",
        *([f"nothing counts of {uncounted}: some prompt is being read in every round"] if uncounted else []),
    ]


def _replay_value(replayed: Mapping[tuple[str, int, str], float], mixed: Mixes) -> dict[str, Any]:
    return {
        "worst_vs_plain": min(replayed.values()),
        "cells": [
            {"category": category, "concurrency": concurrency, "drafter": kind, "ratio": ratio}
            for (category, concurrency, kind), ratio in replayed.items()
        ],
        "mix": mix_rows(mixed),
        "loads": load_rows(mixed),
    }
