"""Connects to a draft worker in the background, as often as it takes."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from adapters.framing import ProtocolError
from device_profiles.units import MS_PER_S
from orchestrator.machine.cores import effective_cores
from orchestrator.protocol.draft_messages import DraftLink
from orchestrator.protocol.links.address import LinkEndpoint
from orchestrator.protocol.links.endpoint import GREETING_S, LinkLost, host_id, knock
from orchestrator.worker.drafting.protocol import VERSION, Hello, Link, Welcome

# ADR 0017: in the background, so it only says how soon drafts come back. Not tuned.
FIRST_BACKOFF_S = 0.05
# ADR 0017. Not tuned.
MAX_BACKOFF_S = 2.0


class Refusal(Exception):
    """The draft worker cannot serve this target; trying again changes nothing."""


@dataclass(frozen=True, slots=True)
class Connection:
    """A link that was made, what the other side said first, and what it took until that had come."""

    link: Link
    welcome: Welcome
    greeting_ms: float


class ConnectionThread:
    """Makes links for one drafter; `take` hands over the newest. All methods are thread-safe.

    `check` raises Refusal for a welcome that does not fit. `report` hears of every change, from any thread.
    """

    def __init__(
        self, name: str, device: str, check: Callable[[Welcome], None], report: Callable[[DraftLink], None]
    ) -> None:
        self._name = name
        self._device = device
        self._target = secrets.token_hex(8)
        self._check = check
        self._report = report
        self._changed = threading.Condition()
        self._endpoint: LinkEndpoint | None = None
        self._wanted = self._closed = False
        self._made: Connection | None = None
        self._thread: threading.Thread | None = None

    def aim(self, endpoint: LinkEndpoint) -> None:
        with self._changed:
            if self._closed:
                return
            self._endpoint, self._wanted = endpoint, True
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"connect {self._name}", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def again(self) -> None:
        """The link was lost: connect to the same endpoint once more."""
        with self._changed:
            self._wanted = self._endpoint is not None
            self._changed.notify_all()

    def take(self) -> Connection | None:
        """Return a new link, once."""
        if self._made is None:  # the usual case takes no lock
            return None
        with self._changed:
            made, self._made = self._made, None
            return made

    def close(self) -> None:
        """Stop connecting. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        made = self.take()
        if made is not None:
            made.link.close()

    def _run(self) -> None:
        backoff_s = FIRST_BACKOFF_S
        while (endpoint := self._next_endpoint()) is not None:
            try:
                made = self._connect(endpoint)
            except (LinkLost, ProtocolError) as error:
                self._report(DraftLink(self._name, "lost", str(error)))
                with self._changed:
                    if endpoint is self._endpoint and not self._closed:
                        self._changed.wait(backoff_s)
                    backoff_s = min(MAX_BACKOFF_S, 2.0 * backoff_s) if endpoint is self._endpoint else FIRST_BACKOFF_S
            except Refusal as error:
                self._give_up(endpoint, str(error))
            else:
                backoff_s = FIRST_BACKOFF_S
                self._hand_over(endpoint, made)

    def _next_endpoint(self) -> LinkEndpoint | None:
        with self._changed:
            while not (self._wanted or self._closed):
                self._changed.wait()
            return None if self._closed else self._endpoint

    def _connect(self, endpoint: LinkEndpoint) -> Connection:
        link = Link(knock(endpoint))
        try:
            started_s = time.perf_counter()
            link.send(Hello(VERSION, host_id(), self._device, effective_cores(), self._target))
            welcome = link.welcome(GREETING_S)
            greeting_ms = (time.perf_counter() - started_s) * MS_PER_S
            if welcome.refusal:
                raise Refusal(welcome.refusal)
            self._check(welcome)
        except BaseException:
            link.close()
            raise
        return Connection(link, welcome, greeting_ms)

    def _give_up(self, endpoint: LinkEndpoint, reason: str) -> None:
        with self._changed:
            if endpoint is self._endpoint:
                self._wanted = False
        self._report(DraftLink(self._name, "refused", reason))

    def _hand_over(self, endpoint: LinkEndpoint, made: Connection) -> None:
        with self._changed:
            if endpoint is not self._endpoint or self._closed:
                made.link.close()  # another endpoint was named meanwhile
                return
            self._wanted = False
            before, self._made = self._made, made
        if before is not None:
            before.link.close()
        self._report(DraftLink(self._name, "connected"))
