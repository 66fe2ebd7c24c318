"""One real run: its requests through the API, as any client sends them, and what came of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import cycle, pairwise
from statistics import fmean

import numpy as np

from device_profiles.units import MS_PER_S
from orchestrator.worker.measuring.prompts import PromptText
from outrider_lab.bench.errors import BenchError
from outrider_lab.bench.traffic.client import Endpoint, open_client, send_request
from outrider_lab.bench.traffic.drive import arrival_times_s, open_loop, run_closed_loop
from outrider_lab.bench.traffic.outcome import Outcome
from outrider_lab.bench.validation.places import RealPlace
from outrider_lab.bench.validation.runs import ValidationRun

_TIMEOUT_S = 240.0
_LEAST_PAUSE_MS = 250.0
_LATEST_S = 0.5  # behind a fault its first consequence is seen
_PAUSES = 3.0  # times its other gaps: then a request stood still


@dataclass(frozen=True, slots=True)
class RunFigures:
    """What a run came to, real or simulated. `tokens_per_round`: of a sequence, its prompt's left out (0: not told).
    `pause_ms`: mean of the requests that lost their worker; None: none did. `changed_group`: how often one went on with
    other bits."""

    output_tok_s: float
    ttft_ms: float
    tpot_ms: float
    e2e_ms: float
    e2e_p90_ms: float
    goodput_per_s: float
    tokens_per_round: float = 0.0
    pause_ms: float | None = None
    changed_group: float = 0.0


@dataclass(frozen=True, slots=True)
class RealRun:
    """A run that was made. `sent_s`: when each request was sent, from its begin. `ttfts_ms` of each.
    `fault_s`: when something went wrong (-1: nothing did)."""

    figures: RunFigures
    sent_s: Sequence[float]
    ttfts_ms: Sequence[float]
    fault_s: float


def measure_run(
    place: RealPlace,
    run: ValidationRun,
    texts: Sequence[PromptText],
    model: str,
    *,
    max_tokens: int,
    rate: float,
    slo_ms: float,
    seed: int,
) -> RealRun:
    """Make a run. `slo_ms`: which TPOT counts as good. Raises BenchError where a request fails."""
    endpoint, *others = _list_endpoints(place, run, model)
    fields = {"max_tokens": max_tokens, "temperature": 0}
    outcomes: list[Outcome] = []
    faults: list[float] = []

    async def play() -> None:
        async with open_client() as client:
            zero_s = time.perf_counter()
            payloads = [endpoint.payload(one.text, fields) for one in texts]

            def clock() -> float:
                return time.perf_counter() - zero_s

            async def send(number: int, arrival_s: float | None) -> None:
                due_s = clock() if arrival_s is None else arrival_s
                outcome = Outcome(texts[number].key, texts[number].category, number, due_s)
                outcomes.append(outcome)
                if run.fault and number == run.requests // 2:
                    asyncio.get_running_loop().call_later(0.3, fail)
                await send_request(client, endpoint, payloads[number], outcome, _TIMEOUT_S, clock)

            def fail_now() -> None:
                place.fail(run.fault)
                faults.append(clock())

            def fail() -> None:
                asyncio.get_running_loop().run_in_executor(None, fail_now)

            async def keep_busy(other: Endpoint) -> None:
                for one in cycle(texts):
                    payload = other.payload(one.text, fields)
                    await send_request(client, other, payload, Outcome("", ""), _TIMEOUT_S, clock)

            beside = [asyncio.create_task(keep_busy(other)) for other in others for _ in range(run.concurrency)]
            numbers = range(len(texts))
            if run.concurrency:
                await run_closed_loop(send, numbers, run.concurrency)
            else:
                times_s = arrival_times_s(len(texts), rate, run.arrival, 1.0, seed)
                await open_loop(send, numbers, times_s, clock)
            for task in beside:
                task.cancel()

    place.call(lambda: asyncio.run(play()))
    failed = [one for one in outcomes if one.error]
    if failed:
        raise BenchError(f"{run.name}: a request failed: {failed[0].error}: {failed[0].message}")
    outcomes.sort(key=lambda one: one.number)
    fault_s = faults[0] if faults else -1.0
    return RealRun(
        summarise_outcomes(outcomes, fault_s, slo_ms),
        [one.arrival_s for one in outcomes],
        [MS_PER_S * (one.ttft_s or 0.0) for one in outcomes],
        fault_s,
    )


def _list_endpoints(place: RealPlace, run: ValidationRun, model: str) -> list[Endpoint]:
    """Return where the requests go, and what has as many beside them."""
    method = "auto" if run.speculates else "off"
    body = {"speculative_config": {"method": method}, "ignore_eos": run.ignores_ends}
    endpoint = Endpoint(place.url, model, "chat", body=body)
    if run.member < 0:
        return [endpoint]
    members = (run.member, 1 - run.member) if run.beside else (run.member,)
    wanted = [place.find_fingerprint(number) for number in members]
    return [replace(endpoint, body={**body, "system_fingerprint": one}) for one in wanted]


def summarise_outcomes(outcomes: Sequence[Outcome], fault_s: float, slo_ms: float) -> RunFigures:
    """Return the figures of real requests."""
    figures = summarise_times(
        [one.arrival_s for one in outcomes],
        [one.arrival_s + (one.ttft_s or 0.0) for one in outcomes],
        [one.last_s for one in outcomes],
        [one.generated or 0 for one in outcomes],
        slo_ms,
    )
    return replace(
        figures,
        tokens_per_round=_count_round_tokens(outcomes),
        pause_ms=_find_pause_ms(outcomes, fault_s) if fault_s >= 0.0 else None,
        changed_group=sum(one.changes for one in outcomes),
    )


def summarise_times(
    arrivals_s: Sequence[float],
    firsts_s: Sequence[float],
    ends_s: Sequence[float],
    tokens: Sequence[int],
    slo_ms: float,
) -> RunFigures:
    """Return rates over the whole run, and medians of latencies, of requests with these times and tokens each."""
    arrivals, firsts, ends, made = map(np.asarray, (arrivals_s, firsts_s, ends_s, tokens))
    span_s = float(ends.max() - arrivals.min())
    several = made > 1
    tpots = ((ends - firsts)[several] / (made[several] - 1)) * MS_PER_S
    latencies = (ends - arrivals) * MS_PER_S
    return RunFigures(
        output_tok_s=float(made.sum()) / span_s,
        ttft_ms=float(np.median((firsts - arrivals) * MS_PER_S)),
        tpot_ms=float(np.median(tpots)),
        e2e_ms=float(np.median(latencies)),
        e2e_p90_ms=float(np.percentile(latencies, 90)),
        goodput_per_s=float((tpots <= slo_ms).sum()) / span_s,
    )


def _count_round_tokens(outcomes: Sequence[Outcome]) -> float:
    told = [one for one in outcomes if one.steps and one.generated]
    steps = sum(one.steps or 0 for one in told)
    return sum((one.generated or 0) - 1 for one in told) / steps if steps else 0.0


def _find_pause_ms(outcomes: Sequence[Outcome], fault_s: float) -> float | None:
    """Return how long requests stood still behind a fault, on the mean of those that did."""
    pauses = []
    for one in outcomes:
        gaps = list(pairwise(one.chunks_s))
        if not gaps:
            continue
        least_s = max(_LEAST_PAUSE_MS / MS_PER_S, _PAUSES * float(np.median([end - begin for begin, end in gaps])))
        stood = [end for begin, end in gaps if end > fault_s > begin - _LATEST_S and end - begin > least_s]
        pauses += [MS_PER_S * (end - fault_s) for end in stood[:1]]
    return float(np.mean(pauses)) if pauses else None


def average_figures(turns: Sequence[RunFigures]) -> RunFigures:
    pauses = [one.pause_ms for one in turns if one.pause_ms is not None]
    names = [field.name for field in fields(RunFigures) if field.name != "pause_ms"]
    means = {name: fmean(getattr(one, name) for one in turns) for name in names}
    return RunFigures(**means, pause_ms=fmean(pauses) if pauses else None)


def scale_times(one: RunFigures, factor: float) -> RunFigures:
    """Return the TPOT and the TTFT of a run as they would be where all took so many times as long."""
    return replace(one, tpot_ms=factor * one.tpot_ms, ttft_ms=factor * one.ttft_ms)
