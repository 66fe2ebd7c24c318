"""A draft worker on virtual time: it drafts for every target that is connected, all in one pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator.links.address import LinkEndpoint
from orchestrator.simulation.fleet import DraftKind
from orchestrator.workers.draft_messages import DrafterState, DraftReady
from policies.planning.throughput import draft_link_ms, together_ms

if TYPE_CHECKING:
    from orchestrator.simulation.target_worker import SimulatedTarget


class SimulatedDraftWorker:
    """`number`: its worker's. `rtts_ms`: to each target that it was attached to. One that goes is forgotten."""

    __slots__ = ("host", "kind", "number", "rtts_ms", "slowness", "targets")

    def __init__(self, number: int, kind: DraftKind, host: str) -> None:
        self.number, self.kind, self.host = number, kind, host
        self.targets: set[SimulatedTarget] = set()
        self.rtts_ms: dict[int, tuple[float, float]] = {}
        self.slowness = 1.0

    def describe(self) -> DraftReady:
        """Return what it says once it serves."""
        kind = self.kind
        return DraftReady(
            name=kind.name,
            door=LinkEndpoint([f"simulated:{self.number}"], b""),
            drafter=DrafterState(kind.name, "model", adapter="simulated"),
            vocabulary_size=1 << 16,
            vocabulary_fingerprint="simulated",
            runs_ahead="on" if kind.drafts_ahead else "off",
            pid=1,
            load_s=kind.load_s,
            host=self.host,
        )

    def time_round(
        self, target: SimulatedTarget, forward_ms: float, depth: float, sequences: int, context_tokens: float
    ) -> float:
        """Return what a round of a target takes, in ms, by the planner's own formula (policies.planning.throughput).
        Its drafts wait for those of the other targets, which share the passes."""
        if depth <= 0.0:
            return forward_ms
        kind = self.kind
        everybody = sum(one.running for one in self.targets) or sequences
        rtt_ms, bytes_per_s = self.rtts_ms.get(target.number, (0.0, 1e9))
        first = kind.part.ms(2 * everybody, everybody, context_tokens)
        more = max(0.0, depth - 1.0) * kind.part.ms(everybody, everybody, context_tokens)
        drafting_ms = (first + more) * self.slowness
        link_ms = float(draft_link_ms(rtt_ms, bytes_per_s, sequences))
        if not kind.drafts_ahead:
            return forward_ms + drafting_ms + link_ms
        hit = kind.acceptance ** (depth + 1.0)
        missed = max(1.0, (1.0 - hit) * sequences)
        late_ms = drafting_ms * missed / sequences + link_ms
        return float(together_ms(forward_ms, drafting_ms, late_ms, 0.0, hit**sequences))
