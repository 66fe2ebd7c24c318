"""The targets of `outrider bench shards`: simulated ones, real ones of one and of two runtimes, and one over hosts."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from orchestrator.config.model import ClusterConfig
from orchestrator.daemon.bootstrap.clusters import build_cluster, local_cluster
from orchestrator.protocol.contract import Cluster
from orchestrator.worker.measuring.prompts import TEXTS, PromptText
from outrider_lab.bench.cluster.hosts import BenchHosts, make_hosts
from outrider_lab.bench.shards.measure import MeasuredTarget, StreamRun, TargetRun
from policies.sampling import Sampling

STREAMS = 4
SAMPLINGS = {"greedy": Sampling(), "seeded": Sampling(temperature=0.8, seed=7)}
_LAYERS = 12
_STAGE_MS = 12.0
_KV_CACHE = "64 MiB"
_ACTIVATIONS = "fp32"
"""Of these a cut model has the whole one's bits. Which class a trial finds the faster one may be a matter of what else
runs, and bf16 costs up to 1.5 times as much, or 1.5 times less."""
_TURNS = 15  # of the drafted stream. Not tuned: the median of as many is hardly moved by other programs.
_ROWS = 64

FORMULAS = {
    "stages_busy": f"stages' time / (stages x wall time) while {STREAMS} streams decode without drafts",
    "pipeline_use": "the time of the stage, or of the stages on one core, that works the most / wall time, at most 1: "
    "ideal is a pipeline that never waits there",
    "streams_vs_whole": f"tokens/s of {STREAMS} streams without drafts, in shards / whole on as many cores as one has",
    "speculative_vs_unsharded": "tokens/s of one stream with drafts, in shards / whole on as many cores as one has, "
    "the median of turns",
    "identical": "all tokens, in shards with and without drafts, are the whole target's; where the fingerprints of the "
    "classes differ, those of the shards are compared with each other",
    "memory_error": "the largest |peak of a process of layers - what it was announced to hold| / what was announced",
}
BARS = {"pipeline_use": 0.8, "speculative_vs_unsharded": 0.9, "memory_error": 0.05}


@dataclass(frozen=True, slots=True)
class ShardedTarget:
    """A target to be measured: `model`, a section of cluster.yaml without shards; `shards`: each one's runtime and
    layers; `hosts`: how many it is spread over (1: this one)."""

    name: str
    model: dict[str, Any]
    shards: tuple[tuple[str, int], ...]
    hosts: int = 1

    def list_shards(self, cores: Sequence[int], addresses: Sequence[str]) -> list[dict[str, Any]]:
        """Return the shards as cluster.yaml has them, in turn on the cores, or on the hosts. Simulated ones only wait:
        where there are more than cores, one has all of them."""
        found = []
        for number, (adapter, layers) in enumerate(self.shards):
            place: dict[str, Any] = {"cores": [cores[number % len(cores)]]}
            if addresses:
                place = {"host": addresses[number % len(addresses)]}
            elif adapter == "simulated" and number >= len(cores):
                place = {"cores": list(cores)}
            found.append({"adapter": adapter, "layers": layers, "threads": 1} | place)
        return found


def list_targets(source: str, layers: int, *, real: bool, hosts: bool) -> list[ShardedTarget]:
    """Return what is measured: simulated targets, and a real one of so many layers."""
    toy = {
        "source": f"simulated:toy?base_ms={2 * _STAGE_MS:g}&layers={_LAYERS}",
        "adapter": "simulated",
        "name": "toy",
    }
    thirds = {**toy, "source": f"simulated:toy?base_ms={3 * _STAGE_MS:g}&layers={_LAYERS}"}
    half = layers // 2
    model = {"source": source, "adapter": "openvino_rt"}
    found = [
        ShardedTarget("simulated, 2 shards", toy, (("simulated", 6), ("simulated", 6))),
        ShardedTarget("simulated, 3 shards", thirds, (("simulated", 4),) * 3),
    ]
    if real:
        third = layers // 3
        found += [
            ShardedTarget("openvino_rt, 2 shards", model, (("openvino_rt", half), ("openvino_rt", layers - half))),
            ShardedTarget(
                "openvino_rt, 3 shards",
                model,
                (("openvino_rt", third), ("openvino_rt", third), ("openvino_rt", layers - 2 * third)),
            ),
            ShardedTarget("two runtimes", model, (("openvino_rt", half), ("onnx_rt", layers - half))),
        ]
    if hosts:
        found.append(ShardedTarget("simulated, 2 hosts", toy, (("simulated", 6), ("simulated", 6)), hosts=2))
        if real:
            shards = (("openvino_rt", half), ("openvino_rt", layers - half))
            found.append(ShardedTarget("openvino_rt, 2 hosts", model, shards, hosts=2))
    return found


def measure_shards(
    targets: Sequence[ShardedTarget], cores: Sequence[int], store: Path, max_tokens: int, tell: Callable[[str], object]
) -> dict[str, Any]:
    """Return `summary`, `rows`, `formulas` and `bars`; `tell` hears of each target. Raises BenchError, and HostsError
    where hosts cannot be made."""
    rows = []
    for number, target in enumerate(targets, start=1):
        tell(f"{number} of {len(targets)}: {target.name}")
        if target.hosts == 1:
            rows.append(asyncio.run(_measure(target, cores, (), local_cluster(), store, max_tokens)))
            continue
        with make_hosts([(cores[one % len(cores)],) for one in range(target.hosts)]) as hosts:
            for one in range(target.hosts):
                hosts.join(one)
            measure = partial(_measure_over_hosts, target, cores, hosts, store, max_tokens)
            rows.append(hosts.run_on(0, measure))
    return {"summary": summarise_shards(rows), "rows": rows, "formulas": FORMULAS, "bars": BARS}


async def _measure(
    target: ShardedTarget,
    cores: Sequence[int],
    addresses: Sequence[str],
    cluster: Cluster,
    store: Path,
    max_tokens: int,
    address: str = "",
) -> dict[str, Any]:
    """Return a row: the whole target on one core and the same in shards, both loaded, in turns. `address`: the Ray
    cluster's of its hosts."""
    shards = target.list_shards(cores, addresses)
    whole_config = _configure(target, store, {"replicas": [{"cores": [cores[0]], "threads": 1}]})
    cut_config = _configure(target, store, {"shards": shards}, address)
    texts = [PromptText(str(number), *text) for number, text in enumerate(TEXTS[: STREAMS + _TURNS])]
    async with TargetRun(local_cluster(), whole_config) as whole, TargetRun(cluster, cut_config) as cut:
        prompts = [whole.encode(text) for text in texts]
        unsharded, sharded = await _run_ways(whole, cut, prompts, max_tokens)
        await cut.fill(_ROWS)
        memory = cut.read_memory()
    same_class = cut.ready.precision.class_fingerprint == whole.ready.precision.class_fingerprint
    return {
        "target": target.name,
        "shards": len(target.shards),
        "runtimes": cut.ready.device.adapter,
        "hosts": target.hosts,
        "same_class": same_class,
        "identical": _is_identical(sharded, unsharded if same_class else sharded)
        and _is_identical(unsharded, unsharded),
        "stages_busy": fmean(sharded["greedy"].busy),
        "pipeline_use": _count_use(sharded["greedy"].busy, [one.get("cores") for one in shards]),
        "streams_tokens_per_s": sharded["greedy"].tokens_per_s,
        "streams_vs_whole": sharded["greedy"].tokens_per_s / unsharded["greedy"].tokens_per_s,
        "speculative_tokens_per_s": sharded["one"].tokens_per_s,
        "speculative_vs_unsharded": sharded["one"].tokens_per_s / unsharded["one"].tokens_per_s,
        "drafted_round_unsharded": asdict(unsharded["one"].parts),
        "drafted_round": asdict(sharded["one"].parts),
        "memory_planned": [planned for planned, _ in memory],
        "memory_peak": [peak for _, peak in memory],
        "memory_error": max((abs(peak - planned) / planned for planned, peak in memory), default=None),
    }


def _measure_over_hosts(
    target: ShardedTarget, cores: Sequence[int], hosts: BenchHosts, store: Path, max_tokens: int
) -> dict[str, Any]:
    """Return a row, measured from the first host."""
    addresses = [host.address for host in hosts.hosts]
    os.environ.update(hosts.token)  # what starts Ray's workers reads it there
    config = ClusterConfig.model_validate({"model": target.model, "cluster": {"address": hosts.address}})
    return asyncio.run(_measure(target, cores, addresses, build_cluster(config), store, max_tokens, hosts.address))


def _count_use(busy: Sequence[float], cores: Sequence[list[int] | None]) -> float:
    """Return the share of the ideal: stages that have one core together take turns there."""
    together: dict[int, float] = {}
    alone = []
    for share, own in zip(busy, cores, strict=True):
        if own is not None and len(own) == 1:
            together[own[0]] = together.get(own[0], 0.0) + share
        else:
            alone.append(share)
    return min(1.0, max([*together.values(), *alone]))


async def _run_ways(
    whole: MeasuredTarget, cut: MeasuredTarget, prompts: Sequence[list[int]], max_tokens: int
) -> tuple[dict[str, StreamRun], dict[str, StreamRun]]:
    """Return what streams gave together, without drafts and with them, and one with drafts alone: the turn whose ratio
    of both is the median, with the tokens of all turns. Both take turns, so that other programs slow both."""
    greedy = SAMPLINGS["greedy"]
    unsharded: dict[str, StreamRun] = {}
    sharded: dict[str, StreamRun] = {}
    both = ((whole, unsharded), (cut, sharded))
    for target, _ in both:
        await target.run_streams(prompts[:1], max_tokens, greedy, drafts=True)  # what is only made once
    for name, sampling in SAMPLINGS.items():
        for target, ways in both:
            ways[name] = await target.run_streams(prompts[:STREAMS], max_tokens, sampling, drafts=False)
            ways[f"{name} drafted"] = await target.run_streams(prompts[:STREAMS], max_tokens, sampling, drafts=True)
    turns = []
    for prompt in prompts[STREAMS:]:  # nobody remembers these
        first = await whole.run_streams([prompt], max_tokens, greedy, drafts=True)
        turns.append((first, await cut.run_streams([prompt], max_tokens, greedy, drafts=True)))
    turns.sort(key=lambda turn: turn[1].tokens_per_s / turn[0].tokens_per_s)
    for number, ways in enumerate((unsharded, sharded)):
        tokens = [turn[number].tokens[0] for turn in turns]
        ways["one"] = replace(turns[len(turns) // 2][number], tokens=tokens)
    return unsharded, sharded


def _is_identical(found: dict[str, StreamRun], expected: dict[str, StreamRun]) -> bool:
    """Return whether tokens are those that are expected without drafts, drafted for or not."""
    return found["one"].tokens == expected["one"].tokens and all(
        run.tokens == expected[name].tokens for name in SAMPLINGS for run in (found[name], found[f"{name} drafted"])
    )


def _configure(target: ShardedTarget, store: Path, placed: dict[str, Any], address: str = "") -> ClusterConfig:
    return ClusterConfig.model_validate(
        {
            "model": {**target.model, **placed, "activations": _ACTIVATIONS},
            "limits": {"kv_cache": _KV_CACHE, "max_running": STREAMS, "max_batch_rows": _ROWS},
            "store": {"directory": str(store)},
            "cluster": {"address": address} if address else {"runtime": "local"},
        }
    )


def summarise_shards(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures over all targets; None where nothing was measured for one."""
    errors = [row["memory_error"] for row in rows if row["memory_error"] is not None]
    return {
        "shards": sorted({row["shards"] for row in rows}),
        "runtimes": sorted({row["runtimes"] for row in rows}),
        "hosts": max(row["hosts"] for row in rows),
        "identical": all(row["identical"] for row in rows),
        "pipeline_use": min(row["pipeline_use"] for row in rows),
        "speculative_vs_unsharded": min(row["speculative_vs_unsharded"] for row in rows),
        "memory_error": max(errors, default=None),
    }
