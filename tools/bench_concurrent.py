"""Outrider beside openvino_genai's continuous batching with several requests at the same time, in one process.

    python tools/bench_concurrent.py --prompts FILE [--concurrency C] [--limit P] [--max-tokens N] [--json OUT]

The prompts go in waves of two times C to each engine in turn, so that a drift of the machine meets all of them. Each
engine has C requests at the same time, the next one beginning when one ends, and decodes greedily. Nobody reuses
prefixes: the waves are the same for all. The engine openvino_genai is given its requests one by one. Its scheduler
takes all that it is given into the batch, whatever `max_num_seqs` says.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import openvino as ov
import openvino_genai
from rich.console import Console
from rich.progress import track
from rich.table import Table

from adapters.model_source import resolve
from orchestrator.bench.decode import read_prompts
from orchestrator.bench.record import ModeRun, Prompt, measure_decoding
from orchestrator.config.load import load_config
from orchestrator.loading.drafters import build_drafter
from orchestrator.loading.engine import build_loop
from orchestrator.loading.models import LoadedTarget, load_target
from orchestrator.loading.options import EngineOptions, engine_options
from orchestrator.workers.messages import Submit

FORMULAS = {"tok_s": "generated tokens / wall time of all waves, prefill included"}
GENAI = "openvino_genai continuous batching"
Wave = Callable[[Sequence[Prompt]], tuple[int, float]]
"""Decodes prompts together; returns (tokens, seconds)."""


def genai(source: Path, work: Path, arguments: argparse.Namespace, kv_cache_bytes: int) -> Wave:
    """Return openvino_genai's continuous batching over the same GGUF file."""
    link = work / "model.gguf"
    link.symlink_to(source.resolve())
    openvino_genai.LLMPipeline(str(link), "CPU", enable_save_ov_model=True)
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = max(1, kv_cache_bytes >> 30)
    scheduler.enable_prefix_caching = False
    pipe = openvino_genai.ContinuousBatchingPipeline(str(work), scheduler, "CPU")

    def wave(prompts: Sequence[Prompt]) -> tuple[int, float]:
        config = openvino_genai.GenerationConfig(max_new_tokens=arguments.max_tokens)
        config.stop_token_ids = set(prompts[0].stop_tokens)
        waiting = [ov.Tensor(np.array([prompt.tokens], dtype=np.int64)) for prompt in reversed(prompts)]
        running: list[Any] = []
        tokens = 0
        started = time.perf_counter()
        while waiting or running:
            while waiting and len(running) < arguments.concurrency:
                running.append(pipe.add_request(len(waiting), waiting.pop(), config))
            pipe.step()
            ended = [handle for handle in running if handle.get_status() != openvino_genai.GenerationStatus.RUNNING]
            running = [handle for handle in running if handle not in ended]
            tokens += sum(len(handle.read_all()[0].generated_ids) for handle in ended)
        return tokens, time.perf_counter() - started

    return wave


def outrider(target: LoadedTarget, options: EngineOptions, max_tokens: int, *, speculate: bool) -> Wave:
    """Return Outrider's loop; with `speculate`, one suffix drafter over all waves, as in a server."""
    drafter = build_drafter(options, target) if speculate else None

    def wave(prompts: Sequence[Prompt]) -> tuple[int, float]:
        outcome = ModeRun("spec" if speculate else "plain")
        submits = [
            Submit(str(index), prompt.tokens, max_tokens, stop_tokens=prompt.stop_tokens)
            for index, prompt in enumerate(prompts)
        ]
        measure_decoding(build_loop(target, options, drafter), submits, outcome)
        return sum(len(record.tokens) for record in outcome.records.values()), outcome.wall_s

    return wave


def run(arguments: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Load the engines, decode every wave with each, return the result."""
    config = load_config(arguments.config)
    options = msgspec.structs.replace(
        engine_options(config, arguments.config.resolve().parent),
        max_running=arguments.concurrency,
        prefix_reuse=False,
    )
    console = Console(stderr=True)
    with console.status("loading the engines"):
        source = resolve(config.model.source, arguments.config.parent).path
        targets = {
            kind: load_target(options.with_model(exactness=kind), lambda stage, fraction: None)
            for kind in ("bit", "kernel")
        }
        engines = {
            GENAI: genai(source, work, arguments, options.model.kv_cache_bytes),
            "outrider plain, bit": outrider(targets["bit"], options, arguments.max_tokens, speculate=False),
            "outrider speculative, bit": outrider(targets["bit"], options, arguments.max_tokens, speculate=True),
            "outrider speculative, kernel": outrider(targets["kernel"], options, arguments.max_tokens, speculate=True),
        }
    prompts = read_prompts(arguments.prompts, targets["bit"], arguments.limit)
    for wave in engines.values():
        wave(prompts[:2])
    totals = {name: [0, 0.0] for name in engines}
    size = 2 * arguments.concurrency
    waves = [prompts[start : start + size] for start in range(0, len(prompts), size)]
    for number, members in enumerate(track(waves, "decoding", console=console, transient=True)):
        names = list(engines)
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            tokens, wall_s = engines[name](members)
            totals[name][0] += tokens
            totals[name][1] += wall_s
    rows = {name: {"tokens": tokens, "tok_s": tokens / wall_s} for name, (tokens, wall_s) in totals.items()}
    ratios = {
        f"{name.removeprefix('outrider ').replace(', ', '_').replace(' ', '_')}_vs_genai": (
            row["tok_s"] / rows[GENAI]["tok_s"]
        )
        for name, row in rows.items()
        if name != GENAI
    }
    summary = {"concurrency": arguments.concurrency, "prompts": len(prompts), **ratios}
    return {"summary": summary, "runs": rows, "formulas": FORMULAS}


def main() -> None:
    """Parse arguments, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--limit", type=int, default=48)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--config", type=Path, default=Path("cluster.yaml"))
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        result = run(arguments, Path(work))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1), encoding="utf-8")
    table = Table("engine", "tokens", "tok/s", title=f"{arguments.concurrency} requests at the same time, greedy")
    for name, row in result["runs"].items():
        table.add_row(name, f"{row['tokens']:.0f}", f"{row['tok_s']:.1f}")
    console = Console()
    console.print(table)
    for name, value in result["summary"].items():
        console.print(f"{name}: {value:.3f}" if isinstance(value, float) else f"{name}: {value}")


if __name__ == "__main__":
    main()
