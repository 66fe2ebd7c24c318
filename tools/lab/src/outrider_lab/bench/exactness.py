"""`outrider bench exactness`: the numerical class of a model on this machine, and whether its promise holds."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from adapters.contract import AdapterError, Segment
from orchestrator.plain_table import print_table
from orchestrator.protocol.load_options import EngineOptions
from orchestrator.worker.loading.drafters import build_drafter
from orchestrator.worker.loading.models import LoadedSource
from orchestrator.worker.measuring.prompts import OWN_PROMPTS, PromptText, read_texts, spread
from orchestrator.worker.measuring.steps import follow_on
from outrider_lab.bench.decode import load_target_with_status, measure_modes
from outrider_lab.bench.errors import BenchError
from policies.sampling import Sampling

_SAMPLINGS = {"greedy": Sampling(), "seeded": Sampling(temperature=0.8, top_p=0.95, seed=1000)}
CONCURRENCIES = (1, 8)
_ROWS = (1, 2, 5, 8, 16)
_TURNS = 7
_HELD = 64
FAST = "fast"


def measure_exactness(
    options: EngineOptions, prompts: Path | None, limit: int, max_tokens: int, quality_limit: int
) -> dict[str, Any]:
    """Return the figures of `outrider bench exactness`. Raises BenchError, and what adapters raise."""
    texts = OWN_PROMPTS if prompts is None else read_texts(prompts)
    texts = spread(texts, min(limit, len(texts)) or len(texts))
    summary: dict[str, Any] = {}
    summary |= _class_figures(options)
    summary |= _identity(options, texts, max_tokens)
    summary |= _quality(options, texts, quality_limit)
    summary["step_vs_fast"] = _step_vs_fast(options)
    return summary


def _class_figures(options: EngineOptions) -> dict[str, Any]:
    """Return the class as it is found anew, and every candidate."""
    from adapters.hardware import processor
    from orchestrator.worker.loading.class_words import cost_ratio

    target = load_target_with_status(options, refresh=True)
    target.model.close()
    found, hardware = target.classes, processor()
    if found is None or found.finding is None:
        raise BenchError("no numerical class was measured")
    return {
        "processor": hardware.name,
        "flags": list(hardware.isa),
        "adapter": found.adapter,
        "device": found.device,
        "threads": found.threads,
        "weights": target.model.capabilities.weights,
        "class": str(found.finding.numerical_class),
        "class_fingerprint": found.finding.fingerprint,
        "candidates": [_candidate(one) for one in found.findings],
        "row_invariant": target.row_invariant,
        "class_vs_fastest": cost_ratio(found),
        "took_s": found.took_s,
    }


def _candidate(one: Any) -> dict[str, Any]:
    return {
        "class": str(one.numerical_class),
        "passed": one.passed,
        "why": one.why,
        "class_fingerprint": one.fingerprint,
        "decode_ms": {str(rows): ms for rows, ms in one.decode_ms},
        "prefill_ms": one.prefill_ms,
        "prefill_tokens": one.prefill_tokens,
        "agreement": one.agreement,
        "load_s": one.load_s,
    }


def _identity(options: EngineOptions, texts: Sequence[PromptText], max_tokens: int) -> dict[str, Any]:
    """Return how many outputs differ with speculation, greedy and seeded, alone and in company."""
    from orchestrator.recommend.run import encode_prompts

    target = load_target_with_status(options)
    try:
        prompts, cases, wrong = encode_prompts(texts, target), [], 0
        for number, (name, sampling) in enumerate(_SAMPLINGS.items()):
            for concurrency in CONCURRENCIES:
                drafter = build_drafter(options, target)
                done = measure_modes(
                    target, options, drafter, prompts, max_tokens, concurrency, sampling, None, warm=number == 0
                )["summary"]
                if drafter is not None:
                    drafter.close()
                wrong += done["mismatches"]
                kept = {key: done[key] for key in ("mismatches", "mismatched_prompts", "speed_up")}
                cases.append({"sampling": name, "concurrency": concurrency, **kept})
        return {"mismatches": wrong, "compared": len(cases) * len(prompts), "cases": cases}
    finally:
        target.model.close()


def _quality(options: EngineOptions, texts: Sequence[PromptText], limit: int) -> dict[str, Any]:
    from adapters.contract import silent
    from orchestrator.cli.options import show_progress
    from orchestrator.worker.loading.prepared import load_own_tokenizer
    from orchestrator.worker.measuring.quality import measure_quality

    if not limit or options.model.source.startswith("simulated:"):
        return {"perplexity_ratio": None, "agreement": None}
    tokenizer = load_own_tokenizer(options.model, silent)
    chosen = [
        tokenizer.encode_chat([{"role": "user", "content": text.text}])
        for text in spread(texts, min(limit, len(texts)))
    ]
    found = show_progress(lambda progress: measure_quality(options, chosen, progress))
    return {"perplexity_ratio": found["perplexity_ratio"], "agreement": found["greedy_agreement"]}


def _step_vs_fast(options: EngineOptions) -> float | None:
    """Return how a decoding forward compares with one with `weights: fast`: the mean ratio over 1, 2, 5, 8 and 16 rows,
    taken in turn. None where there are no other weights to compare with."""
    if options.model.weights not in ("auto", "as_file"):
        return None
    targets: list[LoadedSource] = []
    try:
        for weights in (options.model.weights, FAST):
            targets.append(load_target_with_status(options.with_model(weights=weights)))
        if targets[0].prepared == targets[1].prepared:
            return None
        return statistics.mean(_ratio_at(rows, *targets) for rows in _ROWS)
    except AdapterError:
        return None
    finally:
        for target in targets:
            target.model.close()


def _ratio_at(rows: int, left: LoadedSource, right: LoadedSource) -> float:
    times: dict[int, list[float]] = {0: [], 1: []}
    for number in range(2 * _TURNS):
        side = number % 2
        times[side].append(_step_ms((left, right)[side], rows))
    return statistics.median(times[0]) / statistics.median(times[1])


def _step_ms(target: LoadedSource, rows: int) -> float:
    """Return the second of two forwards of so many rows: the first prepares the shape."""
    model = target.model
    tokens = [place % 50 for place in range(_HELD + rows)]
    apart = model.capabilities.apart_tokens > 0
    if model.count_cached_positions(0) < _HELD:
        model.forward([Segment(0, 0, tokens[:_HELD], (0, 0))])
    part = Segment(0, _HELD, tokens[_HELD:], (0, rows), apart=apart)
    model.forward(follow_on(model, [part]))
    return model.forward(follow_on(model, [part])).device_ms


def print_exactness(summary: dict[str, Any]) -> None:
    rows = []
    for name in ("processor", "flags", "adapter", "weights", "class", "class_fingerprint", "row_invariant"):
        value = summary[name]
        rows.append((name, ", ".join(value) if isinstance(value, list) else str(value)))
    for one in summary["candidates"]:
        times = ", ".join(f"{count}: {ms:.1f}" for count, ms in one["decode_ms"].items())
        costs = f"; ms by rows {times}; prefill of {one['prefill_tokens']} {one['prefill_ms']:.0f} ms" if times else ""
        rows.append(("passed" if one["passed"] else "rejected", f"{one['class']}: {one['why']}{costs}"))
    rows.append(("mismatches", f"{summary['mismatches']} of {summary['compared']} outputs"))
    for name in ("class_vs_fastest", "perplexity_ratio", "agreement", "step_vs_fast"):
        value = summary[name]
        rows.append((name, "not measured" if value is None else f"{value:.3f}"))
    print_table((), rows, title="exactness")
