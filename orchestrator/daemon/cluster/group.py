"""A worker and its parts as one: the parts are started first, all end together, and whatever ends early ends all.

So a target whose layers are in several processes, on several hosts, is one worker to control: a part that is lost is a
worker that is lost, and a worker that is started again has all of its parts anew.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any

import msgspec

from orchestrator.errors import WorkerError, WorkerLost
from orchestrator.protocol.commands import Command, Retune, Stop
from orchestrator.protocol.contract import Worker, WorkerSpec
from orchestrator.protocol.events import Event, Failed, Progress, ShardReady, StillWorking
from orchestrator.protocol.links.address import LinkEndpoint

_PART_GRACE_S = 0.3
"""A part has nothing to finish: what it holds is computed anew. ADR 0083."""

Start = Callable[[WorkerSpec], Awaitable[Worker]]


async def start_group(start: Start, spec: WorkerSpec) -> GroupWorker:
    """Start a worker's parts; it is started itself when they can be called. Raises what `start` raises."""
    parts: list[Worker] = []
    # Who adopted a part from an earlier daemon would have one without its target.
    fresh = secrets.token_hex(8)
    try:
        for part in spec.parts:
            its = msgspec.structs.replace(part, options={**part.options, "start": fresh})
            parts.append(await start(its))
    except BaseException:
        await asyncio.gather(*(part.stop(0.0) for part in parts))
        raise
    return GroupWorker(start, spec, parts)


class GroupWorker:
    """Implements protocol.contract.Worker."""

    def __init__(self, start: Start, spec: WorkerSpec, parts: list[Worker]) -> None:
        self.name = spec.name
        self._start = start
        self._spec = spec
        self._parts = parts
        self._main: Worker | None = None
        self._unsent: list[Command] = []
        self._endpoints: list[LinkEndpoint] = []
        self._stopping = False
        self._messages: asyncio.Queue[tuple[int, Event | WorkerError | None]] = asyncio.Queue()
        self._reading = [asyncio.create_task(self._read(number, part)) for number, part in enumerate(parts)]

    @property
    def where(self) -> str:
        of_parts = ", ".join(part.where for part in self._parts)
        return f"{self._main.where} with {of_parts}" if self._main is not None else of_parts

    @property
    def pids(self) -> list[int]:
        processes = self._parts if self._main is None else [self._main, *self._parts]
        return [pid for process in processes for pid in process.pids]

    def send(self, command: Command) -> None:
        """See protocol.contract.Worker. What comes before the worker is there goes to it first."""
        self._stopping = self._stopping or isinstance(command, Stop)
        if isinstance(command, Retune):
            command = Retune(self._place_endpoints(command.options))
        if self._main is not None:
            self._main.send(command)
        elif self._stopping:
            self._messages.put_nowait((-1, None))
        else:
            self._unsent.append(command)

    async def events(self) -> AsyncIterator[Event]:
        ready: dict[int, LinkEndpoint] = {}
        whole = len(self._parts)
        while True:
            number, message = await self._messages.get()
            if isinstance(message, WorkerError):
                if self._stopping:
                    return
                raise WorkerLost(str(message), message.kind)
            if message is None:  # an end that was asked for
                if number < whole and not self._stopping:
                    raise WorkerLost(f"worker {self._spec.parts[number].name} ended by itself")
                return
            if number == whole:
                yield message
            elif isinstance(message, ShardReady):
                ready[number] = message.endpoint
                if len(ready) == whole:
                    self._endpoints = [ready[part] for part in range(whole)]
                    await self._start_main()
            elif isinstance(message, Failed) or (len(ready) < whole and isinstance(message, Progress | StillWorking)):
                yield self._name_part(number, message)

    async def stop(self, grace_s: float) -> None:
        self._stopping = True
        if self._main is not None:
            await self._main.stop(grace_s)
        self._messages.put_nowait((-1, None))
        await asyncio.gather(*(part.stop(_PART_GRACE_S) for part in self._parts))
        for reading in self._reading:
            reading.cancel()
        for reading in self._reading:
            with suppress(asyncio.CancelledError):
                await reading

    async def _start_main(self) -> None:
        spec = msgspec.structs.replace(self._spec, options=self._place_endpoints(self._spec.options), parts=[])
        try:
            main = await self._start(spec)
        except WorkerError as error:
            raise WorkerLost(str(error), error.kind) from error
        self._main = main
        for command in self._unsent:
            main.send(command)
        self._unsent.clear()
        if self._stopping:  # while it was started
            main.send(Stop())
        self._reading.append(asyncio.create_task(self._read(len(self._parts), main)))

    async def _read(self, number: int, worker: Worker) -> None:
        """Pass on all that a worker says, and how it ends."""
        try:
            async for event in worker.events():
                self._messages.put_nowait((number, event))
        except WorkerError as error:
            self._messages.put_nowait((number, error))
        else:
            self._messages.put_nowait((number, None))

    def _name_part(self, number: int, event: Failed | Progress | StillWorking) -> Event:
        name = self._spec.parts[number].name
        if isinstance(event, Failed):
            return msgspec.structs.replace(event, message=f"{name}: {event.message}")
        return msgspec.structs.replace(event, stage=f"{name}: {event.stage}")

    def _place_endpoints(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return the worker's options with its parts' endpoints at their place."""
        return _place(options, self._spec.endpoints_at, msgspec.to_builtins(self._endpoints))


def _place(options: dict[str, Any], at: list[str], value: object) -> dict[str, Any]:
    first, *rest = at
    return {**options, first: _place(options[first], rest, value) if rest else value}
