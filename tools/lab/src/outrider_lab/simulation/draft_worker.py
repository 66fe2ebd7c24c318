"""A draft worker on virtual time: it drafts for every target that is connected, all in one pass."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from orchestrator.protocol.draft_messages import DrafterState, DraftReady
from orchestrator.protocol.links.address import LinkEndpoint
from outrider_lab.replay.recorded import Costs
from outrider_lab.simulation.courses import find_company
from outrider_lab.simulation.fleet import DraftKind
from policies.planning.throughput import draft_link_ms, together_ms

if TYPE_CHECKING:
    from outrider_lab.simulation.target_worker import SimulatedTarget

_CONTEXT_TOKENS = 256.0


class SimulatedDraftWorker:
    """`number`: its worker's. `rtts_ms`: to each target that it was attached to. One that goes is forgotten."""

    def __init__(self, number: int, kind: DraftKind, host: str) -> None:
        self.number, self.kind, self.host = number, kind, host
        self.targets: set[SimulatedTarget] = set()
        self.rtts_ms: dict[int, tuple[float, float]] = {}

    def describe(self) -> DraftReady:
        """Return what it says once it serves."""
        kind = self.kind
        return DraftReady(
            name=kind.name,
            endpoint=LinkEndpoint([f"simulated:{self.number}"], b""),
            drafter=DrafterState(kind.name, "model", adapter="simulated"),
            vocabulary_size=1 << 16,
            vocabulary_fingerprint="simulated",
            runs_ahead="on" if kind.drafts_ahead else "off",
            pid=1,
            load_s=kind.load_s,
            host=self.host,
        )

    def count_everybody(self) -> int:
        """Return how many sequences share its passes: those of all targets."""
        return max(1, sum(one.running for one in self.targets))

    def find_link_ms(self, target: SimulatedTarget, sequences: int) -> float:
        """Return what asking for drafts takes between it and a target, and getting them."""
        rtt_ms, bytes_per_s = self.rtts_ms.get(target.number, (0.0, 1e9))
        return float(draft_link_ms(rtt_ms, bytes_per_s, sequences))

    def price_drafts(self, target: SimulatedTarget, costs: Costs, sequences: int) -> Costs:
        """Return what rounds with its drafts take, as a target's depth policy learns it: so it drafts less deep where
        the way is long, or others share the passes. Numbers of sequences count in powers of two, for few replays.

        Where it drafts ahead, a round waits for drafts that are not ahead alone: all but a share of a^(d + 1) of them,
        with the mean accepted draft d = a / (1 - a) of acceptance a."""
        kind = self.kind
        everybody = 1 << (max(self.count_everybody(), sequences) - 1).bit_length()
        each_ms = kind.part.ms(everybody, everybody, _CONTEXT_TOKENS)
        first_ms = kind.part.ms(2 * everybody, everybody, _CONTEXT_TOKENS)
        link_ms = self.find_link_ms(target, find_company(sequences))
        waits = 1.0
        if kind.drafts_ahead:
            waits -= kind.acceptance ** (1.0 + kind.acceptance / (1.0 - kind.acceptance))
        draft_ms = max(0.0, first_ms - each_ms + link_ms) * waits
        return replace(costs, draft_ms=draft_ms, draft_token_ms=each_ms * waits)

    def time_round(
        self, target: SimulatedTarget, forward_ms: float, depth: float, sequences: int, context_tokens: float
    ) -> float:
        """Return what a round of a target takes that drafts so deep, in ms, by the planner's own formula
        (policies.planning.throughput). Its drafts wait for those of the other targets, which share the passes."""
        if depth <= 0.0:
            return forward_ms
        kind, everybody = self.kind, max(self.count_everybody(), sequences)
        first = kind.part.ms(2 * everybody, everybody, context_tokens)
        more = max(0.0, depth - 1.0) * kind.part.ms(everybody, everybody, context_tokens)
        drafting_ms, link_ms = first + more, self.find_link_ms(target, sequences)
        if not kind.drafts_ahead:
            return forward_ms + drafting_ms + link_ms
        hit = kind.acceptance ** (depth + 1.0)
        missed = max(1.0, (1.0 - hit) * sequences)
        late_ms = drafting_ms * missed / sequences + link_ms
        return float(together_ms(forward_ms, drafting_ms, late_ms, 0.0, hit**sequences))
