"""What a simulated worker says of itself once it serves."""

from __future__ import annotations

from typing import Final

from orchestrator.protocol.ready import Ready, ReadyDevice, ReadyDrafting, ReadyKv, ReadyModel, ReadyPrecision
from orchestrator.worker.loading.engine import expect_rounds
from outrider_lab.simulation.fleet import PlacedReplica

BLOCK_TOKENS: Final = 16
SUFFIX: Final = "suffix"


def build_ready(replica: PlacedReplica, pid: int = 1) -> Ready:
    """Return what a worker of a replica says once it serves."""
    kind = replica.kind
    drafters = [SUFFIX] if kind.max_depth and len(kind.book) else []
    return Ready(
        ReadyModel("simulated", 1 << 16, "simulated", 1 << 20),
        ReadyDevice("simulated", replica.device, kind.name),
        ReadyPrecision("as_file", "auto", "auto", "bit", row_invariant=True, class_fingerprint=kind.group),
        ReadyKv(kind.kv_tokens // BLOCK_TOKENS, BLOCK_TOKENS),
        slots=kind.places,
        pid=pid,
        load_s=kind.load_s,
        drafting=ReadyDrafting(
            [*drafters, *([kind.draft.name] if kind.draft is not None else [])], max_depth=kind.max_depth
        ),
        host=replica.host,
        expected_rounds=expect_rounds(kind.costs.forward, kind.places),
    )
