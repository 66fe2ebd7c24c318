"""Decodes with less and less address space: `python -m tests.support.starved RUNTIME SOURCE STORE`, a JSON line.

The limit is this process's, so the runtime's own allocations fail, and what it says of that is what devices say.
"""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path

import psutil

from adapters import registry
from adapters.contract import LoadedModel, LoadOptions, OutOfMemory
from adapters.model_source import ModelSource
from adapters.model_store import ModelStore
from orchestrator.protocol.commands import Submit
from orchestrator.worker.engine.loop import DecodeLoop
from policies.sampling import Sampling
from tests.support.loops import loop_over, suffix

_PROMPT_TOKENS = 300
_SPARE_BYTES = 16 << 20


def main() -> None:
    """Print what requests get with and without memory, and how small forwards had to be."""
    runtime, source, store = sys.argv[1:]
    adapter = registry.get(runtime)
    path = ModelStore(Path(store)).prepare(ModelSource(Path(source), "m", source), adapter, lambda *_: None)
    options = LoadOptions(slots=6, max_batch_rows=1024, kv_cache_bytes=96 << 20)
    model = adapter.load(path, options, lambda *_: None)
    expected = {key: tokens for one in _submits() for key, tokens in _decode(model, [one], 0)[0].items()}
    out, loop, ended = _decode(model, _submits(), _SPARE_BYTES)
    gauges = loop.gauges(0)
    bound = gauges.memory_bound
    print(  # noqa: T201
        json.dumps(
            {
                "same": all(expected[key][: len(tokens)] == tokens for key, tokens in out.items()),
                "ended": ended,
                "tokens": sum(map(len, out.values())),
                "failures": gauges.out_of_memory,
                "rows": bound.rows if bound else 0,
                "said": bound.last if bound else "",
            }
        )
    )


def _submits() -> list[Submit]:
    """Prompts that are scored: their rows of logits are what takes memory."""
    return [
        Submit(
            f"r{index}",
            [1000 + (7 * index + 11 * place) % 400 for place in range(_PROMPT_TOKENS)],
            12,
            Sampling(0.9 if index % 2 else 0.0, top_p=0.95, seed=index),
            logprobs=0,
            prompt_logprobs=True,
        )
        for index in range(6)
    ]


def _decode(
    model: LoadedModel, submits: list[Submit], spare_bytes: int
) -> tuple[dict[str, list[int]], DecodeLoop, str]:
    """Return what requests got, the loop, and what ended it before they came to their ends ("": nothing)."""
    loop = loop_over(model, suffix(), running=len(submits), prefix_reuse=False, max_itl_ms=1e9)
    out: dict[str, list[int]] = {one.request_id: [] for one in submits}
    for one in submits:
        if refused := loop.submit(one):
            raise RuntimeError(refused.message)
    if spare_bytes:
        most = psutil.Process().memory_info().vms + spare_bytes
        resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))
    try:
        while not loop.idle:
            for delta in loop.run_round_strictly().deltas:
                out[delta.request_id] += delta.tokens
    except OutOfMemory as error:
        return out, loop, str(error)
    return out, loop, ""


if __name__ == "__main__":
    main()
