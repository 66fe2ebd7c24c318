"""The process boundary: what crosses it. The contract of either side is in `contract`.

Commands go to the worker, events come back in one multiplexed stream. Both are msgspec structs and travel as
MessagePack (see `frames`). History is the truth: a `Submit` carries the prompt *and* the tokens already committed, so
that a new worker continues a stream where the old one left it.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from device_profiles.device_load import DeviceLoad
from orchestrator.protocol.draft_messages import (
    AttachDraft,
    ChooseDrafters,
    DrafterState,
    DraftLink,
    DraftLoad,
    DraftReady,
)
from orchestrator.protocol.links.address import LinkEndpoint
from orchestrator.protocol.ready import Ready
from orchestrator.protocol.shard_messages import ShardReady
from orchestrator.protocol.trace_messages import RoundTrace, TraceContext
from policies.sampling import Sampling as Sampling
from policies.sampling.logprobs import TokenScore as TokenScore
from policies.serving.acceptance_alarm import Cause
from policies.serving.failover.watchdog import Pulse
from policies.serving.overrides import EffectiveBound

DEADLINE = "deadline"


class Grammar(msgspec.Struct, frozen=True):
    """What an output must be: a JSON schema, a regular expression, or a grammar in llguidance's Lark notation (in
    which a JSON schema is written `%json {...}`)."""

    kind: Literal["json_schema", "regex", "lark"]
    text: str


class SharedMemory(msgspec.Struct, frozen=True):
    """Memory that the daemon has made for one sequence's pages: at most `most_bytes` may be written to it. `path` opens
    it while the daemon keeps it; `name` tells that it is still the same."""

    path: str
    name: str
    most_bytes: int


class PageLink(msgspec.Struct, frozen=True):
    """Where pages of one sequence are to be sent: to the worker on another host that answers at `door`, at most
    `most_bytes` of them. They are sent while the sequence is decoded, for `within_s` at most."""

    door: LinkEndpoint
    most_bytes: int
    within_s: float


class KvPages(msgspec.Struct, frozen=True):
    """The KV cache of a sequence's first `positions`, as its worker has written it to shared memory, or sends it to the
    next worker as `transfer` (""; it does not). `format`: of Ready. `checksum`: of the tokens that the pages belong to,
    and in shared memory of the pages and of their order."""

    memory: SharedMemory
    format: str
    positions: int
    length_bytes: int
    checksum: str
    transfer: str = ""


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    """Decode from `prompt + committed` until a stop token or `max_tokens` (committed ones included).

    `max_tokens` 0 only reads the prompt. `depth`: None lets the policy choose, up to `most_depth` where that is given;
    0 switches every drafter off, k fixes it. No stop token is chosen before `min_tokens` tokens. `logprobs` (0 or more)
    asks for the log-probability of each token and of as many likeliest; `prompt_logprobs` for the prompt's too. Output
    keeps to `grammar` and ends ("stop") where that lets nothing follow. `timeout_s` bounds the whole request, its
    waiting included; 0 is no bound. Control keeps it, workers do not look at it. `route` and `user` (the request's tag)
    are the class in which its acceptance is watched. `policy_depth`: the policy is to choose, whatever
    the overrides of session and engine; control makes a depth or a bound of all overrides. `lane`: the canary's variant
    that serves it ("canary"; any other: the control). `owner`: whose request it is, for the fair order of
    those that wait. `pages`: what an earlier worker computed of it, to begin with; where they are of no use it is
    computed again. `recalled`: earlier answers to prompts like this one, as of packed_tokens, to draft from.
    `prediction`: what its client expects of its output, in the same form (b"": nothing). `stores`: the stores of
    documents that it may be drafted from (None: all). `trace`: where its spans belong; None where it is not traced.
    `model_digest`, `vocabulary`: of the model that its prompt was translated for, as in Ready ("": of any).
    """

    request_id: str
    prompt: list[int]
    max_tokens: int
    sampling: Sampling = Sampling()
    committed: list[int] = []
    stop_tokens: list[int] = []
    depth: int | None = None
    timeout_s: float = 0.0
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: bool = False
    grammar: Grammar | None = None
    route: str = ""
    user: str = ""
    most_depth: int | None = None
    policy_depth: bool = False
    lane: str = ""
    owner: str = ""
    pages: KvPages | None = None
    recalled: list[bytes] = []
    prediction: bytes = b""
    stores: list[str] | None = None
    trace: TraceContext | None = None
    model_digest: str = ""
    vocabulary: str = ""


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """Forget a request; its slot is free within one round. No further event for it follows the next round."""

    request_id: str


class MoveOut(msgspec.Struct, frozen=True, tag="move_out"):
    """Forget a request behind the current round, and before that write its KV cache to this memory. With a `link` it is
    sent there instead, and the request is forgotten once little of it is left to send. `MovedOut` is the last that the
    worker says of it."""

    request_id: str
    memory: SharedMemory
    link: PageLink | None = None


class CountAsOurs(msgspec.Struct, frozen=True, tag="count_as_ours"):
    """The numbers of our workers' processes, on whichever host: to an agent, what these take is not others' load."""

    pids: list[int]


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """End the worker process, running requests included."""


class Retune(msgspec.Struct, frozen=True, tag="retune"):
    """Decode by these options of the worker's entry from now on; the model and how it is loaded are as before. What
    runs goes on. `Retuned` is the answer."""

    options: dict[str, Any]


Command = Submit | Cancel | MoveOut | Stop | AttachDraft | ChooseDrafters | CountAsOurs | Retune


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """Preparation goes on. `fraction` is 0..1, negative where it is not known."""

    stage: str
    fraction: float


class StillWorking(msgspec.Struct, frozen=True, tag="working"):
    """The worker is at a step that it has not finished, and has said nothing for a while."""

    stage: str
    pulse: Pulse


class Retuned(msgspec.Struct, frozen=True, tag="retuned"):
    """What came of a Retune: the worker as it is now, or why it stays as it was."""

    ready: Ready | None
    why: str = ""


class DrafterShare(msgspec.Struct, frozen=True, array_like=True):
    """What one drafter did for a request. In `asked` rounds it was asked, and in `answered` of them it proposed, in all
    `proposed` tokens; `taken`: of those rounds, those in which its draft promised most. It was not asked in `spared`
    rounds, as a cheaper draft promised enough, and in `off` rounds, as others were chosen. Of its tokens `drafted` were
    verified and `accepted` became output."""

    name: str
    asked: int = 0
    answered: int = 0
    taken: int = 0
    proposed: int = 0
    spared: int = 0
    off: int = 0
    drafted: int = 0
    accepted: int = 0


class RequestStats(msgspec.Struct, frozen=True, array_like=True):
    """What one request cost, counted since it was (re)submitted.

    `drafted`/`accepted`: draft tokens verified/accepted. `steps`: verification forwards of this request after
    its prompt. `reused`: tokens of the prompt whose KV cache was there already. `tolerance_delta`: the tolerance (nats)
    that drafts were judged with last, below 0 where there was none. `predicted`, `predicted_right`: tokens of the
    request's own prediction that were verified, and those of them that were accepted. `drafters`: what each did, with
    the last delta and now and then before it; else it is empty. `tolerated`: tokens of the output that
    only the tolerance accepted, so that they are not the target's own choice.
    """

    prompt_tokens: int
    generated: int
    steps: int
    drafted: int
    accepted: int
    queue_ms: float
    prefill_ms: float
    reused: int = 0
    tolerance_delta: float = -1.0
    predicted: int = 0
    predicted_right: int = 0
    drafters: list[DrafterShare] = []
    tolerated: int = 0


class Delta(msgspec.Struct, frozen=True, array_like=True):
    """Tokens that one round committed to one request. `finish`: "" while it runs, else "stop" or "length", or
    "deadline" from control where the request's time was over.
    `stats` counts up to and with this delta. `logprobs` has a score for each token, where they were asked for;
    `prompt_logprobs`, with the first delta, one for each token of the prompt but the first. `engine`: the replica that
    committed them, `speculation`: the bound that its overrides come to, sent when it is new. Control fills in both."""

    request_id: str
    tokens: list[int]
    finish: str = ""
    stats: RequestStats | None = None
    logprobs: list[TokenScore] | None = None
    prompt_logprobs: list[TokenScore] | None = None
    engine: int = 0
    speculation: EffectiveBound | None = None


class RoundReport(msgspec.Struct, frozen=True, tag="round"):
    """What one round committed, for all its requests, and the totals the metrics are made of.

    `drafted`, `accepted` and `accepted_per_position` count draft tokens of this round; `drafts` counts the
    sequences that had one. `by_rule`: drafted and accepted tokens by the rule they were judged by; `by_drafter`: by
    whose they were ("grammar": a grammar added them). `round_ms` is the whole round, `device_ms` the runtime's own
    forward inside it. `engine`: the replica, filled in by control.
    `expected_ms`: predicted for the whole round, 0 where nothing is known. `trace`: of a round that was sampled.
    `in_flight`: so many rounds, this one among them, were under way when it ended; `stage_ms`: each stage's part of
    `device_ms`, both of a target in several stages. `round_tokens`: those of one round, where deltas have the tokens of
    several rounds that were alike, as a simulated worker tells them (0: of this one). `tolerated`: see RequestStats.
    """

    deltas: list[Delta]
    sequences: int
    rows: int
    drafts: int
    drafted: int
    accepted: int
    accepted_per_position: list[int]
    round_ms: float
    device_ms: float
    draft_ms: float
    by_rule: dict[str, tuple[int, int]] = {}
    engine: int = 0
    expected_ms: float = 0.0
    by_drafter: dict[str, tuple[int, int]] = {}
    trace: RoundTrace | None = None
    in_flight: int = 1
    stage_ms: list[float] = []
    round_tokens: float = 0.0
    tolerated: int = 0


class AcceptanceWarning(msgspec.Struct, frozen=True):
    """A drafter's drafts are accepted too rarely in one class of requests (`route`, and the `user` tag where they have
    one). `rate`: accepted / drafted tokens, of the last `drafted`; `upper`: the upper end of its 95 % interval when it
    was below the `threshold` last. `cause`: the likely one, of policies.serving.acceptance_alarm."""

    drafter: str
    route: str
    user: str
    rate: float
    upper: float
    threshold: float
    drafted: int
    cause: Cause


class SloState(msgspec.Struct, frozen=True):
    """How the decode loop's requests of late stood at the percentiles of their objectives, and what is moved for that.

    A figure is None where there are too few requests, or no such objective. `policies.serving.slo` moves `row_price` of
    a draft's row, `prefill_share` of the default bound of prefills, and `max_running` from now on. `levers` name the
    SLO actions; `why` is one line.
    """

    ttft_ms: float | None
    tpot_ms: float | None
    row_price: float
    prefill_share: float
    max_running: int
    levers: list[str]
    why: str


class MemoryBound(msgspec.Struct, frozen=True):
    """Forwards are kept small, as a larger one ran out of memory: they have at most `rows` (of the usual `most_rows`),
    and at most `sequences` run. It holds for `holds_s` seconds from the last such forward on, and loosens in steps.
    `last`: what that forward said."""

    rows: int
    most_rows: int
    sequences: int
    holds_s: float
    last: str


class Gauges(msgspec.Struct, frozen=True, tag="gauges"):
    """State after a round, sent at most a few times a second and whenever the worker becomes idle.

    `drafters` are in order of cost. `preemptions`, `rounds`, `prefix_queries` and `prefix_hits` (tokens looked up and
    found in the prefix cache) are counts since the worker started, and so are `out_of_memory` (forwards that ran out of
    memory) and `not_finite` (requests that ended for their logits). `tolerance_deltas`, in nats, by the kind of
    sampling ("greedy", "sampled"): those that are known; `tolerance_recalibrations`: how often they followed a drift.
    `low_acceptance`: the warnings that stand. `slo`: None where there are no objectives. `memory_bound`: None while
    forwards are as large as they may be. `corrupt`: files of prepared models that were found damaged since they were
    loaded.
    """

    running: int
    waiting: int
    free_blocks: int
    total_blocks: int
    preemptions: int
    drafter_bytes: int
    rounds: int
    rss_bytes: int
    prefix_queries: int = 0
    prefix_hits: int = 0
    drafters: list[DrafterState] = []
    peak_rss_bytes: int = 0
    tolerance_deltas: dict[str, float] = {}
    tolerance_recalibrations: int = 0
    low_acceptance: list[AcceptanceWarning] = []
    slo: SloState | None = None
    out_of_memory: int = 0
    not_finite: int = 0
    memory_bound: MemoryBound | None = None
    corrupt: list[str] = []


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """A request that cannot be served (`kind` "invalid"), or that the worker failed on ("failed"). "not_finite": its
    logits were no numbers, which another worker's may be; nothing was committed from them. "too_long": it has more
    tokens than the `most_tokens` of a sequence here."""

    request_id: str
    message: str
    kind: str
    most_tokens: int = 0


class MovedOut(msgspec.Struct, frozen=True, tag="moved_out"):
    """The worker has forgotten a request. `pages`: what it has written of it, in `took_ms`; None where that is nothing,
    `why` says why."""

    request_id: str
    pages: KvPages | None
    took_ms: float
    why: str = ""


class MovedIn(msgspec.Struct, frozen=True, tag="moved_in"):
    """A request that came with pages runs. It began with `length_bytes` of them, taken in `took_ms`: 0 where it is
    computed again, `why` says why."""

    request_id: str
    length_bytes: int
    took_ms: float
    why: str = ""


FailureKind = Literal[
    "",
    "out_of_memory",
    "device_lost",
    "ecc",
    "thermal",
    "configuration",
    "not_installed",
    "model_replaced",
    "storage",
    "network",
    "hung",
    "unknown",
]
"""Why a worker cannot go on:

- "ecc": memory errors of the device that were not corrected.
- "configuration": what it was told can never work here.
- "not_installed": a library that it needs is not on its host.
- "model_replaced": what it was to load is neither at its place nor in the store.
- "storage": the model store cannot be written.
- "network": a download failed.
- "hung": control ended it.
- "unknown": a failure that nobody could place; "": nobody tried to.
"""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The worker cannot go on (model refused, device lost) and ends. `restartable`: a new one may help."""

    message: str
    restartable: bool
    kind: FailureKind = ""


class MeasuredValue(msgspec.Struct, frozen=True, tag="measured"):
    """What a measuring worker found, as plain data: `value` is of the class of `device_profiles.store` that `kind`
    names."""

    kind: Literal["device", "model", "pair", "texts", "link"]
    value: dict[str, Any]


class HostDescribed(msgspec.Struct, frozen=True, tag="host"):
    """An agent's description of its host, as plain data of orchestrator.daemon.cluster.inventory.HostInventory."""

    inventory: dict[str, Any]


class DevicesSampled(msgspec.Struct, frozen=True, tag="devices"):
    """What the devices of an agent's host do, by their names there."""

    loads: dict[str, DeviceLoad]


class PagesDoor(msgspec.Struct, frozen=True, tag="pages_door"):
    """Workers on other hosts can send pages of their KV cache to this worker there; before it is ready."""

    door: LinkEndpoint


class EndpointOpened(msgspec.Struct, frozen=True, tag="opened"):
    """A measuring worker answers at this endpoint."""

    door: LinkEndpoint


class Finished(msgspec.Struct, frozen=True, tag="finished"):
    """A measuring worker has found all there is to find, and waits to be stopped."""


Event = (
    Progress
    | StillWorking
    | Ready
    | Retuned
    | RoundReport
    | Gauges
    | Refused
    | MovedOut
    | MovedIn
    | Failed
    | DraftReady
    | DraftLoad
    | DraftLink
    | MeasuredValue
    | HostDescribed
    | DevicesSampled
    | EndpointOpened
    | PagesDoor
    | ShardReady
    | Finished
)
