"""One target as a daemon starts it, whole or in shards: streams go in, and the rounds that come back are timed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import psutil

from adapters.contract import AdapterError, silent
from adapters.tokenizer import Tokenizer, load_tokenizer
from device_profiles.units import MS_PER_S
from orchestrator.config.model import ClusterConfig
from orchestrator.daemon.cluster.shared_cluster import SharedCluster
from orchestrator.errors import OutriderError, WorkerError
from orchestrator.fitting.worker_options import engine_options, worker_specs
from orchestrator.protocol.commands import Submit
from orchestrator.protocol.contract import Cluster, Worker
from orchestrator.protocol.events import Event, Failed
from orchestrator.protocol.load_options import ModelOptions
from orchestrator.protocol.ready import Ready
from orchestrator.protocol.rounds import Refused, RoundReport
from orchestrator.worker.loading.prepared import load_own_tokenizer
from orchestrator.worker.measuring.prompts import PromptText
from outrider_lab.bench.errors import BenchError
from policies.sampling import Sampling

_STOP_S = 5.0
_LOADED_WITHIN_S = 600.0
_DONE_WITHIN_S = 600.0


@dataclass(frozen=True, slots=True)
class RoundParts:
    """Means of the rounds in which all streams decoded. `beside_ms`: what is neither the runtimes' nor drafting, so the
    way to other processes, sampling, and the loop itself."""

    rounds: int
    tokens: float
    rows: float
    device_ms: float
    draft_ms: float
    beside_ms: float


@dataclass(slots=True)
class StreamRun:
    """What streams that ran together gave. `tokens`: of each; `tokens_per_s`: of all together, each behind its first
    token; `busy`: of each stage, the share of the time that it worked while all streams decoded (empty: one stage)."""

    tokens: list[list[int]]
    tokens_per_s: float
    busy: list[float]
    parts: RoundParts


@dataclass(slots=True)
class _Timed:
    first_s: float = 0.0
    last_s: float = 0.0
    tokens: list[int] = field(default_factory=list)
    finished: bool = False


class MeasuredTarget:
    """A target that runs on a cluster; `ready`: what it said of itself, `tokenizer`: its model's."""

    def __init__(self, worker: Worker, events: Any, ready: Ready, tokenizer: Tokenizer) -> None:
        self.ready = ready
        self._worker = worker
        self._events = events
        self._tokenizer = tokenizer
        self._number = 0

    def encode(self, text: PromptText) -> list[int]:
        """Return a prompt as the chat API encodes it."""
        return self._tokenizer.encode_chat([{"role": "user", "content": text.text}])

    async def run_streams(
        self, prompts: Sequence[list[int]], max_tokens: int, sampling: Sampling, *, drafts: bool
    ) -> StreamRun:
        """Decode prompts together, to the last token that is asked for. Raises BenchError where one is refused."""
        streams: dict[str, _Timed] = {}
        rounds: list[tuple[float, RoundReport]] = []
        for prompt in prompts:
            self._number += 1
            key = f"bench-{self._number}"
            streams[key] = _Timed()
            depth = None if drafts else 0
            self._worker.send(Submit(key, list(prompt), max_tokens, sampling=sampling, depth=depth))
        async with asyncio.timeout(_DONE_WITHIN_S):
            while not all(one.finished for one in streams.values()):
                event: Event = await anext(self._events)
                now_s = time.perf_counter()
                if isinstance(event, Refused | Failed):
                    raise BenchError(f"the target refused a prompt: {event.message}")
                if isinstance(event, RoundReport):
                    rounds.append((now_s, event))
                    for delta in event.deltas:
                        stream = streams[delta.request_id]
                        stream.first_s = stream.first_s or (now_s if delta.tokens else 0.0)
                        stream.last_s = now_s if delta.tokens else stream.last_s
                        stream.tokens += delta.tokens
                        stream.finished = bool(delta.finish)
        timed = list(streams.values())
        rate = sum((len(one.tokens) - 1) / (one.last_s - one.first_s) for one in timed if one.last_s > one.first_s)
        begin_s, end_s = max(stream.first_s for stream in timed), min(stream.last_s for stream in timed)
        inside = [report for at_s, report in rounds if begin_s < at_s <= end_s]
        tokens = [stream.tokens for stream in timed]
        return StreamRun(tokens, rate, _list_busy(inside, end_s - begin_s), _average_parts(inside))

    async def fill(self, rows: int) -> None:
        """Read prompts of every length up to the largest forward, which has so many `rows`, and one that fills the KV
        cache. All of the last is scored, which takes the largest forwards there are."""
        for tokens in range(2, rows):
            await self.run_streams([self._make_prompt(tokens)], 1, Sampling(), drafts=False)
        held = self.ready.kv.blocks * self.ready.kv.block_tokens
        tokens = min(held, self.ready.model.context_tokens) - 2 * self.ready.kv.block_tokens
        self._number += 1
        prompt = self._make_prompt(tokens)
        self._worker.send(Submit(f"bench-{self._number}", prompt, 1, depth=0, prompt_logprobs=True, logprobs=0))
        async with asyncio.timeout(_DONE_WITHIN_S):
            async for event in self._events:
                if isinstance(event, Refused | Failed):
                    raise BenchError(f"the target refused a prompt: {event.message}")
                if isinstance(event, RoundReport) and any(delta.finish for delta in event.deltas):
                    return

    def _make_prompt(self, tokens: int) -> list[int]:
        return [self._number % 7 + 40 + one % 50 for one in range(tokens)]

    def read_memory(self) -> list[tuple[int, int]]:
        """Return for each process of layers, where they are on this machine and their costs are known, the bytes that
        were planned and those that it held at its peak."""
        found = []
        for pid, planned in zip(self.ready.shards.pids, self.ready.shards.planned_bytes, strict=True):
            peak = _read_peak_bytes(pid)
            if planned and peak:
                found.append((planned, peak))
        return found


def _list_busy(rounds: Sequence[RoundReport], took_s: float) -> list[float]:
    """Return each stage's share of busy time of the time that rounds took."""
    stages = max((len(report.stage_ms) for report in rounds), default=0)
    if stages < 2:
        return []
    worked_ms = [sum(report.stage_ms[stage] for report in rounds if report.stage_ms) for stage in range(stages)]
    return [ms / MS_PER_S / took_s for ms in worked_ms]


def _average_parts(rounds: Sequence[RoundReport]) -> RoundParts:
    count = max(1, len(rounds))
    return RoundParts(
        len(rounds),
        sum(len(delta.tokens) for report in rounds for delta in report.deltas) / count,
        sum(report.rows for report in rounds) / count,
        sum(report.device_ms for report in rounds) / count,
        sum(report.draft_ms for report in rounds) / count,
        sum(report.round_ms - report.device_ms - report.draft_ms for report in rounds) / count,
    )


def _read_peak_bytes(pid: int) -> int:
    """Return the most that a process here held, 0 where it is not here."""
    with suppress(OSError, ValueError, psutil.Error):
        for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


async def _load_tokenizer(options: ModelOptions, ready: Ready) -> Tokenizer:
    """Return the tokenizer of the model that a worker has loaded, made on this host. Raises AdapterError."""
    if ready.model.identity is None:
        return load_tokenizer("")
    return await asyncio.to_thread(
        load_own_tokenizer, msgspec.structs.replace(options, identity=ready.model.identity), silent
    )


class TargetRun:
    """Starts the target of a configuration on a cluster, and stops it; an asynchronous context."""

    def __init__(self, cluster: Cluster, config: ClusterConfig) -> None:
        self._share = SharedCluster(cluster).share()
        self._config = config
        self._worker: Worker | None = None

    async def __aenter__(self) -> MeasuredTarget:
        """Return the target once it is ready. Raises BenchError."""
        await self._share.open()
        try:
            # Prompts come more than once: none may find another's prefill done.
            options = msgspec.structs.replace(engine_options(self._config, Path()), prefix_reuse=False)
            (spec,) = worker_specs(options, self._config)
            self._worker = worker = await self._share.start(spec)
            events = worker.events()
            async with asyncio.timeout(_LOADED_WITHIN_S):
                async for event in events:
                    if isinstance(event, Failed):
                        raise BenchError(f"the target cannot be loaded: {event.message}")
                    if isinstance(event, Ready):
                        return MeasuredTarget(worker, events, event, await _load_tokenizer(options.model, event))
            raise BenchError("the target ended before it was ready")
        except (AdapterError, OutriderError, TimeoutError) as error:
            await self.__aexit__()
            raise error if isinstance(error, BenchError) else BenchError(f"the target: {error}") from error

    async def __aexit__(self, *_: object) -> None:
        """End the target and what the cluster started."""
        with suppress(WorkerError):
            if self._worker is not None:
                await self._worker.stop(_STOP_S)
            await self._share.close()
