"""What a server does for all its clients, as its /metrics tell: which of it is not ours counts where requests go."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

import httpx
from prometheus_client.parser import text_string_to_metric_families

from orchestrator.protocol.rounds import ServerLoad
from orchestrator.worker.endpoint.client import EndpointClient, ServerAway
from orchestrator.worker.endpoint.detection import ServerFacts
from orchestrator.worker.endpoint.dialects import LLAMA_SERVER, SGLANG

READ_EVERY_S: Final = 2.0
"""As often as a look whether it works: a reading takes a server a millisecond."""
_UNTOLD_EVERY_S: Final = 30.0
"""Between two looks at a server that told nothing. Not tuned: somebody may start it again by other options."""
# vLLM's, SGLang's, llama-server's and TGI's; of the last ones vLLM had both.
_RUNNING: Final = (
    "vllm:num_requests_running",
    "sglang:num_running_reqs",
    "llamacpp:requests_processing",
    "tgi_batch_current_size",
)
_WAITING: Final = ("vllm:num_requests_waiting", "sglang:num_queue_reqs", "llamacpp:requests_deferred", "tgi_queue_size")
_KV_USE: Final = (
    "vllm:kv_cache_usage_perc",
    "vllm:gpu_cache_usage_perc",
    "sglang:token_usage",
    "llamacpp:kv_cache_usage_ratio",
)
_WAYS_OUT: Final = {LLAMA_SERVER: "; start it with --metrics", SGLANG: "; start it with --enable-metrics"}


class LoadReader:
    """Reads again and again what a server does. `load` is what it told last."""

    def __init__(self, client: EndpointClient, facts: ServerFacts) -> None:
        self._client = client
        self._facts = facts
        self.load: ServerLoad | None = None

    async def watch(self, count_ours: Callable[[], int], tell: Callable[[], None]) -> None:
        """Read until cancelled. `count_ours`: requests of ours that the server has. `tell`: is called when it told
        something else than before."""
        while True:
            before, self.load = self.load, await self._read(count_ours)
            if self.load != before:
                tell()
            tells_load = self.load is not None and not self.load.untold
            await asyncio.sleep(READ_EVERY_S if tells_load else _UNTOLD_EVERY_S)

    async def _read(self, count_ours: Callable[[], int]) -> ServerLoad | None:
        ours = count_ours()
        try:
            answer = await self._client.get("/metrics")
        except ServerAway:
            return self.load  # whoever looks after its health will see
        ours = max(ours, count_ours())  # some may have come or gone meanwhile: these are nobody else's
        load = parse_load(answer.text, ours, self._facts.slots) if answer.status == httpx.codes.OK else None
        if load is not None:
            return load
        reason = "" if answer.status == httpx.codes.OK else f" (HTTP {answer.status})"
        way_out = _WAYS_OUT.get(self._facts.dialect.engine, "")
        return ServerLoad(untold=f"its /metrics do not tell what it does for others{reason}{way_out}")


def parse_load(text: str, ours: int, slots: int) -> ServerLoad | None:
    """Return what metrics in Prometheus' text form say, where `ours` of the requests are our own. None where they tell
    of no requests. `slots`: see ServerLoad."""
    names = (*_RUNNING, *_WAITING, *_KV_USE)
    lines = [line for line in text.splitlines() if line.startswith(names)]  # the rest may be a thousand lines
    samples: dict[str, list[float]] = {}
    try:
        for family in text_string_to_metric_families("\n".join([*lines, ""])):
            for sample in family.samples:
                samples.setdefault(sample.name, []).append(sample.value)
        running_sum, waiting_sum = int(sum(_find(samples, _RUNNING))), int(sum(_find(samples, _WAITING)))
    except (ValueError, OverflowError):  # a gauge may be NaN, or infinite
        return None
    if not _find(samples, _RUNNING):
        return None
    uses = _find(samples, _KV_USE)
    others = max(0, running_sum + waiting_sum - ours)
    others_waiting = min(waiting_sum, others)
    kv_use = sum(uses) / len(uses) if uses else -1.0
    return ServerLoad(running_sum, waiting_sum, kv_use, others - others_waiting, others_waiting, slots)


def _find(samples: dict[str, list[float]], names: Sequence[str]) -> list[float]:
    """Return the values of the first of these names that is there: one of each engine behind the server."""
    return next((samples[name] for name in names if name in samples), [])
