"""What crosses the process boundary about workers that hold some layers of a target; as all of it, msgspec structs."""

from __future__ import annotations

import msgspec

from orchestrator.protocol.links.address import LinkEndpoint


class ShardReady(msgspec.Struct, frozen=True, tag="shard_ready"):
    """A worker for layers of a target can be called at its endpoint. It loads what the target's worker asks for."""

    endpoint: LinkEndpoint
    pid: int
