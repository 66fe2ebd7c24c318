"""What an operator may see of requests and workers, and do to them, while all goes on."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.protocol.draft_messages import DrafterState
from orchestrator.protocol.rounds import DrafterShare
from policies.serving.routing import RatedReplica, RoutedRequest


@dataclass(slots=True)
class RoundsView:
    """What some rounds in a row did for a request, the last of them `at_s` seconds after it came."""

    at_s: float
    rounds: int
    tokens: int
    drafted: int
    accepted: int

    def add(self, more: RoundsView) -> None:
        """Count the rounds behind them, too."""
        self.at_s = more.at_s
        self.rounds += more.rounds
        self.tokens += more.tokens
        self.drafted += more.drafted
        self.accepted += more.accepted


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
    for the seed; `request_id` is that of the one that was convicted, `cause` the last death. Times: since 1970; inside
    control by its clock."""

    digest: str
    request_id: str
    prompt_tokens: int
    deaths: int
    cause: str
    since_s: float
    until_s: float


@dataclass(frozen=True, slots=True)
class RouteView:
    """Where a request was sent, and why there: the pair of a replica and the `draft` that proposes its tokens ("":
    nothing does). `replica` is "" while none takes it. `attempt` counts from 1, and it was `age_s` ago. The request had
    `prompt_tokens`, and so many `output_tokens` were expected of it. `rated`: all that was to choose from, the
    cheapest first."""

    request_id: str
    attempt: int
    age_s: float
    replica: str
    draft: str
    reason: str
    request: RoutedRequest
    rated: tuple[RatedReplica, ...]
