"""Whether the server of an endpoint works, and is still the one that was found."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from orchestrator.clock import Clock
from orchestrator.protocol.load_options import EndpointOptions
from orchestrator.worker.endpoint.client import EndpointClient, ServerAway
from orchestrator.worker.endpoint.detection import ServerFacts, WrongServer, find_server

_LOOK_EVERY_S: Final = 2.0
"""Between two looks whether the server works, while it says nothing by itself."""
_SAME_EVERY_S: Final = 10.0
"""Between two looks whether it is still the same."""
_LOOKS: Final = 2
"""So many in a row without an answer, and the server is away."""


class ServerHealth:
    """Looks whether a server works, where it does not say so by itself, and whether it is still the same."""

    def __init__(self, client: EndpointClient, facts: ServerFacts, options: EndpointOptions, clock: Clock) -> None:
        self._client = client
        self._facts = facts
        self._options = options
        self._clock = clock
        self._same_s = clock.monotonic_s()

    async def is_alive(self) -> bool:
        """Ask it, twice where it does not answer."""
        for _ in range(_LOOKS):
            if not await self._find_fault():
                return True
        return False

    async def watch(self, list_quiet: Callable[[], list[float]]) -> None:
        """Look again and again. Raises ServerAway once it does not answer, or is another one, and KeyRefused."""
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            now_s = self._clock.monotonic_s()
            quiet = list_quiet()
            if quiet and now_s - max(quiet) < _LOOK_EVERY_S:
                continue  # it speaks
            faults: list[str] = []
            while len(faults) < _LOOKS and (fault := await self._find_fault()):
                faults.append(fault)
            if len(faults) == _LOOKS:
                raise ServerAway(faults[-1])
            if now_s - self._same_s >= _SAME_EVERY_S:
                self._same_s = now_s
                await self._check_same()

    async def _find_fault(self) -> str:
        try:
            answer = await self._client.get(self._facts.health)
        except ServerAway as error:
            return str(error)
        return f"it answers {self._facts.health} with HTTP {answer.status}" if answer.status >= 500 else ""

    async def _check_same(self) -> None:
        try:
            facts = await find_server(self._client, self._options.name, self._options.engine)
        except WrongServer as error:
            raise ServerAway(str(error)) from error
        if facts.identity != self._facts.identity:
            raise ServerAway("another build or model answers there now")
