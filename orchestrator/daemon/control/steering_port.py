"""What an operator may see of requests and workers, and do to them, while all goes on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from orchestrator.protocol.draft_messages import DrafterState
from orchestrator.protocol.rounds import DrafterShare


@dataclass(frozen=True, slots=True)
class RoundsView:
    """What some rounds in a row did for a request, the last of them `at_s` seconds after it came."""

    at_s: float
    rounds: int
    tokens: int
    drafted: int
    accepted: int


@dataclass(frozen=True, slots=True)
class MoveView:
    """A request left `replica`, `at_s` seconds after it came; and why."""

    at_s: float
    replica: str
    why: str


@dataclass(frozen=True, slots=True)
class RequestView:
    """A request of late. `state`: "queued" (no replica has it), "sent" (without a token yet), "decoding", "moving"
    (between two replicas) or "ended", then with its `outcome`. It came `age_s` ago; `took_s` to its end (None: it
    lives). `owner`: of whose key, by the key's id. `depth`: draft tokens a round, of its newest rounds. `queue_ms`: it
    waited here and at its first worker. `digest` names what it asks for ("": not known yet). Its client
    brought `prediction_tokens` that it expected; `predicted` of them were verified, and `predicted_right` were right.
    `drafters`: what each did, of late where it lives. `lane`: the canary's variant that served it, `tolerated`: see
    RequestStats. It never has the text.
    """

    request_id: str
    state: str
    outcome: str
    age_s: float
    took_s: float | None
    replica: str
    owner: str
    prompt_tokens: int
    tokens: int
    depth: float
    queue_ms: float
    prefill_ms: float
    first_token_ms: float | None
    digest: str
    prediction_tokens: int = 0
    predicted: int = 0
    predicted_right: int = 0
    lane: str = ""
    tolerated: int = 0
    rounds: tuple[RoundsView, ...] = ()
    moves: tuple[MoveView, ...] = ()
    drafters: tuple[DrafterShare, ...] = ()


@dataclass(frozen=True, slots=True)
class DraftersView:
    """The drafters of a replica, as its worker says. `chosen`: those that an operator chose (None: nobody did)."""

    replica: str
    engine: int
    drafters: tuple[DrafterState, ...]
    chosen: tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class PartView:
    """A device, a host or a worker. `held`: "draining", "cordoned", or "" where it may work. `requests` are there."""

    kind: str
    name: str
    held: str
    requests: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class QuarantinedView:
    """A request that is refused, for it has ended workers. `digest` names the prompt, the grammar and the sampling but
    for the seed; `request_id` is that of the one that was convicted, `cause` the last death. Times: since 1970."""

    digest: str
    request_id: str
    prompt_tokens: int
    deaths: int
    cause: str
    since_s: float
    until_s: float


class Steering(Protocol):
    """What an operator may do to requests, workers and drafters. Each raises RequestError: 404 where there is no such
    thing (it says what there is), 409 where it cannot be done now."""

    def list_requests(self) -> list[RequestView]:
        """Return the live requests, the oldest first."""
        ...

    def describe_requests(self, request_id: str) -> list[RequestView]:
        """Return the choices of a request, live or ended of late; none where nothing is known of it."""
        ...

    def cancel(self, request_id: str) -> list[str]:
        """End a live request with an error to its client; returns the ids of its choices."""
        ...

    def list_parts(self) -> list[PartView]:
        """Return the devices, hosts and workers that there are."""
        ...

    def fail_over(self, worker: str, to: str) -> None:
        """Let another replica, or a standby, go on with a worker's requests, and keep new ones from it."""
        ...

    def give_back(self, worker: str) -> None:
        """Let a worker that was failed over have its requests again."""
        ...

    def list_drafters(self) -> list[DraftersView]:
        """Return the drafters of each replica."""
        ...

    def choose_drafters(self, names: Sequence[str] | None, engine: int | None = None) -> None:
        """Let only these drafters propose (none: nothing is proposed; None: as configured), for running requests, too.
        `engine`: of this replica; None: of all."""
        ...

    def quarantine(self, request: str, duration_s: float) -> QuarantinedView:
        """Refuse a request like this one, by its id or digest, for so long."""
        ...
