"""The figures of `outrider bench decode`, made of what was recorded of each request."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from device_profiles.units import MS_PER_S
from orchestrator.recommend.record import ModeRun, Prompt, Record, tpot_ms

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


def list_rows(run: ModeRun, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """Return the mode's figures for each prompt, for the JSON output."""
    return {
        "mode": run.mode,
        "wall_s": run.wall_s,
        "rounds": run.rounds,
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
            for prompt, record in zip(prompts, run.records.values(), strict=True)
        ],
    }


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
