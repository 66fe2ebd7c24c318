"""Who asks for a reload, one after the other: SIGHUP and commands. systemd and the log hear what came of each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from orchestrator.daemon.api.keys import Keys
from orchestrator.daemon.api.tls import Certificate
from orchestrator.daemon.bootstrap.reload import Reloader
from orchestrator.daemon.systemd.notify import Notifier
from orchestrator.errors import ConfigError, RequestError
from orchestrator.telemetry import get_logger

_log = get_logger(__name__)
_T = TypeVar("_T")


class ReloadQueue:
    """Reloads that are under way or wait. Until `open` and from `close` on only the files of keys and certificate are
    read again, by `reread`, which says why any stays as it was. A SIGHUP before `open` is made good then."""

    def __init__(self, reloader: Reloader, notifier: Notifier, reread: Callable[[], list[str]]) -> None:
        self._reloader = reloader
        self._notifier = notifier
        self._reread = reread
        self._tasks: set[asyncio.Task[Any]] = set()
        self._serves = self._ends = self._waits = False

    def open(self) -> None:
        """The daemon serves: cluster.yaml is reloaded, too."""
        self._serves = True
        if self._waits:
            self._begin(self._reload_for_signal())

    async def close(self) -> None:
        """Reload no more: what is under way is given up."""
        self._serves, self._ends = False, True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def observe_hangup(self) -> None:
        """SIGHUP: reload. Nobody waits for what comes of it, so that the log and the status tell."""
        if self._serves or self._ends:
            self._begin(self._reload_for_signal())
            return
        self._waits, self._reloader.last = True, "cluster.yaml is read again when the daemon serves"
        _log.info(self._reloader.last)
        self._reread()

    async def reload(self, check: bool) -> dict[str, Any]:
        """Reload for a command, to the end also where nobody waits for it any more; returns what has changed. `check`:
        changes nothing. Raises RequestError where the file cannot be used."""
        return await asyncio.shield(self._begin(self._reload_for_command(check=check)))

    def _begin(self, work: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _reload_for_signal(self) -> None:
        async with self._reloader.lock:
            try:
                await self._reload()
            except ConfigError:  # it was told already
                return
            except Exception:
                _log.exception("a reload failed")

    async def _reload_for_command(self, *, check: bool) -> dict[str, Any]:
        async with self._reloader.lock:
            try:
                return await (self._reloader.reload(check=True) if check else self._reload())
            except ConfigError as error:
                raise RequestError(str(error), status=422, code="bad_configuration") from error

    async def _reload(self) -> dict[str, Any]:
        """Take all files as they are now; returns what has changed. Raises ConfigError with why nothing has."""
        self._notifier.begin_reload()
        problems = self._reread()
        answer: dict[str, Any] = {}
        try:
            if not self._serves:
                raise ConfigError("cluster.yaml is not read again: the daemon starts or ends; reload when it serves")
            answer = await self._reloader.reload()
        except ConfigError as error:
            _log.error("the configuration stays as it was", reason=str(error))
            problems.append(str(error))
        finally:
            self._notifier.end_reload("; ".join(problems))
        if problems:
            raise ConfigError("\n".join(dict.fromkeys(problems)))
        return answer


def reread_files(keys: Keys | None, certificate: Certificate | None) -> list[str]:
    """Take keys and certificate as they are now; returns why any stays as it was."""
    problems = []
    if keys is not None:
        try:
            keys.reread()
            _log.info("keys read", keys=len(keys))
        except ConfigError as error:
            _log.error("the keys stay as they were", reason=str(error))
            problems.append(str(error))
    if certificate is not None:
        try:
            certificate.reread()
            _log.info("certificate read")
        except ConfigError as error:
            _log.error("the certificate stays as it was", reason=str(error))
            problems.append(str(error))
    return problems
