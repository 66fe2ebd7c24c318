"""The engine of an endpoint's worker: it holds no model. A server has it, and is asked over HTTP."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from math import ceil
from typing import Any, Final

import msgspec
import psutil

from adapters.errors import AdapterError
from device_profiles.units import MS_PER_S, ceil_div
from orchestrator.clock import Clock, SystemClock
from orchestrator.machine.process_memory import peak_rss_bytes
from orchestrator.protocol.commands import Cancel, Command, MoveOut, Retune, Stop, Submit
from orchestrator.protocol.contract import Step
from orchestrator.protocol.events import Event, Failed, MovedOut, Progress, Retuned
from orchestrator.protocol.failures import describe_loading_failure
from orchestrator.protocol.load_options import EndpointOptions
from orchestrator.protocol.rounds import Delta, Gauges, RoundReport
from orchestrator.worker.endpoint.checks import check_server
from orchestrator.worker.endpoint.client import EndpointClient, KeyRefused, ServerAway, ServerError
from orchestrator.worker.endpoint.detection import ServerFacts, WrongServer, find_server
from orchestrator.worker.endpoint.health import ServerHealth
from orchestrator.worker.endpoint.model import (
    BLOCK_TOKENS,
    EndpointModel,
    build_ready,
    count_slots,
    prepare_endpoint_model,
)
from orchestrator.worker.endpoint.requests import RemoteRequest, RequestRunner
from orchestrator.worker.endpoint.server_load import LoadReader

Emit = Callable[[Event], None]

# As often as a worker of ours says its gauges.
TICK_S: Final = 0.25
# Between two looks for a server that is not there. Not tuned: its load takes longer.
_AWAY_PAUSE_S: Final = 1.0
# Between two words of one who waits for a server: control hears them as signs of life.
_SAY_EVERY_S: Final = 10.0
_TICK_MS: Final = 2000.0
"""Within which this process says something while it has requests, whatever the server does."""


def build_endpoint_engine(options: dict[str, Any]) -> EndpointEngine:
    """Return the engine of an endpoint's worker. Called inside the worker process."""
    return EndpointEngine(msgspec.convert(options, EndpointOptions), SystemClock())


class EndpointEngine:
    """Implements protocol.contract.Engine. All but `submit` and `describe_step` runs in the worker's main thread."""

    def __init__(self, options: EndpointOptions, clock: Clock) -> None:
        self._options = options
        self._clock = clock
        self._started_s = clock.monotonic_s()
        self._commands: queue.SimpleQueue[tuple[Command, float]] = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake = asyncio.Event()
        self._step: Step | None = Step("load", -1.0)
        self._process = psutil.Process()
        self._requests: dict[str, RemoteRequest] = {}
        self._deltas: list[Delta] = []
        self._flushed_s = 0.0
        self._rounds = 0
        self._gauges_s = 0.0
        self._fault: Exception | None = None
        self._reader: LoadReader | None = None

    def submit(self, command: Command) -> None:
        """See protocol.contract.Engine."""
        self._commands.put((command, self._clock.monotonic_s()))
        if (loop := self._loop) is not None:
            with suppress(RuntimeError):  # it has ended
                loop.call_soon_threadsafe(self._wake.set)

    def describe_step(self) -> Step | None:
        return self._step

    def run(self, emit: Emit) -> None:
        """See protocol.contract.Engine."""
        try:
            model = prepare_endpoint_model(self._options.model, lambda stage, fraction: emit(Progress(stage, fraction)))
            asyncio.run(self._serve(model, emit))
        except AdapterError as error:
            emit(describe_loading_failure(error))

    async def _serve(self, model: EndpointModel, emit: Emit) -> None:
        options = self._options
        self._loop = asyncio.get_running_loop()
        self._wake.set()  # for what was queued before
        try:
            client = EndpointClient(options.url, options.key_file)
        except OSError as error:
            emit(_describe_configuration(f"{options.key_file}: the key cannot be read: {error.strerror}"))
            return
        try:
            facts = await self._find_server(client, model, emit)
            if facts is not None:
                await self._work(client, facts, model, emit)
        except (WrongServer, KeyRefused) as error:
            emit(_describe_configuration(_describe_error(options, error)))
        except ServerAway as error:
            emit(_describe_away(options, error))
        finally:
            await client.close()

    async def _find_server(self, client: EndpointClient, model: EndpointModel, emit: Emit) -> ServerFacts | None:
        """Wait until the server answers and is found right; None where the worker is stopped before."""
        self._step = None  # who waits for another machine is not to be watched
        looking = asyncio.create_task(self._look_for_server(client, model, emit))
        looking.add_done_callback(lambda _: self._wake.set())
        while not looking.done():
            if await self._is_stopped(_SAY_EVERY_S):
                looking.cancel()
                return None
            if not looking.done():
                emit(Progress(f"waits for {self._options.url}", -1.0))
        facts = looking.result()
        emit(build_ready(self._options, model, facts, self._clock.monotonic_s() - self._started_s))
        return facts

    async def _look_for_server(self, client: EndpointClient, model: EndpointModel, emit: Emit) -> ServerFacts:
        options = self._options
        while True:
            try:
                facts = await find_server(client, options.name, options.engine)
                facts = await check_server(client, facts, model.tokenizer)
                if not facts.context_tokens:  # some tell it once they have loaded the model
                    loaded = await find_server(client, options.name, options.engine)
                    facts = replace(facts, context_tokens=loaded.context_tokens)
            except (WrongServer, KeyRefused):
                raise
            except ServerError as error:
                emit(Progress(f"waits for {options.url}: {error}", -1.0))
            else:
                return facts
            await asyncio.sleep(_AWAY_PAUSE_S)

    async def _is_stopped(self, within_s: float) -> bool:
        """Wait, and return whether the worker is to end. Before it is ready there is no other command."""
        try:
            await asyncio.wait_for(self._wake.wait(), within_s)
        except TimeoutError:
            return False
        self._wake.clear()
        while not self._commands.empty():
            if isinstance(self._commands.get()[0], Stop):
                return True
        return False

    async def _work(self, client: EndpointClient, facts: ServerFacts, model: EndpointModel, emit: Emit) -> None:
        """Serve requests until the worker is stopped. Raises ServerAway, KeyRefused, and what a request broke on."""
        health = ServerHealth(client, facts, self._options, self._clock)
        slots, context = count_slots(self._options, facts), model.find_context(facts)
        runner = RequestRunner(
            *(client, facts, model.tokenizer, self._clock, context),
            tell=lambda request, tokens, finish: self._tell(request, tokens, finish, emit),
            is_alive=health.is_alive,
        )
        places, blocks = asyncio.Semaphore(slots), slots * ceil_div(context, BLOCK_TOKENS)
        self._reader = reader = LoadReader(client, facts)
        emit(self._count(blocks))
        watching = asyncio.create_task(health.watch(self._list_quiet))
        watching.add_done_callback(lambda _: self._wake.set())
        reading = asyncio.create_task(reader.watch(self._count_sent, lambda: emit(self._count(blocks))))
        try:
            while self._obey_all(places, runner, emit):
                busy = bool(self._requests)
                self._step = Step("round", _TICK_MS) if busy else None
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), TICK_S if busy else None)
                self._wake.clear()
                if busy:
                    self._tell_gauges(blocks, emit)
                if self._fault is not None:
                    raise self._fault
                if watching.done():
                    watching.result()
        finally:
            watching.cancel()
            reading.cancel()
            for request in list(self._requests.values()):
                request.cancel()

    def _obey_all(self, places: asyncio.Semaphore, runner: RequestRunner, emit: Emit) -> bool:
        """Carry out what is queued. False: stop."""
        while not self._commands.empty():
            command, arrived_s = self._commands.get()
            if isinstance(command, Stop):
                return False
            if isinstance(command, Submit):
                self._begin(RemoteRequest(command, arrived_s, list(command.committed)), places, runner, emit)
            else:
                self._obey(command, emit)
        return True

    def _begin(self, request: RemoteRequest, places: asyncio.Semaphore, runner: RequestRunner, emit: Emit) -> None:
        refusal = runner.find_refusal(request.submit)
        if refusal is not None:
            emit(refusal)
            return
        self._requests[request.submit.request_id] = request
        request.task = asyncio.create_task(self._follow(request, places, runner, emit))

    async def _follow(
        self, request: RemoteRequest, places: asyncio.Semaphore, runner: RequestRunner, emit: Emit
    ) -> None:
        try:
            async with places:
                request.admitted_s = self._clock.monotonic_s()
                if not request.submit.max_tokens:
                    self._tell(request, [], "length", emit)
                elif (refusal := await runner.run(request)) is not None:
                    self._flush(emit)
                    emit(refusal)
        except Exception as error:  # the worker ends with it: else its client would wait for ever
            self._fault = error
        finally:
            if self._requests.get(request.submit.request_id) is request:
                del self._requests[request.submit.request_id]
            self._wake.set()

    def _obey(self, command: Command, emit: Emit) -> None:
        if isinstance(command, Cancel | MoveOut):
            request = self._requests.pop(command.request_id, None)
            if request is not None:
                request.cancel()
        if isinstance(command, MoveOut):
            emit(MovedOut(command.request_id, None, 0.0, "its KV cache is another engine's"))
        if isinstance(command, Retune):
            emit(Retuned(None, "another engine decodes: it takes no options of ours"))

    def _tell(self, request: RemoteRequest, tokens: list[int], finish: str, emit: Emit) -> None:
        """Say what came for a request. A first token is told at once, as a prefill; others with those of other requests
        that came at the same time."""
        is_first = request.steps == 1 and bool(tokens)
        if is_first or finish:
            self._flush(emit)
        self._deltas.append(request.make_delta(tokens, finish))
        if is_first:
            rows = max(1, len(request.submit.prompt) + len(request.submit.committed) - request.cached)
            self._report(emit, 1, rows + 2, (request.first_s - request.sent_s) * MS_PER_S)
        elif finish:
            self._flush(emit)
        elif len(self._deltas) == 1:
            asyncio.get_running_loop().call_soon(self._flush, emit)

    def _flush(self, emit: Emit) -> None:
        if self._deltas:
            decoding = sum(request.first_s > 0.0 for request in self._requests.values())
            since_s = max(
                self._flushed_s,
                min((request.first_s for request in self._requests.values() if request.first_s), default=0.0),
            )
            self._report(emit, max(1, decoding), max(1, decoding), (self._clock.monotonic_s() - since_s) * MS_PER_S)

    def _report(self, emit: Emit, sequences: int, rows: int, round_ms: float) -> None:
        deltas, self._deltas, self._flushed_s = self._deltas, [], self._clock.monotonic_s()
        self._rounds += 1
        emit(RoundReport(deltas, sequences, rows, 0, 0, 0, [], max(0.0, round_ms), 0.0, 0.0))

    def _tell_gauges(self, blocks: int, emit: Emit) -> None:
        """Say how many requests there are, a few times a second and once there is none."""
        now_s = self._clock.monotonic_s()
        if now_s - self._gauges_s >= TICK_S or not self._requests:
            self._gauges_s = now_s
            emit(self._count(blocks))

    def _count(self, total_blocks: int) -> Gauges:
        used = sum(ceil_div(request.length, BLOCK_TOKENS) for request in self._requests.values() if request.admitted_s)
        running = sum(request.admitted_s > 0.0 for request in self._requests.values())
        load = self._reader.load if self._reader is not None else None
        if load is not None and load.kv_use > 0.0:  # what others have of it is not free
            used = max(used, ceil(load.kv_use * total_blocks))
        return Gauges(
            running=running,
            waiting=len(self._requests) - running,
            free_blocks=max(0, total_blocks - used),
            total_blocks=total_blocks,
            preemptions=0,
            drafter_bytes=0,
            rounds=self._rounds,
            rss_bytes=self._process.memory_info().rss,
            peak_rss_bytes=peak_rss_bytes(),
            server=load,
        )

    def _count_sent(self) -> int:
        """Return how many requests the server has of ours."""
        return sum(request.sent_s > 0.0 for request in self._requests.values())

    def _list_quiet(self) -> list[float]:
        """Return since when each request that the server has says nothing."""
        return [request.heard_s for request in self._requests.values() if request.sent_s]


def _describe_configuration(message: str) -> Failed:
    return Failed(message, restartable=False, kind="configuration")


def _describe_away(options: EndpointOptions, error: ServerError) -> Failed:
    return Failed(f"{options.url} is away: {error}", restartable=True, kind="endpoint")


def _describe_error(options: EndpointOptions, error: Exception) -> str:
    if isinstance(error, KeyRefused):
        key = f"the key in {options.key_file}" if options.key_file else "requests without a key; set api_key_file"
        return f"{options.url} refuses {key} ({error})"
    return f"{options.url} cannot serve {options.model.name or options.model.source}: {error}"
