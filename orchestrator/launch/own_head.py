"""Ray's head as a daemon keeps it: started where nobody is the head at its address, and again whenever it ends."""

from __future__ import annotations

import asyncio
import os
import secrets

from orchestrator.errors import WorkerError
from orchestrator.launch.node_keeper import NodeKeeper, NodeState
from orchestrator.launch.ray_settings import SessionDirectory, driver_environment, read_token, save_token, split_address
from orchestrator.launch.ray_tls import write_certificates
from orchestrator.telemetry import get_logger

# Of the first start: 5 s on two cores, and a busy machine takes its time. Not tuned.
_START_TIMEOUT_S = 90.0
# ADR 0146: Ray's own defaults take 15 s to find a killed node, and 65 s one that is cut off.
_HEALTH_CHECKS = {
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "5",
}

_log = get_logger(__name__)


class OwnHead:
    """The head at an address of this machine. `needs_token`: whether it asks for one; where there is none, `open` makes
    it."""

    def __init__(self, address: str, *, needs_token: bool) -> None:
        self._address = address
        self._needs_token = needs_token
        self._keeping: asyncio.Task[None] | None = None
        self._joined = asyncio.Event()
        self._why = ""
        self._directory: SessionDirectory | None = None
        self.variables: dict[str, str] = {}
        """By which the driver process finds its certificates."""

    async def open(self) -> None:
        """Start it, and wait until it answers. Raises WorkerError. Idempotent."""
        if self._keeping is not None:
            return
        if self._needs_token and not read_token(os.environ):
            _log.info("ray token made", path=str(save_token(secrets.token_hex(32), os.environ)))
        environment = driver_environment(self._address, has_token=self._needs_token, environment=os.environ)
        place = split_address(self._address)
        assert place is not None  # noqa: S101 -- config.cluster_checks
        if self._needs_token:
            self._directory = await asyncio.to_thread(SessionDirectory)
            token = read_token(os.environ)
            self.variables = write_certificates(self._directory.path, token, [place[0]])
        keeper = NodeKeeper(self._address, _HEALTH_CHECKS | environment, self._observe, is_head=True)
        self._keeping = asyncio.create_task(keeper.keep_node(), name="keep Ray's head")
        joined = asyncio.create_task(self._joined.wait(), name="wait for Ray's head")
        try:
            await asyncio.wait([self._keeping, joined], timeout=_START_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
            if not self._joined.is_set():
                await self._fail()
        finally:
            joined.cancel()

    async def close(self) -> None:
        """End it, if it is this one that runs. Idempotent."""
        keeping, self._keeping = self._keeping, None
        if keeping is not None:
            keeping.cancel()
            await asyncio.wait([keeping])
        directory, self._directory = self._directory, None
        if directory is not None:
            await asyncio.to_thread(directory.remove)

    async def _fail(self) -> None:
        keeping = self._keeping
        await self.close()
        if keeping is not None and not keeping.cancelled() and (error := keeping.exception()) is not None:
            raise error
        reason = self._why or f"it did not answer within {_START_TIMEOUT_S:g} s"
        raise WorkerError(f"Ray's head at {self._address} cannot be started: {reason}")

    def _observe(self, state: NodeState) -> None:
        if state.phase == "joined":
            if not self._joined.is_set():
                _log.info("ray head", address=self._address)
            self._joined.set()
        elif state.phase == "waiting":
            self._why = state.why
            self._joined.clear()
            _log.warning("ray head ended", reason=state.why)
