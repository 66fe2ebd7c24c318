"""What crosses the process boundary about draft workers and drafters."""

from __future__ import annotations

from typing import Literal

import msgspec

from adapters.model_identity import ModelIdentity
from orchestrator.protocol.links.address import LinkEndpoint


class AttachDraft(msgspec.Struct, frozen=True, tag="attach"):
    """The draft worker of this name is ready at this endpoint; one that the target's worker had before is gone."""

    name: str
    endpoint: LinkEndpoint | None
    """None: there is none for now, as it rests."""
    reason: str = ""
    """Why it rests."""


class ChooseDrafters(msgspec.Struct, frozen=True, tag="choose_drafters"):
    """From the next round on only these drafters propose. The rest go on reading along, so that they can be chosen
    again at any time."""

    names: list[str] | None
    """None: all of them."""


class DraftLink(msgspec.Struct, frozen=True, tag="draft_link"):
    """The target's worker says how its connection to a draft worker is."""

    name: str
    state: Literal["connected", "lost", "hung", "garbage", "refused"]
    """It is tried again where it is lost. The last three are given up until it is attached anew."""
    reason: str = ""


class RemoteState(msgspec.Struct, frozen=True):
    """What the target's worker knows of a drafter in another process. Counts are since that worker started."""

    asks: int = 0
    """Rounds that asked for drafts."""
    in_time: int = 0
    """Those answered while the round waited."""
    late: int = 0
    """Those answered after it had gone on."""
    wait_ms: float = 0.0
    answer_ms: float = 0.0
    """A running mean, from a draft request to its answer."""
    connections: int = 0
    runs_ahead: bool = False
    """It drafts while the target verifies."""
    ahead_hits: int = 0
    """Sequences whose draft was there before it was asked for."""
    ahead_misses: int = 0
    peak_rss_bytes: int = 0
    """The most that its process held so far; 0: not known."""
    rtt_ms: float = 0.0
    lead_tokens: int = 0
    """By so many tokens more it drafts ahead for that."""
    sent_bytes: int = 0
    """To it, without what encryption and the network add."""
    received_bytes: int = 0


class DrafterState(msgspec.Struct, frozen=True):
    """A drafter's effective state. Counts are since the worker started. What is not a model has no adapter, device or
    precisions."""

    name: str
    method: str
    state: str = "ok"
    """"ok": it may propose. "off": an operator chose others. "failed". One in another process may be "starting" or
    "resting" too, or what DraftLink says of its link."""
    reason: str = ""
    """Why it has failed. Of a suffix drafter that is "ok": why it has no statistics."""
    source: str = ""
    """Of a suffix drafter its statistics."""
    adapter: str = ""
    device: str = ""
    weights: str = ""
    activations: str = ""
    kv_cache: str = ""
    precision_reason: str = ""
    """Why it has these number formats."""
    static_widths: list[int] = []
    """As in ReadyDevice."""
    vocabulary: str = ""
    """How a model's goes with the target's ("identical", "padded", "translated")."""
    planned_memory_bytes: int = 0
    """What its model was announced to add to its process at the peak; of a process of its own, all of it. 0: not
    known."""
    memory_bytes: int = 0
    rounds: int = 0
    draft_ms: float = 0.0
    """What these took together."""
    drafted: int = 0
    """Its tokens that were verified."""
    accepted: int = 0
    """Those of them that became output."""
    remote: RemoteState | None = None
    """None where it is in the target's process."""
    cores: list[int] = []
    statistics_drafted: int = 0
    """Of its tokens those that the statistics said, and the text did not."""
    statistics_accepted: int = 0
    identity: ModelIdentity | None = None
    """The content of its model, where it is one of files."""
    rests: str = ""
    """Why one that is "ok" is left alone for now, as drafting goes; "": it is asked."""


class DraftReady(msgspec.Struct, frozen=True, tag="draft_ready"):
    """A draft worker serves. All fields are effective state."""

    name: str
    endpoint: LinkEndpoint
    drafter: DrafterState
    vocabulary_size: int
    vocabulary_fingerprint: str
    runs_ahead: str
    """Whether it drafts while the target verifies ("auto": unless they share cores or a device)."""
    pid: int
    load_s: float
    host: str = ""
    """What all processes of its machine say, and those of no other do."""


class DraftLoad(msgspec.Struct, frozen=True, tag="draft_load"):
    """How much a draft worker had to do of late: told about once a second while it works, and every two seconds while
    it does not and targets are connected."""

    targets: int
    sequences: int
    busy: float
    """The share of the time that its model ran."""
    crowded: float
    """The share of its answers that was cut short while another target's drafts shared its passes."""
    slowdown: float
    """How many times longer a pass is that several targets share than one target's own; 0: not known."""
