"""Losslessness at full size: target-only decoding against speculation, alone and in company, at any depth.

    python tools/check_identity.py --prompts FILE [--limit P] [--max-tokens N] [--concurrency C]
                                   [--adapter NAME] [--json OUT]

Greedy and seeded sampling (temperature 0.8, top-p 0.95). Exits 1 when a single token differs.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from adapters import registry
from orchestrator.bootstrap import (
    EngineOptions,
    Target,
    build_drafter,
    build_loop,
    engine_options,
    load_target,
)
from orchestrator.cli.bench_decode import read_prompts
from orchestrator.cli.bench_record import Prompt, Run, measure
from orchestrator.cluster.port import Sampling, Submit
from orchestrator.config.load import load_config

SAMPLINGS = {"greedy": Sampling(), "sampled": Sampling(0.8, top_p=0.95, seed=1000)}
DEPTHS: tuple[int | None, ...] = (0, 1, 4, 8, None)


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


def outputs(
    target: Target, options: EngineOptions, requests: list[Submit], concurrency: int, *, speculate: bool
) -> dict[str, list[int]]:
    """Decode the requests, at most `concurrency` at the same time."""
    one = msgspec.structs.replace(options, max_running=concurrency)
    outcome = Run("spec")
    measure(build_loop(target, one, build_drafter(options) if speculate else None), requests, outcome)
    return {key: record.tokens for key, record in outcome.records.items()}


def main() -> int:
    """Run every combination; print and return 0 when nothing differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=40)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--adapter", choices=registry.names(), help="the runtime; else as configured")
    parser.add_argument("--config", type=Path, default=Path("cluster.yaml"))
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args()
    console = Console()
    options = engine_options(load_config(arguments.config), arguments.config.resolve().parent)
    options = msgspec.structs.replace(options, adapter=arguments.adapter or options.adapter)
    with console.status("loading the target"):
        target = load_target(options, lambda stage, fraction: None)
    prompts = read_prompts(arguments.prompts, target, arguments.limit)
    table = Table(
        title=f"{options.adapter}: {len(prompts)} prompts, {arguments.max_tokens} tokens: outputs unlike target-only"
    )
    for name in ("sampling", "depth", "concurrency", "tokens", "differ"):
        table.add_column(name, justify="right")
    rows = []
    cases = list(itertools.product(SAMPLINGS, DEPTHS, (1, arguments.concurrency)))
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("decoding", total=len(cases) + len(SAMPLINGS))
        expected = {}
        for name, sampling in SAMPLINGS.items():
            plain = submits(prompts, sampling, arguments.max_tokens, None)
            expected[name] = outputs(target, options, plain, 1, speculate=False)
            progress.advance(task)
        for name, depth, concurrency in cases:
            requests = submits(prompts, SAMPLINGS[name], arguments.max_tokens, depth)
            found = outputs(target, options, requests, concurrency, speculate=True)
            differ = sum(found[key] != tokens for key, tokens in expected[name].items())
            rows.append(
                {
                    "sampling": name,
                    "depth": "policy" if depth is None else depth,
                    "concurrency": concurrency,
                    "tokens": sum(map(len, found.values())),
                    "differ": differ,
                }
            )
            table.add_row(*(str(value) for value in rows[-1].values()))
            progress.advance(task)
    console.print(table)
    total = sum(int(row["differ"]) for row in rows)
    if arguments.json:
        summary = {
            "adapter": options.adapter,
            "prompts": len(prompts),
            "cases": len(rows),
            "mismatches": total,
            "identical": total == 0,
        }
        arguments.json.write_text(json.dumps({"summary": summary, "runs": rows}, indent=1), encoding="utf-8")
    console.print(f"identical output: {'yes' if total == 0 else 'NO'} ({total} differences)")
    return 0 if total == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
