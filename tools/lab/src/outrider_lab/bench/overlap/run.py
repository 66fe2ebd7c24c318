"""The pairs of `outrider bench overlap`: a grid of simulated ones, and one of real models."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from adapters.contract import AdapterError
from adapters.model_source import resolve
from orchestrator.worker.measuring.prompts import OWN_PROMPTS, PromptText
from outrider_lab.bench.errors import BenchError
from outrider_lab.bench.overlap.measure import OverlapPair, measure_pair
from outrider_lab.gguf_layers import count_layers, spread_layers, write_layers

TARGET_MS = 24.0
_ROW_MS = 0.1
_DRAFT_ROW_MS = 0.02
_DRAFT_WAIT_MS = 400.0

FORMULAS = {
    "tokens_per_s": "1000 / TPOT, after the first token; the three ways of drafting take turns, prompt by prompt",
    "pass_ms": "time of a draft token that a round waits for, the way there and back included",
    "hidden_share": "1 - time that rounds waited for drafts / (verified draft tokens x pass_ms), overlapped",
    "hidden_share_simulated": "the same over all simulated pairs together",
    "ready_share": "sequences whose draft was there before it was asked for / all that were asked for",
    "vs_plain": "overlapped / plain tokens/s",
    "vs_sequential": "overlapped / sequential tokens/s; of the summary: the smallest of all pairs",
    "worst_vs_plain": "the smallest vs_plain of all pairs",
    "plain_all_cores": "the target alone on its cores and the draft's: what the machine does without a draft",
}
BARS = {
    "hidden_share": 0.8,
    "hidden_share_simulated": 0.95,
    "worst_vs_plain": 0.97,
    "vs_sequential": 0.97,
    "vs_plain_all_cores": 2.0,
}


def simulate_pairs(agreements: Sequence[float], ratios: Sequence[float]) -> list[OverlapPair]:
    """Return simulated pairs: whose draft's first choice is the target's with such a chance, and whose draft takes one
    of so many parts of the target's time."""
    return [
        OverlapPair(
            {"source": f"simulated:toy?base_ms={TARGET_MS:g}&row_ms={_ROW_MS:g}", "adapter": "simulated"},
            {
                "source": f"simulated:toy?base_ms={TARGET_MS / ratio:g}&row_ms={_DRAFT_ROW_MS:g}&agree={agree:g}",
                "adapter": "simulated",
            },
            stated=(("pair", "simulated"), ("agree", agree), ("cost_ratio", ratio)),
        )
        for agree in agreements
        for ratio in ratios
    ]


@contextmanager
def deepen_pair(source: str, layers: int, adapter: str, directory: Path, cores: Sequence[int]) -> Iterator[OverlapPair]:
    """Yield a model, deepened to so many layers, with itself as its draft, each on one half of the cores. Raises
    BenchError."""
    path = directory / f"deepened-{layers}.gguf"
    try:
        small = resolve(source, Path()).path
        there = count_layers(small)
        if layers < there:
            raise BenchError(f"--layers {layers}: {source} has {there} layers; a deeper model has more")
        if not path.exists():
            write_layers(path, small, spread_layers(there, layers))
    except (AdapterError, OSError, ValueError) as error:
        raise BenchError(f"--draft {source}: {error}") from error
    half = len(cores) // 2
    yield OverlapPair(
        {"source": str(path), "adapter": adapter},
        {"source": source, "adapter": adapter, "max_wait_ms": _DRAFT_WAIT_MS},
        tuple(cores[: len(cores) - half]),
        tuple(cores[len(cores) - half :]),
        stated=(("pair", "deepened"), ("layers", layers), ("source", source)),
    )


def measure_overlap(
    pairs: Sequence[OverlapPair],
    max_tokens: int,
    tell: Callable[[str], object],
    texts: Sequence[PromptText] = OWN_PROMPTS,
) -> dict[str, Any]:
    """Return `summary`, `rows`, `formulas` and `bars`; `tell` hears of each pair. Raises BenchError, AdapterError."""
    rows = []
    for number, pair in enumerate(pairs, start=1):
        tell(f"{number} of {len(pairs)}: {', '.join(f'{name} {value}' for name, value in pair.stated)}")
        rows.append(measure_pair(pair, texts, max_tokens))
    return {"summary": summarise_overlap(rows), "rows": rows, "formulas": FORMULAS, "bars": BARS}


def summarise_overlap(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures over all pairs; None where nothing was measured for one."""
    real = [row for row in rows if row["pair"] != "simulated"]
    simulated = [row for row in rows if row["pair"] == "simulated"]
    whole = [row["overlapped_tokens_per_s"] / row["plain_all_cores_tokens_per_s"] for row in real]
    return {
        "pairs": len(rows),
        "hidden_share": _find_hidden_share(real),
        "hidden_share_simulated": _find_hidden_share(simulated),
        "worst_vs_plain": min(row["vs_plain"] for row in rows),
        "vs_sequential": min(row["vs_sequential"] for row in rows),
        "best_vs_sequential": max(row["vs_sequential"] for row in rows),
        "vs_plain_all_cores": min(whole, default=None),
        "identical": all(row["identical"] for row in rows),
    }


def _find_hidden_share(rows: Sequence[dict[str, Any]]) -> float | None:
    used_ms = sum(row["drafted"] * row["pass_ms"] for row in rows)
    return 1.0 - sum(row["wait_ms"] for row in rows) / used_ms if used_ms else None
