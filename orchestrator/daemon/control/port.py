"""What the API may ask of control: decode a request, and say what is running."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from device_profiles.device_load import DeviceLoad
from orchestrator.daemon.control.streams.overrides import NO_OVERRIDES, ActiveOverrides
from orchestrator.protocol.commands import Submit
from orchestrator.protocol.contract import ClusterMembers
from orchestrator.protocol.draft_messages import DrafterState, DraftLoad, DraftReady
from orchestrator.protocol.ready import Ready
from orchestrator.protocol.rounds import Delta, Gauges
from policies.serving.canary import Figures, Interval, PromotionRule
from policies.serving.failover.blame import LossKind
from policies.serving.failover.pool import PartLoss, PoolGroup
from policies.serving.overrides import EffectiveBound, OperatorBounds
from policies.serving.routing import RatedReplica, Route, RoutedRequest


@dataclass(frozen=True, slots=True)
class Totals:
    """Counts since the daemon started. `accepted_per_position[i]` counts accepted drafts at depth i + 1. `by_drafter`:
    drafted and accepted tokens by whose they were ("grammar": a grammar added them)."""

    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_per_position: tuple[int, ...] = ()
    generated: int = 0
    rounds: int = 0
    restarts: int = 0
    by_drafter: Mapping[str, tuple[int, int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class KvMoveTotals:
    """Streams moved by plan: with the `pages` of their KV, of so many `bytes`, in `seconds`, or `recomputed`."""

    pages: int = 0
    recomputed: int = 0
    bytes: int = 0
    seconds: float = 0.0

    def __add__(self, more: KvMoveTotals) -> KvMoveTotals:
        return KvMoveTotals(
            self.pages + more.pages,
            self.recomputed + more.recomputed,
            self.bytes + more.bytes,
            self.seconds + more.seconds,
        )


@dataclass(frozen=True, slots=True)
class DraftView:
    """A draft worker now. `phase`: "starting", "ready", "restarting", "resting" or "failed"; `detail` says why. `ready`
    describes its process: None before the first is ready, the lost one's until the next is. `number` tells workers of
    one draft separately, from 0. `targets` are the replicas that it drafts for, `connected` those of them that say so.
    `load` is what it told last, None where it does not draft."""

    name: str
    phase: str
    detail: str
    worker: str
    ready: DraftReady | None
    restarts: int
    number: int = 0
    targets: tuple[str, ...] = ()
    connected: tuple[str, ...] = ()
    load: DraftLoad | None = None


Hindrance = Literal["", "unlike", "host", "server", "slow"]
"""What keeps a replica from serving: its bits or its model are others than those that it was to serve beside, its host
or the server that it asks is away, or it has been loading for longer than expected."""


@dataclass(slots=True)
class ReplicaView:
    """One replica of the target now. `engine` counts from 0; `silent_s`: for how long it has had streams and said
    nothing (0 where it has none). `spent`: it was lost too often of late, and is tried again from time to time;
    `back_in_s`: when it can be expected to serve, by its last start. `hindrance`: what keeps it from serving, where its
    phase does not say it ("": nothing; control.replicas.shortfall). `standby`: it takes the target's place only;
    `unlike`: in what its tokens may differ from the target's ("": in nothing). `held`: why it takes no requests, as an
    operator wants it. `draft`: what proposes tokens there; `route`: by which the last request went there. Its workers
    are started on `device`, "HOST/DEVICE" ("": their runtime chooses). The rest is as in StateView. Nobody changes one:
    there may be thousands each time, and frozen ones take four times as long."""

    engine: int
    name: str
    phase: str
    detail: str
    worker: str
    ready: Ready | None
    gauges: Gauges | None
    totals: Totals
    streams: int
    silent_s: float = 0.0
    spent: bool = False
    back_in_s: float = 0.0
    hindrance: Hindrance = ""
    standby: bool = False
    unlike: str = ""
    held: str = ""
    draft: str = ""
    route: Route | None = None
    device: str = ""

    @property
    def last_route(self) -> str:
        """Why the last request went there; "" before the first."""
        return self.route.reason if self.route is not None else ""


@dataclass(frozen=True, slots=True)
class HealthView:
    """A device, a host, a link, a worker or a cluster that is not healthy. `state`: of policies.serving.failover.health
    or control.replicas.shortfall; `why`: the last failure; nothing is started there for `wait_s`."""

    kind: str
    name: str
    state: str
    why: str
    wait_s: float


@dataclass(frozen=True, slots=True)
class MissingReplica:
    """A replica of the plan, by its number there, that is out, and for which `reason` (control.replicas.shortfall).
    `name`: of its worker; `why`: what became of that, in one line."""

    replica: int
    name: str
    why: str
    reason: str


@dataclass(frozen=True, slots=True)
class UnmetWish:
    """What was configured and no replica is there for: `why`, and the `reason` (control.replicas.shortfall)."""

    reason: str
    why: str


@dataclass(frozen=True, slots=True)
class PlanView:
    """What the running plan predicts, and what came of it. Tokens per second are output tokens of all streams;
    `predicted` is for the planned load, prompts included, `measured` a running mean over rounds that only decode.
    `ratio`: measured / predicted time of the last `rounds` rounds, for the rows that they had, of the replica where it
    is furthest from 1. `plans`: how often it was made anew; `moves`: how often workers were replaced for that; `last`:
    what came of it last. `drifted`: profiles that do not hold any more, and when they are measured again. `objective`:
    of what it has most; cost and energy are those predicted, `price_per_hour` that of the devices in use, all 0 where
    not known. `corrections`: by how much predictions of devices were already made longer. `serving_tokens_per_s`: as
    `predicted`, of the replicas that serve now; `missing`: those that are out. `doubts`: which of its figures are
    estimates, or were measured while others took the device. `to_measure`: what is measured when nobody asks.
    `replica_tokens_per_s`: as `predicted`, of each replica by its number."""

    predicted_tokens_per_s: float
    measured_tokens_per_s: float
    ratio: float
    rounds: int
    plans: int
    moves: int
    last: str
    drifted: tuple[str, ...] = ()
    objective: str = "throughput"
    currency: str = "USD"
    predicted_cost_per_million_tokens: float = 0.0
    predicted_joules_per_token: float = 0.0
    price_per_hour: float = 0.0
    corrections: tuple[float, ...] = ()
    serving_tokens_per_s: float = 0.0
    missing: tuple[MissingReplica, ...] = ()
    doubts: tuple[str, ...] = ()
    to_measure: tuple[str, ...] = ()
    replica_tokens_per_s: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ScaleView:
    """How many replicas there are where load decides: `wanted`, there at all, and `ready`. They are never fewer than
    `least`, as far as there are places, nor more than `most`. `why`: what was seen last; `last`: what came of the last
    change ("": there was none)."""

    wanted: int
    there: int
    ready: int
    least: int
    most: int
    why: str
    last: str = ""


@dataclass(frozen=True, slots=True)
class ResidencyView:
    """Whether a model is in memory that requests load, and that gives way to others. `state`: "not loaded", "evicted"
    (it gave way), "loading", "loaded", "leaving", "unloading" or "failed"; `why` it is not there. So many requests are
    `waiting` for it. Its last load took `load_s`; it was loaded `loads` times, and `failed_loads` came to nothing.
    `unloads` counts by why: "idle" or "room". `needs`: bytes by device, as far as they are known."""

    keep: str
    idle_s: float
    state: str
    why: str
    waiting: int
    load_s: float
    loads: int
    failed_loads: int
    unloads: dict[str, int]
    needs: dict[str, int]


@dataclass(frozen=True, slots=True)
class DraftStoreView:
    """How a target's draft store does. `kind`: "redis" or "disk"; `location` has no user and no password. `state`:
    "ok", or "away" while it fails; `problem`: what went wrong last ("": nothing). All else counts. Requests were looked
    up with `hits` or `misses`, went on before an answer came (`late`), or did not ask, as the store is away
    (`skipped`). There were failures (`errors`) and `damaged` values; answers were `written` or `dropped`, and some are
    `waiting`; bytes are those of values."""

    kind: str
    location: str
    shared: bool
    state: str
    problem: str
    waiting: int
    hits: int
    misses: int
    late: int
    skipped: int
    errors: int
    damaged: int
    written: int
    dropped: int
    read_bytes: int
    written_bytes: int


@dataclass(frozen=True, slots=True)
class DeviceView:
    """A device's `load`, the moving mean, told `age_s` ago. `hot`: why it makes itself slower ("": it does not)."""

    name: str
    load: DeviceLoad
    hot: str
    age_s: float


TRIAL, PROMOTED, ROLLED_BACK = "trial", "promoted", "rolled_back"


@dataclass(frozen=True, slots=True)
class TrialDecision:
    """What ended a trial. `by`: "rule", "operator" or "drafter" (it failed); `at`: ISO 8601, UTC. `figure` ("ttft_ms",
    "tpot_ms") of the canary less the others' was `low` to `high` then, with 95 %; None where it was not known. Of
    "agreement" it is the canary's own."""

    by: str
    reason: str
    at: str
    figure: str
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True)
class TrialView:
    """The canary. `phase`: "trial", "promoted" or "rolled_back". `share` as configured, `effective_share` of the
    requests that come now. `arms`: figures by the arm's name, and `differences`: canary less control, by the figure's;
    both stay as they were when it was decided. `outlook`: what comes next; `to_keep`: what to change in cluster.yaml
    for it to be everybody's."""

    phase: str
    share: float
    effective_share: float
    differs: tuple[str, ...]
    by_rule: bool
    rule: PromotionRule
    decision: TrialDecision | None
    arms: dict[str, Figures]
    differences: dict[str, Interval]
    outlook: str
    to_keep: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RecentOutputsView:
    """Last answers, to draft from: of so many `users` (tags), so many `tokens`; `given` requests got some."""

    users: int
    tokens: int
    given: int


@dataclass(frozen=True, slots=True)
class StateView:
    """What is running now. `phase`: "starting", "ready", "restarting", "unloaded" (a request loads it), "draining" or
    "failed"; it is "ready" while one replica serves.

    `detail` says in one line what it waits for or why it failed. `ready` describes the current worker: None before the
    first is ready, the lost one's until the next is; of several replicas the first that serves. `gauges` and `totals`
    add up over the replicas. `plan`: None where nothing was left to one. `bounds` of speculation are the operator's
    (None before the first worker is ready), `canary_bounds` those of the canary's requests, `overrides` those of
    sessions and engines. `losses`: of target workers, by the replica's number and the kind
    (policies.serving.failover.blame). `health`: of parts that are not healthy. `standbys`: those that are loaded and do
    not serve; one that does is among `replicas`. `taken_over`: how often one took the target's place, by "same" and
    "other" bits. `changed_groups`: how many streams went on with other bits, by the number of the replica that went on.
    `kv_moves`: of streams, by the number of the replica that they left. `devices`: those that somebody samples.
    `scaling`: None where the number of replicas does not follow load. `draft_store`: None where answers stay in the
    worker's memory; `recent_outputs`: None until an answer to a user tag is there. `quarantined`: requests that are
    refused for having ended workers. `cluster_away`: why no worker can be started, while a cluster does not answer; ""
    where one can. `cluster_members`: the hosts of a cluster that others may join. `unmet`: what was configured and none
    of the `replicas` is there for. `residency`: None where the model is loaded at the start and stays.
    """

    phase: str
    detail: str
    worker: str
    runtime: str
    ready: Ready | None
    gauges: Gauges | None
    totals: Totals = field(default_factory=Totals)
    streams: int = 0
    uptime_s: float = 0.0
    drafts: tuple[DraftView, ...] = ()
    replicas: tuple[ReplicaView, ...] = ()
    plan: PlanView | None = None
    bounds: OperatorBounds | None = None
    canary_bounds: OperatorBounds | None = None
    overrides: ActiveOverrides = NO_OVERRIDES
    losses: dict[tuple[int, LossKind], int] = field(default_factory=dict)
    kv_moves: dict[int, KvMoveTotals] = field(default_factory=dict)
    health: tuple[HealthView, ...] = ()
    standbys: tuple[ReplicaView, ...] = ()
    taken_over: dict[str, int] = field(default_factory=dict)
    changed_groups: dict[int, int] = field(default_factory=dict)
    devices: tuple[DeviceView, ...] = ()
    scaling: ScaleView | None = None
    draft_store: DraftStoreView | None = None
    recent_outputs: RecentOutputsView | None = None
    quarantined: int = 0
    cluster_away: str = ""
    cluster_members: ClusterMembers | None = None
    unmet: tuple[UnmetWish, ...] = ()
    residency: ResidencyView | None = None


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
class PoolView:
    """The groups of equal bits that serve now, and what losses cost. `other_bits`: of
    policies.serving.failover.standby; streams wait for their own for `after_s` before they change. `figures`: whether
    shares are of tokens a second that a plan predicts, or of those that replicas make by their rounds."""

    other_bits: str
    after_s: float
    figures: Literal["predicted", "measured"]
    groups: tuple[PoolGroup, ...]
    losses: tuple[PartLoss, ...]


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


class Control(Protocol):
    """The daemon's side of decoding; holds no model."""

    def view(self) -> StateView: ...

    def check_room(self, coming: int = 0, wanted: int = 1) -> None:
        """Raise RequestError where a request that came now would not be taken in: as `generate` does, and before any
        work on it. `coming` others are about to be taken in. `wanted`: how many places it takes; 400 where there are
        never so many."""
        ...

    def find_speculation(self, submit: Submit) -> EffectiveBound | None:
        """Return what bounds a request's drafts where it is now, or would be. None where replicas differ in that, and
        where none serves."""
        ...

    def generate(self, submit: Submit) -> AsyncIterator[Delta]:
        """Decode a request; yield its tokens as they are committed. The last delta has `finish` and `stats`.

        Survives a lost worker: the stream goes on with the very next token, at once where another replica serves, else
        when a worker does. Closing the iterator (aclose) before its end cancels the request. Raises RequestError: 503
        while starting, draining or failed (with retry_after_s), 429 when the queue is full, 400 when the worker refuses
        the request, 500 when it failed on it.
        """
        ...
