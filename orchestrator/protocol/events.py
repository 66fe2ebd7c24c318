"""Events: what a worker says, in one multiplexed stream of MessagePack (see `frames`)."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from device_profiles.device_load import DeviceLoad
from orchestrator.protocol.commands import KvPages
from orchestrator.protocol.draft_messages import DraftLink, DraftLoad, DraftReady
from orchestrator.protocol.links.address import LinkEndpoint
from orchestrator.protocol.ready import Ready
from orchestrator.protocol.rounds import Gauges, Refused, RoundReport
from policies.serving.failover.watchdog import Pulse


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    stage: str
    fraction: float
    """0 to 1, negative where it is not known."""


class StillWorking(msgspec.Struct, frozen=True, tag="working"):
    """The worker is at a step that it has not finished, and has said nothing for a while."""

    stage: str
    pulse: Pulse


class Retuned(msgspec.Struct, frozen=True, tag="retuned"):
    """What came of a Retune: the worker as it is now, or why it stays as it was."""

    ready: Ready | None
    why: str = ""


class MovedOut(msgspec.Struct, frozen=True, tag="moved_out"):
    """The worker has forgotten a request."""

    request_id: str
    pages: KvPages | None
    """What it has written of it; None where that is nothing, and `why` says why."""
    took_ms: float
    why: str = ""


class MovedIn(msgspec.Struct, frozen=True, tag="moved_in"):
    """A request that came with pages runs."""

    request_id: str
    length_bytes: int
    """Of the pages that it began with; 0 where it is computed again, and `why` says why."""
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
    "endpoint",
    "unlike",
    "other_class",
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
- "endpoint": the server that a worker asks is away. The worker and its host are well.
- "unlike": control ended it, as its model or its bits are not those of the replicas that it was to serve beside.
- "hung": control ended it.
- "unknown": a failure that nobody could place; "": nobody tried to.
"""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The worker cannot go on (model refused, device lost) and ends."""

    message: str
    restartable: bool
    """A new one may help."""
    kind: FailureKind = ""


class MeasuredValue(msgspec.Struct, frozen=True, tag="measured"):
    kind: Literal["device", "model", "pair", "texts", "link"]
    value: dict[str, Any]
    """Plain data of the class of `device_profiles.store` that `kind` names."""


class HostDescribed(msgspec.Struct, frozen=True, tag="host"):
    inventory: dict[str, Any]
    """Plain data of orchestrator.daemon.cluster.inventory.HostInventory."""


class DevicesSampled(msgspec.Struct, frozen=True, tag="devices"):
    """What the devices of an agent's host do, by their names there."""

    loads: dict[str, DeviceLoad]


class PagesEndpoint(msgspec.Struct, frozen=True, tag="pages_endpoint"):
    """Workers on other hosts can send pages of their KV cache to this worker there; before it is ready."""

    endpoint: LinkEndpoint


class EndpointOpened(msgspec.Struct, frozen=True, tag="opened"):
    """A measuring worker answers at this endpoint."""

    endpoint: LinkEndpoint


class ShardReady(msgspec.Struct, frozen=True, tag="shard_ready"):
    """A worker for layers of a target can be called at its endpoint. It loads what the target's worker asks for."""

    endpoint: LinkEndpoint
    pid: int


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
    | PagesEndpoint
    | ShardReady
    | Finished
)
