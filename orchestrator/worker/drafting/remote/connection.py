"""Connects to what drafts in another process in the background, as often as it takes."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from adapters.framing import ProtocolError
from device_profiles.units import MS_PER_S
from orchestrator.machine.cores import effective_cores
from orchestrator.protocol.draft_messages import DraftLink
from orchestrator.protocol.links.address import LinkEndpoint
from orchestrator.protocol.links.endpoint import GREETING_S, LinkLost, host_id, knock
from orchestrator.worker.drafting.protocol import VERSION, DraftLines, DraftRequest, DraftResponse, Hello, Link, Welcome

# ADR 0017: in the background, so it only says how soon drafts come back. Not tuned.
FIRST_BACKOFF_S = 0.05
# ADR 0017. Not tuned.
MAX_BACKOFF_S = 2.0


class Refusal(Exception):
    """The other side cannot draft for this target; trying again at once changes nothing."""


class DraftChannel(Protocol):
    """What a drafter says to the other side, and hears of it: drafting.protocol.Link has it by frames."""

    @property
    def sent_bytes(self) -> int: ...

    @property
    def received_bytes(self) -> int: ...

    def send(self, message: DraftRequest) -> None:
        """Say a request, without waiting. Raises LinkLost."""
        ...

    def flush(self) -> None:
        """Send what is left, as far as it goes without waiting. Raises LinkLost."""
        ...

    def drafts(self, timeout_s: float) -> DraftResponse | DraftLines | None:
        """Return the other side's next word; None when there is none within `timeout_s`. Raises LinkLost,
        ProtocolError."""
        ...

    def close(self) -> None:
        """Hang up. Idempotent."""
        ...


@dataclass(frozen=True, slots=True)
class Connection:
    """A link that was made, what the other side said first, and what it took until that had come. `may_share`: the
    other side may compute on the target's machine."""

    link: DraftChannel
    welcome: Welcome
    greeting_ms: float
    may_share: bool = False


Connect = Callable[[], Connection]
"""Makes a connection. Raises LinkLost, ProtocolError, and Refusal where the drafts cannot be this target's tokens."""


class WorkerGreeter:
    """Makes connections to draft workers. `fingerprint` is what their vocabulary must have, `device` is where the
    target runs."""

    def __init__(self, fingerprint: str, device: str) -> None:
        self._fingerprint = fingerprint
        self._device = device
        self._target = secrets.token_hex(8)

    def __call__(self, endpoint: LinkEndpoint) -> Connection:
        link = Link(knock(endpoint))
        try:
            started_s = time.perf_counter()
            link.send(Hello(VERSION, host_id(), self._device, effective_cores(), self._target))
            welcome = link.welcome(GREETING_S)
            greeting_ms = (time.perf_counter() - started_s) * MS_PER_S
            if welcome.refusal:
                raise Refusal(welcome.refusal)
            if self._fingerprint != welcome.vocabulary_fingerprint:
                raise Refusal(
                    f"{welcome.drafter.source or welcome.drafter.name} has another vocabulary than the target: its "
                    "tokens mean other text; choose a draft of the target's family"
                )
        except BaseException:
            link.close()
            raise
        return Connection(link, welcome, greeting_ms, may_share=not welcome.apart)


class ConnectionThread:
    """Makes links for one drafter; `take` hands over the newest. All methods are thread-safe.

    `report` hears of every change, from any thread. After a Refusal it tries again in `retry_s`; None: it does not.
    """

    def __init__(self, name: str, report: Callable[[DraftLink], None], retry_s: float | None = None) -> None:
        self._name = name
        self._report = report
        self._retry_s = retry_s
        self._changed = threading.Condition()
        self._connect: Connect | None = None
        self._wanted = self._closed = False
        self._pause_s = 0.0
        self._made: Connection | None = None
        self._thread: threading.Thread | None = None

    def aim(self, connect: Connect | None) -> None:
        """Make links by this from now on; None: make none, and forget one that was not taken."""
        with self._changed:
            if self._closed:
                return
            self._connect, self._wanted, self._pause_s = connect, connect is not None, 0.0
            unwanted, self._made = (self._made, None) if connect is None else (None, self._made)
            if self._thread is None and connect is not None:
                self._thread = threading.Thread(target=self._run, name=f"connect {self._name}", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        if unwanted is not None:
            unwanted.link.close()

    def again(self, pause_s: float = 0.0) -> None:
        """The link was lost: connect to the same endpoint once more, after a pause."""
        with self._changed:
            self._wanted, self._pause_s = self._connect is not None, pause_s
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
        while (connect := self._next_connect()) is not None:
            try:
                made = connect()
            except (LinkLost, ProtocolError) as error:
                self._report(DraftLink(self._name, "lost", str(error)))
                self._pause(connect, backoff_s)
                backoff_s = min(MAX_BACKOFF_S, 2.0 * backoff_s) if connect is self._connect else FIRST_BACKOFF_S
            except Refusal as error:
                self._refuse(connect, str(error))
            else:
                backoff_s = FIRST_BACKOFF_S
                self._hand_over(connect, made)

    def _next_connect(self) -> Connect | None:
        while True:
            with self._changed:
                while not (self._wanted or self._closed):
                    self._changed.wait()
                pause_s, self._pause_s = self._pause_s, 0.0
                connect = self._connect
            if connect is not None and pause_s:
                self._pause(connect, pause_s)
            if self._closed:
                return None
            if (latest := self._connect) is not None:  # else it was to make none while it paused
                return latest

    def _pause(self, connect: Connect, seconds: float) -> None:
        """Wait so long, unless another endpoint is named meanwhile."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._connect is not connect, seconds)

    def _refuse(self, connect: Connect, reason: str) -> None:
        with self._changed:
            if connect is self._connect and self._retry_s is None:
                self._wanted = False
        self._report(DraftLink(self._name, "refused", reason))
        if self._retry_s is not None:
            self._pause(connect, self._retry_s)

    def _hand_over(self, connect: Connect, made: Connection) -> None:
        with self._changed:
            if connect is not self._connect or self._closed:
                made.link.close()  # another endpoint was named meanwhile
                return
            self._wanted = False
            before, self._made = self._made, made
        if before is not None:
            before.link.close()
        self._report(DraftLink(self._name, "connected"))
