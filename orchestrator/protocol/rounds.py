"""What a worker says of its rounds, its requests and its load."""

from __future__ import annotations

import msgspec

from orchestrator.protocol.draft_messages import DrafterState
from orchestrator.protocol.trace_messages import RoundTrace
from policies.sampling.logprobs import TokenScore
from policies.serving.acceptance_alarm import Cause
from policies.serving.overrides import EffectiveBound

DEADLINE = "deadline"


class DrafterShare(msgspec.Struct, array_like=True):
    """What a drafter did for a request."""

    name: str
    asked: int = 0
    answered: int = 0
    """Rounds in which it was asked, and proposed."""
    taken: int = 0
    """Those of them in which its draft promised most."""
    proposed: int = 0
    spared: int = 0
    """Rounds in which it was not asked, as a cheaper draft promised enough."""
    off: int = 0
    """Rounds in which it was not asked, as others were chosen."""
    drafted: int = 0
    """Its tokens that were verified."""
    accepted: int = 0
    """Those of them that became output."""


class RequestStats(msgspec.Struct, frozen=True, array_like=True):
    """What one request cost, counted since it was (re)submitted."""

    prompt_tokens: int
    generated: int
    steps: int
    """Verification forwards after its prompt."""
    drafted: int
    """Draft tokens that were verified."""
    accepted: int
    queue_ms: float
    prefill_ms: float
    reused: int = 0
    """Tokens of the prompt whose KV cache was there already."""
    tolerance_delta: float = -1.0
    """The tolerance (nats) that drafts were judged with last; below 0: there was none."""
    predicted: int = 0
    """Tokens of its own prediction that were verified."""
    predicted_right: int = 0
    """Those of them that were accepted."""
    drafters: list[DrafterShare] = []
    """With the last delta, and now and then before it."""
    tolerated: int = 0
    """Tokens of the output that only the tolerance accepted, so that they are not the target's own choice."""
    branches: int = 0
    """Other ways of its drafts that were verified beside them."""
    branches_taken: int = 0
    """Those of them that the target went."""


class Delta(msgspec.Struct, frozen=True, array_like=True):
    """Tokens that one round committed to one request."""

    request_id: str
    tokens: list[int]
    finish: str = ""
    """"" while it runs, else "stop" or "length", or DEADLINE from control."""
    stats: RequestStats | None = None
    """Up to and with this delta."""
    logprobs: list[TokenScore] | None = None
    """A score for each token, where they were asked for."""
    prompt_logprobs: list[TokenScore] | None = None
    """With the first delta: one for each token of the prompt but the first."""
    engine: int = 0
    """The replica that committed them; control fills it in."""
    speculation: EffectiveBound | None = None
    """The bound that its overrides come to; control fills it in when it is new."""
    group: str = ""
    """The group of equal bits that its tokens are of; control fills it in when it is new."""


class RoundReport(msgspec.Struct, frozen=True, tag="round"):
    """What one round committed, for all its requests, and the totals the metrics are made of."""

    deltas: list[Delta]
    sequences: int
    rows: int
    drafts: int
    """Sequences that had a draft."""
    drafted: int
    accepted: int
    accepted_per_position: list[int]
    round_ms: float
    device_ms: float
    """Of the runtime's own forward inside it."""
    draft_ms: float
    by_rule: dict[str, tuple[int, int]] = {}
    """Drafted and accepted tokens by the rule that they were judged by."""
    engine: int = 0
    """The replica; control fills it in."""
    expected_ms: float = 0.0
    """Predicted for the whole round; 0 where nothing is known."""
    by_drafter: dict[str, tuple[int, int]] = {}
    """Drafted and accepted tokens by whose they were ("grammar": a grammar added them)."""
    trace: RoundTrace | None = None
    """Of a round that was sampled."""
    in_flight: int = 1
    """Rounds that were under way when it ended, this one among them: of a target in several stages."""
    stage_ms: list[float] = []
    """Each stage's part of `device_ms`."""
    round_tokens: float = 0.0
    """Those of one round, where deltas have the tokens of several alike ones, as of a simulated worker (0: of this)."""
    tolerated: int = 0


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    request_id: str
    message: str
    kind: str
    """"invalid": it cannot be served. "failed": the worker failed on it. "too_long": see `most_tokens`.
    "not_finite": its logits were no numbers, which another worker's may be; nothing was committed from them.
    "elsewhere": this worker does not go on with it, and another may."""
    most_tokens: int = 0
    """Those of a sequence here, where it has more."""


class AcceptanceWarning(msgspec.Struct, frozen=True):
    """A drafter's drafts are accepted too rarely in one class of requests."""

    drafter: str
    route: str
    user: str
    rate: float
    """Accepted / drafted tokens."""
    upper: float
    """The upper end of its 95 % interval when that was below the threshold last."""
    threshold: float
    drafted: int
    """Of so many tokens, the last ones."""
    cause: Cause


class SloState(msgspec.Struct, frozen=True):
    """How requests of late stood at the percentiles of their objectives, and what is moved for that."""

    ttft_ms: float | None
    """None, as the next: there are too few requests, or no such objective."""
    tpot_ms: float | None
    row_price: float
    """Of a draft's row."""
    prefill_share: float
    """Of the default bound of prefills."""
    max_running: int
    levers: list[str]
    why: str


class MemoryBound(msgspec.Struct, frozen=True):
    """Forwards are kept small, as a larger one ran out of memory. It loosens in steps."""

    rows: int
    """The most that a forward has."""
    most_rows: int
    """The most that one has as a rule."""
    sequences: int
    holds_s: float
    """From the last such forward on."""
    last: str
    """What that forward said."""


class ServerLoad(msgspec.Struct, frozen=True):
    """What an endpoint's server does, for all its clients."""

    running: int = 0
    waiting: int = 0
    kv_use: float = -1.0
    """The share of its KV cache that is taken; below 0: it does not tell."""
    others_running: int = 0
    """Requests of other clients, as the next."""
    others_waiting: int = 0
    slots: int = 0
    """Requests that it runs at a time; 0: it does not tell."""
    untold: str = ""
    """Why nothing of this is known; "": it is."""


class Gauges(msgspec.Struct, frozen=True, tag="gauges"):
    """State after a round, sent at most a few times a second and whenever the worker becomes idle. What is counted is
    counted since the worker started."""

    running: int
    waiting: int
    free_blocks: int
    total_blocks: int
    preemptions: int
    drafter_bytes: int
    rounds: int
    rss_bytes: int
    prefix_queries: int = 0
    """Tokens that were looked up in the prefix cache."""
    prefix_hits: int = 0
    """Those of them that were found."""
    prefix_loaded: int = 0
    """Those of them that were read from disk."""
    drafters: list[DrafterState] = []
    """In order of cost."""
    peak_rss_bytes: int = 0
    tolerance_deltas: dict[str, float] = {}
    """In nats, by the kind of sampling ("greedy", "sampled"): those that are known."""
    tolerance_recalibrations: int = 0
    """How often they followed a drift."""
    low_acceptance: list[AcceptanceWarning] = []
    slo: SloState | None = None
    """None where there are no objectives."""
    out_of_memory: int = 0
    not_finite: int = 0
    """Requests that ended for their logits."""
    memory_bound: MemoryBound | None = None
    """None while forwards are as large as they may be."""
    corrupt: list[str] = []
    """Files of prepared models that were found damaged since they were loaded."""
    server: ServerLoad | None = None
    """Of an endpoint's worker."""
