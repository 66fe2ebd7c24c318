"""What a draft is worth, by the same prompts through the real loop.

They run without drafts, with suffix, with suffix and the draft behind it, and with the draft alone, in turn, in one
process.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from adapters import registry
from adapters.contract import LoadOptions, Segment
from adapters.model_source import resolve
from adapters.model_store import ModelStore
from device_profiles.profile import Exactness
from device_profiles.units import MS_PER_S
from orchestrator.protocol.commands import Submit
from orchestrator.recommend.record import ModeRun, Prompt, Record, measure_decoding, tpot_ms
from orchestrator.recommend.run import Way, close_drafters, decode_in_turns
from orchestrator.worker.loading.engine import build_loop
from orchestrator.worker.loading.models import LoadedSource

PLAIN, SUFFIX, BOTH, ALONE = "plain", "suffix", "suffix + draft", "draft"
FORMULAS = {
    "tpot_ms": "sum(latency - TTFT) / sum(n - 1) over all requests with n > 1 tokens",
    "acceptance_rate": "accepted / drafted tokens",
    "mean_acceptance_length": "1 + accepted / verification steps",
    "draft_over_suffix": "TPOT of suffix / TPOT of suffix + draft",
    "over_plain": "TPOT of plain / TPOT of the mode",
}
_STEP_CONTEXT, _STEPS = 200, 200


def compare(
    target: LoadedSource,
    ways: Sequence[Way],
    prompts: Sequence[Prompt],
    max_tokens: int,
    depth: int | None,
    tell: Callable[[int], None],
) -> dict[str, Any]:
    """Decode every prompt in every way, one request at a time and in a changing order, and return the figures.

    `depth`: None drafts as a server does, so not where a draft does not pay.
    """
    submits = [
        Submit(f"{number}-{prompt.key}", prompt.tokens, max_tokens, stop_tokens=prompt.stop_tokens, depth=depth)
        for number, prompt in enumerate(prompts)
    ]
    for way in ways:
        measure_decoding(build_loop(target, way.options, way.drafter), submits[:1], ModeRun("spec"))
    runs = decode_in_turns(target, ways, submits, tell)
    close_drafters(ways)
    return _result(runs, prompts)


def _result(runs: Mapping[str, ModeRun], prompts: Sequence[Prompt]) -> dict[str, Any]:
    by_way = {name: list(run.records.values()) for name, run in runs.items()}
    tokens = [[record.tokens for record in records] for records in by_way.values()]
    categories = sorted({prompt.category for prompt in prompts})
    rows = []
    for category in [*categories, "all"]:
        chosen = [index for index, prompt in enumerate(prompts) if category in (prompt.category, "all")]
        rows.append(
            {
                "category": category,
                "prompts": len(chosen),
                **_figures({name: [records[index] for index in chosen] for name, records in by_way.items()}),
            }
        )
    return {"identical": all(one == tokens[0] for one in tokens), "rows": rows, "formulas": FORMULAS}


def _figures(by_way: Mapping[str, Sequence[Record]]) -> dict[str, Any]:
    found = {name: _of_way(records) for name, records in by_way.items()}
    suffix, both = found[SUFFIX]["tpot_ms"], found[BOTH]["tpot_ms"]
    for figures in found.values():
        figures["over_plain"] = _ratio(found[PLAIN]["tpot_ms"], figures["tpot_ms"])
    return {"ways": found, "draft_over_suffix": _ratio(suffix, both)}


def _of_way(records: Sequence[Record]) -> dict[str, float]:
    stats = [record.stats for record in records if record.stats]
    drafted, accepted = sum(one.drafted for one in stats), sum(one.accepted for one in stats)
    return {
        "tpot_ms": tpot_ms(records),
        "drafted": drafted,
        "accepted": accepted,
        "acceptance_rate": _ratio(accepted, drafted),
        "mean_acceptance_length": 1.0 + _ratio(accepted, sum(one.steps for one in stats)),
    }


def _ratio(upper: float, lower: float) -> float:
    return upper / lower if lower else 0.0


def step_ms(draft: Path, adapter: str, store: Path, vocabulary: int) -> float:
    """Return the median time of one drafted token: a forward of one row behind some context. Raises as adapters do."""
    runtime = registry.get(adapter)
    prepared = ModelStore(store).prepare(resolve(str(draft), Path.cwd()), runtime, _silent)
    model = runtime.load(prepared, LoadOptions(exactness=Exactness.KERNEL, kv_cache_bytes=32 << 20, slots=1), _silent)
    tokens = [int(token) for token in np.random.default_rng(0).integers(0, vocabulary, _STEP_CONTEXT + _STEPS)]
    model.forward([Segment(0, 0, tokens[:_STEP_CONTEXT], (0, 0))])
    taken = []
    for place in range(_STEP_CONTEXT, len(tokens)):
        started = time.perf_counter()
        model.forward([Segment(0, place, tokens[place : place + 1], (0, 1))])
        taken.append((time.perf_counter() - started) * MS_PER_S)
    model.close()
    return statistics.median(taken)


def _silent(_stage: str, _fraction: float) -> None:
    """Progress that nobody watches."""
