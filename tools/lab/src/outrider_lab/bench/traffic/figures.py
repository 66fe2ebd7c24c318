"""The figures of many requests. Pure: outcomes in, numbers out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from device_profiles.units import MS_PER_S, compute_cost_per_million
from outrider_lab.bench.traffic.outcome import INTERRUPTED, Outcome, meets

PERCENTILES = (90, 95, 99)
LATENCIES = ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms")

FORMULAS = {
    "ttft_ms": "first event with text - start of the request",
    "tpot_ms": "(latency - TTFT) / (n - 1) of each request with n > 1 tokens (AIPerf calls this ITL)",
    "itl_ms": "gaps between events with text, of all requests together; one event may hold several tokens",
    "e2e_ms": "latency: last event with text or finish_reason - start of the request",
    "start of the request": "its sending in a closed loop (--concurrency); its scheduled arrival in an open loop "
    "(--rate), so that what a busy server or client delays is counted (no coordinated omission)",
    "duration_s": "from the start to the end of the last request, warm-up not counted",
    "requests_per_s": "completed requests / duration",
    "output_tok_s": "output tokens of completed requests / duration; tokens as the server counts them (`usage`)",
    "goodput_per_s": "completed requests that meet every SLO / duration (DistServe)",
    "slo_attainment": "requests that meet every SLO / requests that ended, failed ones included",
    "mean_running": "sum over requests of (end - start) / duration",
    "send_lag_ms": "sending - scheduled arrival: how late the generator was (open loop)",
    "generator_cpu_share": "CPU time of this command / duration; 1.0 is a whole core",
    "cost_per_million_tokens": "price an hour x duration / output tokens of completed requests x 1,000,000; the "
    "price as given (--price-per-hour), else that of the devices in use by the server's /metrics",
    "tokens_per_event": "output tokens / events with text",
    "ratios": "the figure at --url / the figure at the compared endpoint",
    "same_text": "requests that completed at both and gave the same text, of those that completed at both",
    "acceptance_rate": "accepted / drafted tokens, as the server tells with each answer; else by its /metrics, where "
    "other clients' requests count too",
    "mean_acceptance_length": "1 + accepted / verification steps (counts the recovered or bonus token); by /metrics "
    "1 + accepted / drafts",
}


@dataclass(slots=True)
class TrafficRun:
    """One endpoint's measurement, made of one or more stretches of time that are put end to end.

    `counted`: by how much the server's own counters of speculation grew (drafts, drafted, accepted). `price_per_hour`:
    of its devices, as it says (0: it does not), in units of `currency`.
    """

    outcomes: list[Outcome] = field(default_factory=list)
    asked: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0
    sending_s: float = 0.0
    counted: Counter[str] = field(default_factory=Counter)
    price_per_hour: float = 0.0
    currency: str = ""


def summarise_values(values: Sequence[float]) -> dict[str, float] | None:
    """Return mean, median and percentiles (linear between ranks); None of nothing."""
    if not values:
        return None
    found = np.percentile(values, (50, *PERCENTILES))
    names = ("median", *(f"p{rank}" for rank in PERCENTILES))
    return {"mean": float(np.mean(values)), **dict(zip(names, map(float, found), strict=True))}


def latencies_ms(outcomes: Sequence[Outcome]) -> dict[str, list[float]]:
    """Return the samples behind each distribution, of completed requests."""
    good = [outcome for outcome in outcomes if not outcome.error]
    samples_s: dict[str, list[float]] = {
        "ttft_ms": [value for outcome in good if (value := outcome.ttft_s) is not None],
        "tpot_ms": [value for outcome in good if (value := outcome.tpot_s) is not None],
        "itl_ms": [gap for outcome in good for gap in outcome.gaps_s],
        "e2e_ms": [outcome.latency_s for outcome in good],
    }
    return {name: [value * MS_PER_S for value in values] for name, values in samples_s.items()}


def summarise_traffic(
    run: TrafficRun, rate: float | None, slo: Mapping[str, float], price_per_hour: float = 0.0
) -> dict[str, Any]:
    """Return the named figures of a run; None is written where nothing was measured. `price_per_hour`: as given, 0
    where the server's word counts."""
    ended = [outcome for outcome in run.outcomes if outcome.error != INTERRUPTED]
    good = [outcome for outcome in ended if not outcome.error]
    errors = Counter(outcome.error for outcome in ended if outcome.error)
    return {
        "requests": run.asked,
        "completed": len(good),
        "failed": len(ended) - len(good),
        "interrupted": run.asked - len(ended),
        "errors": dict(sorted(errors.items())),
        "error_examples": {kind: next(o.message for o in ended if o.error == kind) for kind in sorted(errors)},
        "duration_s": run.wall_s,
        "requests_per_s": _ratio(len(good), run.wall_s),
        **_tokens(good, run.wall_s),
        **_costs(good, run, price_per_hour),
        **{name: summarise_values(values) for name, values in latencies_ms(ended).items()},
        **_summarise_load(run, rate),
        **_goodput(ended, run.wall_s, slo),
        **_speculation(good, run.counted),
        "generator_cpu_share": _ratio(run.cpu_s, run.wall_s),
    }


def compare_endpoints(runs: Sequence[TrafficRun], summaries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what two endpoints' figures have to do with each other: ratios are the first's / the second's."""
    first, second = summaries
    ratios = {
        f"{name}_{part}": _ratio(first[name][part], second[name][part])
        for name in LATENCIES
        if first[name] and second[name]
        for part in ("mean", "median", "p99")
    }
    ratios |= {
        name: _ratio(first[name], second[name])
        for name in ("requests_per_s", "output_tok_s", "goodput_per_s", "cost_per_million_tokens")
        if first[name] is not None and second[name] is not None
    }
    texts = [{o.number: o.text for o in run.outcomes if not o.error} for run in runs]
    both = texts[0].keys() & texts[1].keys()
    same = sum(texts[0][number] == texts[1][number] for number in both)
    return {"compare": dict(second), "ratios": ratios, "same_text": same, "same_text_of": len(both)}


def _ratio(upper: float, lower: float) -> float | None:
    return upper / lower if lower else None


def _tokens(good: Sequence[Outcome], wall_s: float) -> dict[str, Any]:
    """One missing count makes every sum of tokens a guess, so there is none then."""
    uncounted = sum(outcome.generated is None for outcome in good)
    counted = good and not uncounted
    prompt = sum(outcome.prompt_tokens or 0 for outcome in good)
    output = sum(outcome.generated or 0 for outcome in good)
    events = sum(len(outcome.chunks_s) for outcome in good)
    return {
        "without_token_count": uncounted,
        "without_text": sum(not outcome.chunks_s for outcome in good),
        "prompt_tokens": prompt if counted else None,
        "output_tokens": output if counted else None,
        "output_tok_s": _ratio(output, wall_s) if counted else None,
        "tokens_per_event": _ratio(output, events) if counted else None,
    }


def _summarise_load(run: TrafficRun, rate: float | None) -> dict[str, Any]:
    sent = [outcome for outcome in run.outcomes if outcome.end_s]
    lags_ms = [(outcome.sent_s - outcome.arrival_s) * MS_PER_S for outcome in sent]
    _, running = running_over_time(run.outcomes)
    return {
        "asked_rate_per_s": rate,
        "achieved_rate_per_s": _ratio(len(sent), run.sending_s) if rate else None,
        "send_lag_ms": summarise_values(lags_ms) if rate else None,
        "mean_running": _ratio(sum(outcome.end_s - outcome.arrival_s for outcome in sent), run.wall_s),
        "max_running": max(running, default=0),
    }


def _costs(good: Sequence[Outcome], run: TrafficRun, given: float) -> dict[str, Any]:
    price, tokens = given or run.price_per_hour, sum(outcome.generated or 0 for outcome in good)
    whole = all(outcome.generated is not None for outcome in good)
    known = price and whole and tokens and run.wall_s
    return {
        "price_per_hour": price or None,
        "price_source": "--price-per-hour" if given else "/metrics" if run.price_per_hour else None,
        "currency": run.currency or None,
        "cost_per_million_tokens": compute_cost_per_million(price, tokens / run.wall_s) if known else None,
    }


def _goodput(ended: Sequence[Outcome], wall_s: float, slo: Mapping[str, float]) -> dict[str, Any]:
    if not slo:
        return {"goodput_per_s": None, "slo_attainment": None}
    verdicts = [meets(outcome, slo) for outcome in ended]
    if None in verdicts:
        return {"goodput_per_s": None, "slo_attainment": None}
    met = sum(verdict is True for verdict in verdicts)
    return {"goodput_per_s": _ratio(met, wall_s), "slo_attainment": _ratio(met, len(ended))}


def _speculation(good: Sequence[Outcome], counted: Mapping[str, int]) -> dict[str, Any]:
    """Take what came with the answers; else what the server counted meanwhile, whoever asked for it."""
    told = [outcome for outcome in good if outcome.steps is not None]
    if told:
        source: str | None = "usage"
        drafted, accepted = sum(o.drafted or 0 for o in told), sum(o.accepted or 0 for o in told)
        steps = sum(o.steps or 0 for o in told)
    else:
        source = "/metrics" if counted else None
        drafted, accepted, steps = (counted.get(name, 0) for name in ("drafted", "accepted", "drafts"))
    return {
        "speculation_source": source,
        "drafted_tokens": drafted if source else None,
        "accepted_tokens": accepted if source else None,
        "acceptance_rate": _ratio(accepted, drafted),
        "mean_acceptance_length": 1.0 + accepted / steps if steps else None,
    }


def running_over_time(outcomes: Sequence[Outcome]) -> tuple[list[float], list[int]]:
    """Return the times in seconds at which the number of running requests changed, and the number from then on."""
    changes: Counter[float] = Counter()
    for outcome in outcomes:
        if outcome.end_s > outcome.arrival_s:
            changes[outcome.arrival_s] += 1
            changes[outcome.end_s] -= 1
    times = sorted(changes)
    return times, [int(count) for count in np.cumsum([changes[time] for time in times])]


def output_over_time(outcomes: Sequence[Outcome], bins: int, wall_s: float) -> tuple[list[float], list[float]]:
    """Return the middles of `bins` equal stretches of time in seconds, and output tokens/s in each.

    A request's tokens are spread evenly over its events with text: which event held how many, nobody says.
    """
    times = [time for outcome in outcomes if outcome.generated for time in outcome.chunks_s]
    weights = [o.generated / len(o.chunks_s) for o in outcomes if o.generated for _ in o.chunks_s]
    held, edges = np.histogram(times, bins=bins, range=(0.0, wall_s), weights=weights)
    width_s = wall_s / bins
    return [float(edge) + width_s / 2 for edge in edges[:-1]], [float(tokens) / width_s for tokens in held]


def build_request_rows(run: TrafficRun) -> list[dict[str, Any]]:
    def ms(value_s: float | None) -> float | None:
        return None if value_s is None else value_s * MS_PER_S

    return [
        {
            "key": outcome.key,
            "category": outcome.category,
            "arrival_s": outcome.arrival_s,
            "sent_s": outcome.sent_s,
            "prompt_tokens": outcome.prompt_tokens,
            "generated": outcome.generated,
            "events": len(outcome.chunks_s),
            "ttft_ms": ms(outcome.ttft_s),
            "tpot_ms": ms(outcome.tpot_s),
            "latency_ms": ms(outcome.latency_s),
            "itl_ms": [gap * MS_PER_S for gap in outcome.gaps_s],
            "finish_reason": outcome.finish,
            "error": outcome.error,
            "message": outcome.message,
            "drafted": outcome.drafted,
            "accepted": outcome.accepted,
            "steps": outcome.steps,
        }
        for outcome in run.outcomes
    ]
