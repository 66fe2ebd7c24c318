"""Losslessness at full size: target-only decoding against speculation, alone and in company, at any depth.

    python tools/check_identity.py --prompts FILE [--limit P] [--max-tokens N] [--concurrency C] [--depths LIST]
        [--adapter NAME] [--json OUT]

Greedy and seeded sampling (temperature 0.8, top-p 0.95). The reference computes every prompt itself; all other cases
reuse prefixes, and the last ones preempt each other in a tight KV cache. Exits 1 when a single token differs.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from orchestrator.config.load import load_config
from orchestrator.fitting.worker_options import engine_options
from orchestrator.protocol.commands import Submit
from orchestrator.protocol.load_options import EngineOptions
from orchestrator.recommend.record import ModeRun, Prompt, measure_decoding
from orchestrator.recommend.run import read_prompts
from orchestrator.worker.loading.drafters import build_drafter
from orchestrator.worker.loading.engine import build_loop
from orchestrator.worker.loading.models import LoadedSource, load_target
from policies.sampling import Sampling

SAMPLINGS = {"greedy": Sampling(), "sampled": Sampling(0.8, top_p=0.95, seed=1000)}


def submits(prompts: Sequence[Prompt], sampling: Sampling, max_tokens: int, depth: int | None) -> list[Submit]:
    """Return one request a prompt, each with its own seed."""
    return [
        Submit(
            str(index),
            prompt.tokens,
            max_tokens,
            dataclasses.replace(sampling, seed=sampling.seed + index),
            stop_tokens=prompt.stop_tokens,
            depth=depth,
        )
        for index, prompt in enumerate(prompts)
    ]


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """One way to decode all prompts. `tight`: a KV cache so small that requests preempt one another."""

    sampling: str
    depth: int | None
    concurrency: int
    tight: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """What came of it: tokens by request, and whether what was to be forced did happen."""

    tokens: dict[str, list[int]]
    preemptions: int
    reused: int


def decode_requests(target: LoadedSource, options: EngineOptions, requests: list[Submit], *, speculate: bool) -> Found:
    """Decode the requests, at most `options.max_running` at the same time."""
    outcome = ModeRun("spec")
    drafter = build_drafter(options, target) if speculate else None
    loop = build_loop(target, options, drafter)
    measure_decoding(loop, requests, outcome)
    gauges = loop.gauges(0)
    if drafter is not None:
        drafter.close()
    tokens = {key: record.tokens for key, record in outcome.records.items()}
    return Found(tokens, gauges.preemptions, gauges.prefix_hits)


def tight_bytes(target: LoadedSource, prompts: Sequence[Prompt], max_tokens: int) -> int:
    """Return a KV cache that the longest request just fits into."""
    longest = max(len(prompt.tokens) for prompt in prompts) + max_tokens
    return (longest + 3 * target.model.capabilities.block_tokens) * target.model.spec.bytes_per_token


def cases(concurrency: int, depths: Sequence[int | None]) -> list[Case]:
    """Return every combination; the last ones under a tight KV cache. Depth None is the policy's."""
    plain = [Case(*shape) for shape in itertools.product(SAMPLINGS, depths, (1, concurrency))]
    return [*plain, *(Case(name, depth, concurrency, tight=True) for name in SAMPLINGS for depth in (0, None))]


def main() -> int:
    """Run every case; print and return 0 when nothing differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=40)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--depths", default="0,1,4,8,policy")
    parser.add_argument("--adapter", default="", help="the runtime; else as configured")
    parser.add_argument("--config", type=Path, default=Path("cluster.yaml"))
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args()
    options = engine_options(load_config(arguments.config), arguments.config.resolve().parent)
    if arguments.adapter:
        options = options.with_model(adapter=arguments.adapter)
    console = Console()
    rows = run(options, arguments, console)
    total = sum(int(row["differ"]) for row in rows)
    if arguments.json:
        summary = {"adapter": options.model.adapter, "cases": len(rows), "mismatches": total, "identical": total == 0}
        arguments.json.write_text(json.dumps({"summary": summary, "runs": rows}, indent=1), encoding="utf-8")
    table = Table(
        title=f"{options.model.adapter}: outputs that differ from target-only decoding, one request at a time"
    )
    for name in rows[0]:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    console.print(table)
    console.print(f"identical output: {'yes' if total == 0 else 'NO'} ({total} differences)")
    return 0 if total == 0 else 1


def run(options: EngineOptions, arguments: argparse.Namespace, console: Console) -> list[dict[str, Any]]:
    """Decode every case, and return a row of figures for each."""
    rows: list[dict[str, Any]] = []
    with console.status("loading the target"):
        target = load_target(options, lambda stage, fraction: None)
    prompts = read_prompts(arguments.prompts, target, arguments.limit)
    tight = options.with_model(kv_cache_bytes=tight_bytes(target, prompts, arguments.max_tokens))
    alone = msgspec.structs.replace(options, prefix_reuse=False, max_running=1)
    expected: dict[str, dict[str, list[int]]] = {}
    depths = [None if depth == "policy" else int(depth) for depth in arguments.depths.split(",")]
    every = cases(arguments.concurrency, depths)
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("decoding", total=len(every) + len(SAMPLINGS))
        for name, sampling in SAMPLINGS.items():
            requests = submits(prompts, sampling, arguments.max_tokens, None)
            expected[name] = decode_requests(target, alone, requests, speculate=False).tokens
            progress.advance(task)
        for case in every:
            if case.tight and options is not tight:
                target.model.close()
                target, options = load_target(tight, lambda stage, fraction: None), tight
            requests = submits(prompts, SAMPLINGS[case.sampling], arguments.max_tokens, case.depth)
            case_options = msgspec.structs.replace(options, max_running=case.concurrency)
            decoded = decode_requests(target, case_options, requests, speculate=True)
            rows.append(_row(case, decoded, expected[case.sampling]))
            progress.advance(task)
    return rows


def _row(case: Case, decoded: Found, expected: dict[str, list[int]]) -> dict[str, Any]:
    return {
        "sampling": case.sampling,
        "depth": "policy" if case.depth is None else case.depth,
        "concurrency": case.concurrency,
        "kv cache": "tight" if case.tight else "ample",
        "preemptions": decoded.preemptions,
        "reused tokens": decoded.reused,
        "tokens": sum(map(len, decoded.tokens.values())),
        "differ": sum(decoded.tokens[key] != tokens for key, tokens in expected.items()),
    }


if __name__ == "__main__":
    sys.exit(main())
