"""What a simulated worker says of itself once it serves."""

from __future__ import annotations

from typing import Final

from orchestrator.protocol.messages import Ready
from orchestrator.worker.expected_rounds import expect_rounds
from outrider_lab.simulation.fleet import PlacedReplica

BLOCK_TOKENS: Final = 16
SUFFIX: Final = "suffix"


def build_ready(replica: PlacedReplica, pid: int = 1) -> Ready:
    """Return what a worker of a replica says once it serves. All simulated replicas say the same tokens."""
    kind = replica.kind
    drafters = [SUFFIX] if kind.max_depth and len(kind.book) else []
    return Ready(
        model="simulated",
        vocabulary_size=1 << 16,
        vocabulary_fingerprint="simulated",
        context_tokens=1 << 20,
        adapter="simulated",
        device=replica.device,
        device_name=kind.name,
        weights="as_file",
        activations="auto",
        kv_cache="auto",
        exactness="bit",
        row_invariant=True,
        slots=kind.places,
        kv_blocks=kind.kv_tokens // BLOCK_TOKENS,
        block_tokens=BLOCK_TOKENS,
        drafters=[*drafters, *([kind.draft.name] if kind.draft is not None else [])],
        max_depth=kind.max_depth,
        pid=pid,
        load_s=kind.load_s,
        class_fingerprint="simulated",
        host=replica.host,
        expected_rounds=expect_rounds(kind.costs.forward, kind.places),
    )
