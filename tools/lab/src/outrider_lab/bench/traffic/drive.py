"""Sends requests in a closed or an open loop, all from one event loop, at one endpoint or at two in turns."""

from __future__ import annotations

import asyncio
import dataclasses
import signal
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import httpx
import numpy as np

from orchestrator.worker.measuring.prompts import PromptText, spread
from outrider_lab.bench.traffic.client import Endpoint, open_client, send_request
from outrider_lab.bench.traffic.counters import fetch_server_figures
from outrider_lab.bench.traffic.figures import TrafficRun
from outrider_lab.bench.traffic.outcome import Outcome

# (number of the request, when it arrives in seconds, None: now)
Send = Callable[[int, float | None], Coroutine[Any, Any, None]]
OPEN_LOOP_TURNS = 4
CLOSED_LOOP_ROUNDS_A_TURN = 4


@dataclass(frozen=True, slots=True)
class TrafficLoad:
    """The load asked for: `rate` requests a second (open loop), or `concurrency` at a time where there is no rate."""

    prompts: Sequence[PromptText]
    fields: dict[str, Any]
    seed: int
    timeout_s: float
    warmup: int
    concurrency: int
    rate: float | None
    arrival: Arrival
    burstiness: float


async def run_closed_loop(send: Send, numbers: Sequence[int], concurrency: int) -> None:
    """Keep `concurrency` requests under way: the next is sent when one ends."""
    waiting = iter(numbers)

    async def one_after_another() -> None:
        for number in waiting:
            await send(number, None)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(numbers))):
            group.create_task(one_after_another())


async def open_loop(send: Send, numbers: Sequence[int], times_s: Sequence[float], clock: Callable[[], float]) -> None:
    """Send each request at its time, whatever became of those before it."""
    async with asyncio.TaskGroup() as group:
        for number, time_s in zip(numbers, times_s, strict=True):
            await asyncio.sleep(max(0.0, time_s - clock()))
            group.create_task(send(number, time_s))


def turns(count: int, endpoints: int, load: TrafficLoad) -> list[range]:
    """Return the requests of each turn: all at once for one endpoint, in stretches where two take turns."""
    if endpoints == 1:
        size = count
    elif load.rate is None:
        size = load.concurrency * CLOSED_LOOP_ROUNDS_A_TURN
    else:
        size = -(-count // OPEN_LOOP_TURNS)
    return [range(start, min(start + size, count)) for start in range(0, count, size)]


async def measure_endpoints(
    endpoints: Sequence[Endpoint], load: TrafficLoad, ended: Callable[[Outcome], None]
) -> list[TrafficRun]:
    """Return a run for each endpoint. SIGINT ends the measurement early; what was measured is returned.

    `ended` is called after each request that counts.
    """
    runs = [TrafficRun(asked=len(load.prompts)) for _ in endpoints]
    task = asyncio.ensure_future(_measure(endpoints, load, runs, ended))
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, task.cancel)
    try:
        with suppress(asyncio.CancelledError):
            await task
    finally:
        loop.remove_signal_handler(signal.SIGINT)
    return runs


async def _measure(
    endpoints: Sequence[Endpoint], load: TrafficLoad, runs: Sequence[TrafficRun], ended: Callable[[Outcome], None]
) -> None:
    async with open_client() as client:
        for endpoint in endpoints:
            await Stretch(client, endpoint, _warmup_of(load), TrafficRun(), lambda _: None).run(
                range(load.warmup), rate=None
            )
        stretches = [Stretch(client, endpoint, load, run, ended) for endpoint, run in zip(endpoints, runs, strict=True)]
        for turn, numbers in enumerate(turns(len(load.prompts), len(endpoints), load)):
            # Who goes first alternates, so that a drift of the machine meets both.
            for stretch in stretches if turn % 2 == 0 else reversed(stretches):
                await stretch.run(numbers, load.rate)


def _warmup_of(load: TrafficLoad) -> TrafficLoad:
    """Return the load with a number before each prompt, so that no prefix cache holds the prompts that count."""
    texts = [
        dataclasses.replace(prompt, text=f"{number}. {prompt.text}")
        for number, prompt in enumerate(spread(load.prompts, load.warmup))
    ]
    return dataclasses.replace(load, prompts=texts)


class Stretch:
    """Requests to one endpoint; each stretch of time begins where the run's last one ended."""

    def __init__(
        self,
        client: httpx.AsyncClient,
        endpoint: Endpoint,
        load: TrafficLoad,
        run: TrafficRun,
        ended: Callable[[Outcome], None],
    ) -> None:
        self._client = client
        self._endpoint = endpoint
        self._load = load
        self._run = run
        self._ended = ended
        self._zero_s = 0.0
        self._payloads: dict[int, bytes] = {}

    async def run(self, numbers: Sequence[int], rate: float | None) -> None:
        """Send these requests and wait for their ends; time and CPU count however this ends."""
        load, run = self._load, self._run
        self._payloads = {number: self._payload(number) for number in numbers}  # before the clock runs
        before = await fetch_server_figures(self._client, self._endpoint.url, self._endpoint.headers)
        offset_s, cpu_s = run.wall_s, time.process_time()
        self._zero_s = time.perf_counter() - offset_s
        try:
            if rate is None:
                await run_closed_loop(self._send, numbers, load.concurrency)
            else:
                gaps_s = arrival_times_s(len(numbers), rate, load.arrival, load.burstiness, load.seed + numbers[0])
                await open_loop(self._send, numbers, [offset_s + gap_s for gap_s in gaps_s], self._clock)
        finally:
            run.wall_s = self._clock()
            run.cpu_s += time.process_time() - cpu_s
            run.sending_s += max((o.sent_s for o in run.outcomes), default=offset_s) - offset_s
        after = await fetch_server_figures(self._client, self._endpoint.url, self._endpoint.headers)
        run.counted += after.speculation - before.speculation
        told = after if after.price_per_hour else before
        run.price_per_hour, run.currency = told.price_per_hour, told.currency

    def _clock(self) -> float:
        return time.perf_counter() - self._zero_s

    def _payload(self, number: int) -> bytes:
        fields = {**self._load.fields, "seed": self._load.seed + number}
        return self._endpoint.payload(self._load.prompts[number].text, fields)

    async def _send(self, number: int, arrival_s: float | None) -> None:
        prompt = self._load.prompts[number]
        due_s = self._clock() if arrival_s is None else arrival_s
        outcome = Outcome(prompt.key, prompt.category, number, due_s)
        self._run.outcomes.append(outcome)
        await send_request(
            self._client, self._endpoint, self._payloads[number], outcome, self._load.timeout_s, self._clock
        )
        self._ended(outcome)


Arrival = Literal["poisson", "constant"]


def arrival_times_s(count: int, rate: float, arrival: Arrival, burstiness: float, seed: int) -> list[float]:
    """Return `count` arrival times in seconds from the start; the last is at count / rate.

    `poisson` draws the gaps from a gamma distribution of shape `burstiness` and mean 1 / rate. It then scales them so
    that the asked rate is met exactly. `vllm bench serve` does both so. A `burstiness` of 1 is a Poisson process, less
    than 1 more bursty, more than 1 more even (coefficient of variation 1 / sqrt(burstiness)). `constant` has equal
    gaps.
    """
    if arrival == "constant":
        gaps = np.full(count, 1.0)
    else:
        # Gaps of an extreme shape may all be 0 in float64; the floor keeps their sum a divisor.
        gaps = np.maximum(np.random.default_rng(seed).gamma(burstiness, 1.0 / burstiness, count), 1e-12)
    ends = np.cumsum(gaps)
    return [float(end) for end in ends * (count / rate / ends[-1])]
