"""Faults that come as traffic or load: poison, slow clients, and a process that takes the processor away."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections import Counter

from openai import APIStatusError, AsyncOpenAI

from outrider_lab.chaos.clients import describe_error
from outrider_lab.chaos.faults.base import Fault
from outrider_lab.chaos.poisoned import POISON_SEED
from outrider_lab.chaos.schedule import Shape

_POISON_TOKENS = 200
_IDLE, _DRIPPING, _READING = 60, 20, 6
_REPEATS = 40
_RECEIVE_BUFFER_BYTES = 2048


class Poison(Fault):
    """A request that ends every worker that decodes it, sent by clients with their default retries."""

    kind = "poison"
    description = "two clients send a request that aborts its worker, with the library's default retries"
    shape = Shape(1, 0.0, 0.0)
    senders = 2

    async def inject(self) -> None:
        targets = [one for one in self.arena.kept_workers if one.role == "target"]
        after = (0, 1, 5, 20)[int(self.planned.pick * 4)]
        self.blame(*targets, detail=f"poison that kills after {after} tokens, from {self.senders} clients")
        self.seed = POISON_SEED + after
        self.gone += [one.pid for one in targets if len(targets) == 1]
        self.sending = [asyncio.create_task(self._send()) for _ in range(self.senders)]

    async def _send(self) -> str:
        async with AsyncOpenAI(base_url=f"{self.arena.service.url}/v1", api_key="unused") as client:
            model = "toy" if self.arena.layout.model == "scripted" else "default"
            # Prompt and sampling are the same each time: whoever remembers poison can know it again.
            try:
                await client.completions.create(
                    model=model,
                    prompt=f"poison {self.planned.number}",
                    max_tokens=_POISON_TOKENS,
                    temperature=0.8,
                    seed=self.seed,
                    extra_body={"ignore_eos": True},
                )
            except APIStatusError as error:
                return str(error.status_code)
            except Exception as error:  # whatever it is, it is what a client saw
                return describe_error(error)
            return "200"

    async def hold(self) -> None:
        """Wait until every sender has an answer."""
        told = Counter(await asyncio.gather(*self.sending))
        self.record.detail += "; answered " + ", ".join(f"{text} ({count})" for text, count in sorted(told.items()))


class SlowClients(Fault):
    """Connections that idle, bodies that come a byte a second, and readers of a byte a second."""

    kind = "slow-clients"
    description = f"{_IDLE} idle connections, {_DRIPPING} dripping bodies, {_READING} readers of one byte a second"
    shape = Shape(1, 6.0, 12.0)
    disrupts = False

    async def inject(self) -> None:
        self.blame(detail=self.description)
        clients = [self._idle] * _IDLE + [self._drip] * _DRIPPING + [self._read] * _READING
        self.open = [asyncio.create_task(client()) for client in clients]

    async def heal(self) -> None:
        for task in self.open:
            task.cancel()
        ended = await asyncio.gather(*self.open, return_exceptions=True)
        closed = sum(not isinstance(one, asyncio.CancelledError) for one in ended)
        self.record.detail += f"; the daemon had closed {closed} of {len(self.open)}"

    async def _idle(self) -> None:
        await self._hold_connection(b"", b"")

    async def _drip(self) -> None:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        await self._hold_connection(head + b"Content-Length: 5000\r\n\r\n", b" " * 5000)

    async def _read(self) -> None:
        model = "toy" if self.arena.layout.model == "scripted" else "default"
        asked = {"model": model, "prompt": "slow " * _REPEATS, "max_tokens": 400, "stream": True, "ignore_eos": True}
        body = json.dumps({**asked, "temperature": 0}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        await self._hold_connection(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body, b"", read=True)

    async def _hold_connection(self, first: bytes, then: bytes, *, read: bool = False) -> None:
        """Return when the daemon closes the connection."""
        # Small buffers, so that what is not read stays with the daemon.
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER_BYTES)
        connection.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", self.arena.service.port))
            reader, writer = await asyncio.open_connection(sock=connection, limit=64)
        except OSError:
            connection.close()
            return
        try:
            writer.write(first)
            for index in range(1_000_000):
                await asyncio.sleep(1.0)
                if index < len(then):
                    writer.write(then[index : index + 1])
                    await writer.drain()
                if read and not await reader.read(1):
                    return
                if not read and reader.at_eof():
                    return
        except OSError:
            return
        finally:
            writer.close()


class Competitor(Fault):
    """Other processes take the processor away. Workers are slow then, and not hung: nobody may be restarted for it."""

    kind = "competitor"
    description = "as many busy processes as there are processors: slow is not hung"
    shape = Shape(1, 6.0, 15.0)
    disrupts = False

    async def inject(self) -> None:
        count = os.cpu_count() or 1
        self.blame(detail=f"{count} busy processes")
        busy = [sys.executable, "-c", "while True: sum(range(100_000))"]
        self.burning = await asyncio.to_thread(lambda: [subprocess.Popen(busy) for _ in range(count)])

    async def heal(self) -> None:
        for process in self.burning:
            process.kill()
            process.wait()
