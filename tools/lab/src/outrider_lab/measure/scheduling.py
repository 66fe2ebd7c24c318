"""What the scheduler promises, measured on the real model: remembered prefixes, and prefill beside running streams.

    python -m outrider_lab.measure.scheduling --prompts FILE [--pairs N] [--streams N] [--resumed N] [--json OUT]

Prefixes: pairs of requests share their first 512 tokens; the second one's time to first token against the first's.
Fairness: while some streams decode, a prompt of 4,000 tokens comes; the longest time between two rounds of the
streams against `limits.max_itl_ms`.
Resumption: while some streams decode, others come with a history of 1,000 tokens, as from a worker that died; the
streams' ITL before, during and after, and the time until the last of the others has its next token.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from adapters.hardware import processor
from orchestrator.config.load import load_config
from orchestrator.loading.drafters import build_drafter
from orchestrator.loading.engine import build_loop
from orchestrator.loading.models import LoadedTarget, load_target
from orchestrator.loading.options import EngineOptions, engine_options
from orchestrator.recommend.decode import read_prompts
from orchestrator.recommend.record import ModeRun, Prompt, measure_decoding
from orchestrator.workers.messages import Submit

PREFIX_TOKENS = 512
QUESTION_TOKENS = 24
LONG_TOKENS = 4000
RESUMED_TOKENS = (700, 300)
"""Of the prompt, and of what was committed behind it."""
ROUNDS = 60
"""That are measured before and after resumption."""
MS_PER_S = 1000.0


def text_of(prompts: list[Prompt], start: int, count: int) -> list[int]:
    """Return tokens of real text, all prompts behind one another from a place on."""
    every = [token for prompt in prompts for token in prompt.tokens]
    return [every[(start + index) % len(every)] for index in range(count)]


def prefixes(target: LoadedTarget, options: EngineOptions, prompts: list[Prompt], pairs: int) -> dict[str, float]:
    """Return the median TTFT of first and second requests of a pair, and the median ratio."""
    loop = build_loop(target, options, build_drafter(options, target))
    first_ms, second_ms = [], []
    for pair in range(pairs + 1):
        prefix = text_of(prompts, 997 * pair, PREFIX_TOKENS)
        found = []
        for index in range(2):
            question = text_of(prompts, 997 * pair + 5000 + 100 * index, QUESTION_TOKENS)
            outcome = ModeRun("spec")
            measure_decoding(loop, [Submit(f"{pair}-{index}", prefix + question, 16)], outcome)
            found.append(outcome.records[f"{pair}-{index}"].first_s * MS_PER_S)
        if pair:  # the first pair compiles shapes
            first_ms.append(found[0])
            second_ms.append(found[1])
    ratios = [second / first for first, second in zip(first_ms, second_ms, strict=True)]
    return {
        "first_ttft_ms": median(first_ms),
        "second_ttft_ms": median(second_ms),
        "second_ttft_share": median(ratios),
        "second_ttft_share_worst": max(ratios),
    }


def fairness(target: LoadedTarget, options: EngineOptions, prompts: list[Prompt], streams: int) -> dict[str, float]:
    """Return the streams' inter-token latencies before and during the prefill of a long prompt."""
    loop = build_loop(target, options, build_drafter(options, target))
    for index in range(streams):
        loop.submit(Submit(f"s{index}", prompts[index].tokens[:200], 2000))
    gaps: dict[bool, list[float]] = {False: [], True: []}
    last: dict[str, float] = {}
    long_from_s = long_first_s = 0.0
    for number in range(4000):
        if number == 60:
            loop.submit(Submit("long", text_of(prompts, 0, LONG_TOKENS), 4))
            long_from_s = time.perf_counter()
        done = loop.run_round_strictly()
        now_s = time.perf_counter()
        for delta in done.deltas:
            if delta.request_id == "long":
                long_first_s = long_first_s or now_s
            elif delta.request_id in last and number > 20:
                gaps[bool(long_from_s)].append((now_s - last[delta.request_id]) * MS_PER_S)
            last[delta.request_id] = now_s
        if long_first_s:
            break
    for key in list(last):
        loop.cancel(key)
    return {
        "max_itl_ms": options.max_itl_ms,
        "itl_before_p99_ms": float(np.percentile(gaps[False], 99)),
        "itl_during_p50_ms": float(np.percentile(gaps[True], 50)),
        "itl_during_p99_ms": float(np.percentile(gaps[True], 99)),
        "itl_during_worst_ms": max(gaps[True]),
        "share_within_bound": sum(gap <= options.max_itl_ms for gap in gaps[True]) / len(gaps[True]),
        "long_prompt_ttft_ms": (long_first_s - long_from_s) * MS_PER_S,
    }


def resume(
    target: LoadedTarget, options: EngineOptions, prompts: list[Prompt], streams: int, resumed: int
) -> dict[str, float]:
    """Return the running streams' inter-token latencies before, during and after resumption, and how long it took.

    Nothing is drafted: how much is would differ from part to part.
    """
    loop = build_loop(target, options, None)

    def send(key: str, start: int) -> None:
        of_prompt, committed = RESUMED_TOKENS
        text = text_of(prompts, start, of_prompt + committed)
        loop.submit(Submit(key, text[:of_prompt], 4000, committed=text[of_prompt:], depth=0))

    for index in range(streams):
        send(f"s{index}", 499 * index)
    waiting: set[str] = set()
    gaps: dict[str, list[float]] = {"before": [], "during": [], "after": []}
    back_s: list[float] = []
    last: dict[str, float] = {}
    came_s, decoded = 0.0, 0
    while len(gaps["after"]) < ROUNDS * streams:
        done = loop.run_round_strictly()
        now_s = time.perf_counter()
        when = "before" if not came_s else "during" if waiting else "after"
        for delta in done.deltas:
            key = delta.request_id
            if key in waiting:
                waiting.remove(key)
                back_s.append(now_s - came_s)
            elif key in last and key.startswith("s") and decoded > ROUNDS:
                gaps[when].append((now_s - last[key]) * MS_PER_S)
            last[key] = now_s
        decoded += len(done.deltas) >= streams
        if decoded == 2 * ROUNDS and not came_s:
            came_s = now_s
            waiting = {f"r{index}" for index in range(resumed)}
            for index in range(resumed):
                send(f"r{index}", 10_007 + 1009 * index)
    for key in last:
        loop.cancel(key)
    found = {f"resume_itl_{when}_p{q}_ms": float(np.percentile(gaps[when], q)) for when in gaps for q in (50, 99)}
    found |= {f"resume_itl_{when}_mean_ms": float(np.mean(gaps[when])) for when in gaps}
    return found | {"resume_first_s": back_s[0], "resume_median_s": median(back_s), "resume_last_s": back_s[-1]}


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Load the target, measure both."""
    options = engine_options(load_config(arguments.config), arguments.config.resolve().parent)
    if arguments.adapter:
        options = options.with_model(adapter=arguments.adapter)
    places = max(options.max_running, arguments.streams + arguments.resumed)
    options = msgspec.structs.replace(options, max_running=places)
    target = load_target(options, lambda stage, fraction: None)
    prompts = read_prompts(arguments.prompts, target, 40)
    summary = {
        **prefixes(target, options, prompts, arguments.pairs),
        **fairness(target, options, prompts, arguments.streams),
        **resume(target, options, prompts, arguments.streams, arguments.resumed),
    }
    environment = {
        "adapter": options.model.adapter,
        "streams": arguments.streams,
        "resumed": arguments.resumed,
        "processor": processor().name,
    }
    return {"summary": summary, "environment": environment}


def main() -> None:
    """Parse arguments, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--resumed", type=int, default=4)
    parser.add_argument("--adapter", default="", help="the runtime; else as configured")
    parser.add_argument("--config", type=Path, default=Path("cluster.yaml"))
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args()
    console = Console()
    with console.status("measuring"):
        result = run(arguments)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1), encoding="utf-8")
    table = Table("figure", "value")
    for name, value in result["summary"].items():
        table.add_row(name, f"{value:.3f}" if name.endswith(("share", "worst", "bound")) else f"{value:.1f}")
    console.print(table)


if __name__ == "__main__":
    main()
