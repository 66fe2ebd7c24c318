"""What crosses the process boundary about draft workers and drafters; as all of it, msgspec structs (see port)."""

from __future__ import annotations

from typing import Literal

import msgspec

from adapters.model_identity import ModelIdentity
from orchestrator.protocol.links.address import LinkEndpoint


class AttachDraft(msgspec.Struct, frozen=True, tag="attach"):
    """The draft worker `name` is ready at this endpoint; one that it had before is gone."""

    name: str
    door: LinkEndpoint


class ChooseDrafters(msgspec.Struct, frozen=True, tag="choose_drafters"):
    """From the next round on only drafters of these names propose; None: all of them. The rest go on reading along, so
    that they can be chosen again at any time."""

    names: list[str] | None


class DraftLink(msgspec.Struct, frozen=True, tag="draft_link"):
    """The target's worker says how its connection to the draft worker `name` is.

    It is "connected", "lost" (it tries again), or given up as "hung", "garbage" or "refused" until it is attached anew.
    `reason` is one line.
    """

    name: str
    state: Literal["connected", "lost", "hung", "garbage", "refused"]
    reason: str = ""


class RemoteState(msgspec.Struct, frozen=True):
    """What the target's worker knows of a drafter in another process. All but `runs_ahead`, `answer_ms`, `rtt_ms`
    and `lead_tokens` count since
    the target's worker started.

    `asks`: rounds that asked for drafts; `in_time`: those answered while the round waited; `late`: those answered
    after it had gone on. `wait_ms`: what rounds waited, all together. `answer_ms`: a running mean from a
    draft request to its answer. `connections`: how often it was connected.
    `runs_ahead`: it drafts while the target verifies; `ahead_hits` are sequences whose
    draft was there before it was asked for, `ahead_misses` those whose draft was not.
    `peak_rss_bytes`: the most that its process held so far (0: not known). `rtt_ms`: the link's round trip as measured
    on it, `lead_tokens`: by so many tokens more it drafts ahead for that. `sent_bytes` to it and `received_bytes` from
    it, without what encryption and the network add.
    """

    asks: int = 0
    in_time: int = 0
    late: int = 0
    wait_ms: float = 0.0
    answer_ms: float = 0.0
    connections: int = 0
    runs_ahead: bool = False
    ahead_hits: int = 0
    ahead_misses: int = 0
    peak_rss_bytes: int = 0
    rtt_ms: float = 0.0
    lead_tokens: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0


class DrafterState(msgspec.Struct, frozen=True):
    """A drafter's effective state. `state` is "ok", "off" where an operator chose others, or "failed" with the
    `reason`; only one that is "ok" proposes.
    One in another process (`remote`) may be "starting", "lost", "hung", "garbage" or "refused" too (see DraftLink).

    `rounds` in which it drafted took `draft_ms` together; of its tokens `drafted` were verified and `accepted` became
    output. All count since the worker started. What is not a model has no adapter, device or precisions. The `source`
    of a suffix drafter are its statistics, and the `reason` of one that is "ok" is why it has none that there are.
    `statistics_drafted`, `statistics_accepted`: of its tokens those that the statistics said, and the text did not.
    `static_widths` as in `Ready`.
    `vocabulary`: how a model's goes with the target's ("identical", "padded", "translated"). `planned_memory_bytes`:
    what its model was announced to add to its process at the peak (0: not known). Where the model has a process of its
    own, it is what that process was announced to hold. `identity`: the content of its model, where it is one of files.
    `rests`: why one that is "ok" is left alone for now, as drafting goes ("": it is asked).
    """

    name: str
    method: str
    state: str = "ok"
    reason: str = ""
    source: str = ""
    adapter: str = ""
    device: str = ""
    weights: str = ""
    activations: str = ""
    kv_cache: str = ""
    static_widths: list[int] = []
    vocabulary: str = ""
    planned_memory_bytes: int = 0
    memory_bytes: int = 0
    rounds: int = 0
    draft_ms: float = 0.0
    drafted: int = 0
    accepted: int = 0
    remote: RemoteState | None = None
    cores: list[int] = []
    statistics_drafted: int = 0
    statistics_accepted: int = 0
    identity: ModelIdentity | None = None
    rests: str = ""


class DraftReady(msgspec.Struct, frozen=True, tag="draft_ready"):
    """The draft worker `name` serves at the endpoint `door`. All fields are effective state.
    `runs_ahead`: whether it drafts while the target verifies ("auto": unless they share cores or a device). `host`:
    what all processes of its machine say, and those of no other do."""

    name: str
    door: LinkEndpoint
    drafter: DrafterState
    vocabulary_size: int
    vocabulary_fingerprint: str
    runs_ahead: str
    pid: int
    load_s: float
    host: str = ""


class DraftLoad(msgspec.Struct, frozen=True, tag="draft_load"):
    """How much a draft worker had to do of late: told about once a second while it works, and every two seconds while
    it does not and targets are connected.

    `targets` are connected, with `sequences` that run. `busy`: the share of the time that its model ran. `crowded`: of
    its answers, the share that was cut short while another target's drafts shared its passes. `slowdown`: how
    many times longer a pass is that several targets share than one target's own (0: not known)."""

    targets: int
    sequences: int
    busy: float
    crowded: float
    slowdown: float
