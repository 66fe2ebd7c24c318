"""What one API key, and all bodies together, may take at a time. Over it the answer is 429, and says until when."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http import HTTPStatus

from starlette.types import ASGIApp, Receive, Scope, Send

from device_profiles.units import S_PER_MINUTE
from orchestrator.clock import Clock
from orchestrator.daemon.api.errors import response_of
from orchestrator.daemon.api.keys import OPEN_ROUTES, OWNER
from orchestrator.errors import RequestError
from policies.running_mean import update_mean

# Weight of the newest request in how long a key's take. Not tuned.
_NEWEST = 0.2
_MAX_RETRY_AFTER_S = 60  # what a client is told at most. Not tuned.


@dataclass(slots=True)
class _Use:
    """What one key has: requests now, how long they take, and tokens that it may still have, up to a minute's."""

    live: int = 0
    mean_s: float = 1.0
    tokens_left: float = 0.0
    refilled_s: float = 0.0


class KeyShares:
    """`most_requests` of one key at a time and `tokens_per_minute`, of prompts and answers; 0 is no limit. `own`: what
    a key has of its own instead, in that order; 0 where it has nothing."""

    def __init__(
        self,
        clock: Clock,
        *,
        most_requests: int = 0,
        tokens_per_minute: int = 0,
        own: Callable[[str], tuple[int, int]] = lambda _: (0, 0),
    ) -> None:
        self._clock = clock
        self._most = most_requests
        self._per_minute = tokens_per_minute
        self._own = own
        self._uses: dict[str, _Use] = {}

    def set_limits(self, most_requests: int, tokens_per_minute: int) -> None:
        """Bound each key by these from now on; what a key has had of this minute counts."""
        self._most, self._per_minute = most_requests, tokens_per_minute

    @contextmanager
    def hold_place(self, owner: str) -> Iterator[None]:
        """Count a request of this key while it lasts. Raises RequestError where the key has too many."""
        use = self._find(owner)
        most = self._own(owner)[0] or self._most
        if most and use.live >= most:
            text = f"this key has {use.live} requests live, as many as it may (limits.max_requests_per_key)"
            raise build_refusal(text, "key_requests", use.mean_s / use.live)
        self.check_tokens(owner)
        use.live += 1
        begun_s = self._clock.monotonic_s()
        try:
            yield
        finally:
            use.live -= 1
            use.mean_s = update_mean(use.mean_s, self._clock.monotonic_s() - begun_s, _NEWEST)

    def check_tokens(self, owner: str) -> None:
        use, per_minute = self._find(owner), self._minute_of(owner)
        if per_minute and use.tokens_left <= 0.0:
            text = f"this key has used its {per_minute} tokens a minute (limits.max_tokens_per_minute_per_key)"
            raise build_refusal(text, "key_tokens", (1.0 - use.tokens_left) * S_PER_MINUTE / per_minute)

    def spend(self, owner: str, tokens: int) -> None:
        """Charge tokens to a key. They may be more than it has: then it waits for longer."""
        if self._minute_of(owner):
            self._find(owner).tokens_left -= tokens

    def _minute_of(self, owner: str) -> int:
        return self._own(owner)[1] or self._per_minute

    def _find(self, owner: str) -> _Use:
        now_s, per_minute = self._clock.monotonic_s(), self._minute_of(owner)
        use = self._uses.get(owner)
        if use is None:
            use = self._uses[owner] = _Use(tokens_left=float(per_minute), refilled_s=now_s)
        gained = (now_s - use.refilled_s) * per_minute / S_PER_MINUTE
        use.tokens_left, use.refilled_s = min(float(per_minute), use.tokens_left + gained), now_s
        return use


class ShareGate:
    """ASGI middleware, behind the key gate: every request that asks for work has a place among those of its key.
    Requests without a key have no share that could be told from others'."""

    def __init__(self, app: ASGIApp, shares: KeyShares) -> None:
        self._app = app
        self._shares = shares

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        owner = scope.get(OWNER, "")
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] in OPEN_ROUTES or not owner:
            await self._app(scope, receive, send)
            return
        with ExitStack() as held:
            try:
                held.enter_context(self._shares.hold_place(owner))
            except RequestError as error:
                await response_of(error, scope["path"])(scope, receive, send)
                return
            await self._app(scope, receive, send)


def build_refusal(message: str, code: str, after_s: float) -> RequestError:
    """Return the 429 that says in how many seconds a request may be sent again."""
    return RequestError(
        message,
        status=HTTPStatus.TOO_MANY_REQUESTS,
        code=code,
        retry_after_s=min(_MAX_RETRY_AFTER_S, max(1, math.ceil(after_s))),
    )
