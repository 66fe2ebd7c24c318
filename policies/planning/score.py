"""The score of a placement: named terms of 0 (worst) to 1, each with the figures behind it, and what they weigh.

Predicted goodput (policies/planning/throughput.py) decides; the score decides between what is predicted equally fast,
or within the `indifference` that the operator allows. Identical devices share a profile, so ties are what usually
happens among them.
"""

from __future__ import annotations

from collections.abc import Sequence

from device_profiles.units import MS_PER_S, human_bytes
from policies.planning.plan import Device, Prediction, Score, Term, TermWeights, Workload
from policies.planning.shard_cost import ModelPart, context_tokens

# Of a term whose figures are not known: neither for nor against. Not tuned: it only decides between plans of equal
# merit (ADR 0025).
_UNKNOWN = 0.5


def placement_score(
    parts: Sequence[ModelPart],
    devices: Sequence[Device],
    used_bytes: Sequence[float],
    prediction: Prediction,
    workload: Workload,
    weights: TermWeights,
) -> Score:
    """Return the score of a replica: `devices[i]` runs the target's `parts[i]`, those behind them a draft; each gives
    `used_bytes[i]` of its memory."""
    terms = (
        ("compute_headroom", *_compute(parts, prediction, workload)),
        ("bandwidth_headroom", *_bandwidth(parts, devices, prediction, workload)),
        ("memory_fit", *_memory(devices, used_bytes)),
        ("link_cost", *_link(prediction)),
        ("efficiency", *_efficiency(devices, prediction)),
        ("health", *_health(devices)),
        ("idle_share", *_idle_share(devices)),
        ("queue_depth", *_queue_depth(devices)),
    )
    return Score(tuple(Term(name, value, float(getattr(weights, name)), why) for name, value, why in terms))


def _compute(parts: Sequence[ModelPart], prediction: Prediction, workload: Workload) -> tuple[float, str]:
    rows = prediction.sequences * (prediction.depth + 1)
    context = context_tokens(workload)
    one_row_ms = sum(part.ms(1, 1, context) for part in parts)
    all_rows = sum(part.ms(rows, prediction.sequences, context) for part in parts)
    value = min(1.0, one_row_ms / all_rows) if all_rows else _UNKNOWN
    return value, f"a forward of {rows} rows takes {all_rows:.2f} ms, of one row {one_row_ms:.2f} ms"


def _bandwidth(
    parts: Sequence[ModelPart], devices: Sequence[Device], prediction: Prediction, workload: Workload
) -> tuple[float, str]:
    worst, why = 1.0, ""
    for part, device in zip(parts, devices, strict=False):
        if not device.rates.bandwidth_bytes_per_s:
            return _UNKNOWN, f"memory bandwidth of {device.id} is not known"
        read = part.layer_bytes * workload.target.layers / (prediction.round_ms / MS_PER_S)
        value = max(0.0, 1.0 - read / device.rates.bandwidth_bytes_per_s)
        if value <= worst:
            peak = human_bytes(device.rates.bandwidth_bytes_per_s)
            worst, why = value, f"{device.id} reads {human_bytes(read)}/s of weights of {peak}/s"
    return worst, why


def _memory(devices: Sequence[Device], used_bytes: Sequence[float]) -> tuple[float, str]:
    free, device, used = min(
        (max(0.0, 1.0 - used / device.memory_bytes) if device.memory_bytes else 0.0, device.id, used)
        for device, used in zip(devices, used_bytes, strict=True)
    )
    return free, f"{human_bytes(used)} on {device} leave {free:.0%} of it free"


def _link(prediction: Prediction) -> tuple[float, str]:
    share = min(1.0, prediction.link_ms / prediction.round_ms)
    why = f"links take {prediction.link_ms:.2f} of a round's {prediction.round_ms:.2f} ms"
    if not prediction.client_ms:
        return 1.0 - share, why
    first = min(1.0, prediction.client_ms / prediction.ttft_ms)
    why += f", the way to the API {prediction.client_ms:.2f} of a first token's {prediction.ttft_ms:.2f} ms"
    return (1.0 - share) * (1.0 - first), why


def _health(devices: Sequence[Device]) -> tuple[float, str]:
    worst = min(devices, key=lambda device: device.health)
    return worst.health, worst.health_why or "all devices are healthy"


def _idle_share(devices: Sequence[Device]) -> tuple[float, str]:
    busiest = max(devices, key=lambda device: device.utilisation)
    return 1.0 - min(1.0, busiest.utilisation), f"other programs take {busiest.utilisation:.0%} of {busiest.id}"


def _queue_depth(devices: Sequence[Device]) -> tuple[float, str]:
    longest = max(devices, key=lambda device: device.queue_depth)
    return 1.0 / (1.0 + longest.queue_depth), f"{longest.queue_depth:.1f} requests wait on {longest.id}"


def _efficiency(devices: Sequence[Device], prediction: Prediction) -> tuple[float, str]:
    joules = prediction.joules_per_token
    if not joules:
        return _UNKNOWN, "power is not known of " + ", ".join(device.id for device in devices if not device.power_w)
    return 1.0 / (1.0 + joules), f"{joules:.3g} J a token"
