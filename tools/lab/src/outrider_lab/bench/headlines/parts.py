"""The parts that are measured: each by the code of an existing benchmark, over one deepened pair and one target."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from device_profiles.units import MS_PER_S
from outrider_lab.bench.cluster.hosts import make_hosts
from outrider_lab.bench.cluster.run import ClusterBench, ClusterLoad
from outrider_lab.bench.decode import measure_modes
from outrider_lab.bench.errors import BenchError
from outrider_lab.bench.headlines.structured import measure_structured
from outrider_lab.bench.overlap.measure import OverlapPair, measure_pair
from outrider_lab.bench.plan.fleets import build_goal, fleet
from outrider_lab.bench.wan.measure import measure_link
from outrider_lab.bench.wan.run import RTT_MS
from orchestrator.config.model import ClusterConfig
from orchestrator.loading.drafters import build_drafter
from orchestrator.loading.models import load_target, silent
from orchestrator.loading.options import EngineOptions, engine_options
from orchestrator.measuring.prompts import OWN_PROMPTS
from orchestrator.recommend.decode import encode_prompts
from orchestrator.workers.messages import Sampling
from policies.planning.placement import plan_placement
from policies.planning.plan import Objective

FOUR_BIT = "fast"
"""The draft's `weights` where they are of 4 bits: the offsets of the file's blocks are rounded."""
_P90 = 90
_FLEET_DEVICES = 40


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured. `layers` of the deepened target; `hosts`: whether a cluster is made."""

    layers: int
    prompts: int
    max_tokens: int
    structured: int
    hosts: bool
    cluster_s: float = 6.0


QUICK = Size(layers=90, prompts=3, max_tokens=32, structured=3, hosts=False)
FULL = Size(layers=270, prompts=4, max_tokens=48, structured=6, hosts=True)


def with_draft_weights(pair: OverlapPair, weights: str) -> OverlapPair:
    """Return the pair with another number format of the draft's weights."""
    return OverlapPair(
        pair.target,
        {**pair.draft, "weights": weights},
        pair.target_cores,
        pair.draft_cores,
        (*pair.stated, ("draft_weights", weights)),
    )


def measure_overlapped(pair: OverlapPair, size: Size) -> dict[str, Any]:
    """Return a row of `outrider bench overlap`: draft and target on cores of their own, and the target on all."""
    row = measure_pair(pair, OWN_PROMPTS[: size.prompts], size.max_tokens)
    return row | {
        "plain_ms": MS_PER_S / row["plain_all_cores_tokens_per_s"],
        "spec_ms": MS_PER_S / row["overlapped_tokens_per_s"],
    }


def measure_four_bit(pair: OverlapPair, size: Size, as_it_is: Mapping[str, Any]) -> dict[str, Any]:
    """Return the same with a draft of 4-bit weights. The target is the same, so what all cores are worth to it is taken
    from the row of the draft as it is. It decodes plainly in turn with these drafts, which takes the machine's pace
    out."""
    four_bit = with_draft_weights(pair, FOUR_BIT)
    row = measure_pair(four_bit, OWN_PROMPTS[: size.prompts], size.max_tokens, all_cores=False)
    all_cores = as_it_is["plain_all_cores_tokens_per_s"] / as_it_is["plain_tokens_per_s"]
    return row | {
        "plain_ms": MS_PER_S / (row["plain_tokens_per_s"] * all_cores),
        "spec_ms": MS_PER_S / row["overlapped_tokens_per_s"],
    }


def measure_slow_link(pair: OverlapPair, size: Size) -> dict[str, Any]:
    """Return a row of `outrider bench wan`, over a round trip of 12 ms."""
    row = measure_link(pair, RTT_MS, OWN_PROMPTS[: size.prompts], size.max_tokens)
    return row | {
        "plain_ms": MS_PER_S / row["plain_tokens_per_s"],
        "spec_ms": MS_PER_S / row["overlapped_tokens_per_s"],
    }


def measure_one_device(pair: OverlapPair, size: Size, weights: str) -> dict[str, Any]:
    """Return the summary of `outrider bench decode`, target and draft in one process on all cores, and the p90 of
    per-token latency over requests."""
    kept = {name: value for name, value in pair.draft.items() if name not in ("max_wait_ms", "weights")}
    config = ClusterConfig.model_validate(
        {
            "model": pair.target,
            "drafts": [{**kept, "method": "model", "weights": weights}],
            "limits": {"max_running": 1},
        }
    )
    options = msgspec.structs.replace(engine_options(config, Path()), prefix_reuse=False)
    target = load_target(options, silent)
    try:
        prompts = encode_prompts(OWN_PROMPTS[: size.prompts], target)
        drafter = build_drafter(options, target)
        try:
            result = measure_modes(target, options, drafter, prompts, size.max_tokens, 1, Sampling(), None)
        finally:
            if drafter is not None:
                drafter.close()
    finally:
        target.model.close()
    p90s = {f"{run['mode']}_p90_ms": p90_ms(run["requests"]) for run in result["runs"]}
    summary: dict[str, Any] = result["summary"]
    return summary | p90s


def p90_ms(requests: list[dict[str, Any]]) -> float:
    """Return the 90th percentile of the requests' (latency - TTFT) / (n - 1)."""
    taken = [(one["latency_ms"] - one["ttft_ms"]) / (one["generated"] - 1) for one in requests if one["generated"] > 1]
    return float(np.percentile(taken, _P90)) if taken else 0.0


def measure_grammars(options: EngineOptions, size: Size, tell: Callable[[str], object]) -> dict[str, Any]:
    """Return what answers under JSON schemas take on the configured target, plainly and with speculation."""
    options = msgspec.structs.replace(options, prefix_reuse=False, max_running=1)
    target = load_target(options, silent)
    try:
        total = size.structured * 2
        return measure_structured(
            target, options, size.structured, lambda done: tell(f"structured output: {done} of {total}")
        )
    finally:
        target.model.close()


def plan_costs() -> dict[str, float]:
    """Return what a million tokens cost by the cheapest plan for a made-up fleet, with drafts and without: what
    `outrider bench plan` plans for."""
    goal = build_goal()
    cheapest = dataclasses.replace(goal, objective=Objective.COST)
    bare = dataclasses.replace(cheapest, workload=dataclasses.replace(goal.workload, drafters=()))
    cluster = fleet(_FLEET_DEVICES, 2, 0)
    with_drafts, without = (plan_placement(cluster, one).cost_per_million_tokens for one in (cheapest, bare))
    return {"with_drafts": with_drafts, "without": without, "saved": 1.0 - with_drafts / without}


def measure_cluster(store: Path, size: Size, cores: list[int], tell: Callable[[str], object]) -> dict[str, Any]:
    """Return the rows of `outrider bench cluster` for two simulated hosts, each alone and both together. Raises
    BenchError and HostsError."""
    if len(cores) < 2:
        raise BenchError("two hosts need a core each, and there is one")
    load = ClusterLoad(
        {"source": "simulated:toy?base_ms=2&row_ms=4", "adapter": "simulated"}, (12,), 64, size.cluster_s
    )
    with make_hosts([(cores[0],), (cores[1],)]) as hosts:
        for number in range(2):
            tell(f"cluster: Ray on host {number + 1} of 2")
            hosts.join(number)
        rows = ClusterBench(hosts, load, store, tell).measure_sets()
    rates = {len(row["hosts"]): 0.0 for row in rows}
    for row in rows:
        rates[len(row["hosts"])] = max(rates[len(row["hosts"])], row["measured_tokens_per_s"])
    identical = len({tuple(row["texts"]) for row in rows}) == 1
    return {
        "single": rates[1],
        "together": rates[2],
        "ratio": rates[2] / rates[1],
        "rows": rows,
        "identical": identical,
    }
