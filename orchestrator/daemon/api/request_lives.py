"""What happened to the last requests, moment by moment: a bounded book for the dashboard. It holds no text of any."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from device_profiles.units import MS_PER_S
from orchestrator.clock import Clock

RESPONSE_PREFIX: Final = "resp_"
"""With an id that begins so, a stored response can be read: without keys nothing else guards it."""
_SHOWN_PREFIX: Final = "response-"
_MOST_REQUESTS: Final = 200
_MOST_MARKS: Final = 64


def hide_response_id(request_id: str) -> str:
    """Return an id that anybody may see: a digest in place of one that opens a stored response, else the same."""
    if not request_id.startswith(RESPONSE_PREFIX):
        return request_id
    return _SHOWN_PREFIX + hashlib.sha256(request_id.encode()).hexdigest()[:24]


@dataclass(frozen=True, slots=True)
class LifeMark:
    """A moment of a request: `at_ms` after it came, its choice `index`, and the replica `engine` that did it.

    `what`: "accepted", "first_token", "moved" or "ended". `queue_ms` and `prefill_ms` come with the first token;
    `pause_ms` is the gap before the first token from another replica."""

    at_ms: float
    what: str
    index: int = 0
    engine: int = 0
    queue_ms: float | None = None
    prefill_ms: float | None = None
    pause_ms: float | None = None


@dataclass(slots=True)
class RequestLife:
    """One request. `came_s`: since 1970; `started_s`: by the daemon's clock. `status` is 0 while it runs; `figures` are
    those of its last log line. `left_out` counts marks beyond the bound."""

    request_id: str
    route: str
    model: str
    stream: bool
    prompt_tokens: int
    max_tokens: int
    choices: int
    came_s: float
    started_s: float
    status: int = 0
    tokens: int = 0
    figures: dict[str, Any] = field(default_factory=dict)
    marks: list[LifeMark] = field(default_factory=list)
    left_out: int = 0

    def note(self, mark: LifeMark) -> None:
        """Add a moment, as far as there is room."""
        if len(self.marks) < _MOST_MARKS:
            self.marks.append(mark)
        else:
            self.left_out += 1

    def end(self, status: int, figures: dict[str, Any], at_ms: float) -> None:
        """Note the end with its HTTP status. It is kept even where the marks are full."""
        self.status = int(status)
        self.figures = figures
        self.marks.append(LifeMark(at_ms, "ended"))

    @property
    def shown_id(self) -> str:
        """Its id for anybody to see, see hide_response_id."""
        return hide_response_id(self.request_id)

    def describe(self) -> dict[str, Any]:
        """Return it as plain data, for anybody to see."""
        fields = asdict(self) | {"request_id": self.shown_id}
        del fields["started_s"]
        return fields


class RequestLives:
    """The last requests that were taken in, of all models."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lives: OrderedDict[str, RequestLife] = OrderedDict()

    def open(self, request_id: str, *, started_s: float, **about: Any) -> RequestLife:
        """Begin the record of a request that came at `started_s` (seconds of the clock); the oldest one goes. `about`:
        the fields of RequestLife that are known already."""
        now_s = self._clock.monotonic_s()
        came_s = self._clock.wall_s() - (now_s - started_s)
        life = RequestLife(request_id, came_s=came_s, started_s=started_s, **about)
        life.note(LifeMark((now_s - started_s) * MS_PER_S, "accepted"))
        self._lives[life.shown_id] = life
        while len(self._lives) > _MOST_REQUESTS:
            self._lives.popitem(last=False)
        return life

    def find(self, request_id: str) -> RequestLife | None:
        """Return a request's record by its id or the one that is shown; None where it is not known, or not any more."""
        return self._lives.get(hide_response_id(request_id))

    def list_last(self, count: int) -> list[RequestLife]:
        """Return the last requests, the newest first."""
        return list(reversed(self._lives.values()))[:count]
