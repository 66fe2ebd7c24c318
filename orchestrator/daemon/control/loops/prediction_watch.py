"""What rounds take and make beside what the running plan predicts, replica by replica."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from device_profiles.units import MS_PER_S
from orchestrator.config.placement import PlacementSection
from orchestrator.daemon.control.loops.profile_watch import ProfileWatch
from orchestrator.planning.correction import Key, key_of, scale_option
from orchestrator.planning.proposal import PlanProposal
from orchestrator.protocol.rounds import RoundReport
from policies.planning.plan import Role
from policies.planning.shard_cost import ModelPart, context_tokens
from policies.running_mean import update_mean
from policies.serving import drift
from policies.serving.drift import Drift
from policies.serving.request_load import RequestLoad, observe_load

# Weight of the newest round in the measured tokens per second. Not tuned: for people to read.
_NEWEST = 0.05


@dataclass(frozen=True, slots=True)
class DecodeRound:
    """A round that only decodes: of which target of the plan, its rows, sequences and context, and what it took."""

    replica: int
    shape: tuple[int, int, float]
    measured_ms: float


class PredictionWatch:
    """Of one running plan. `places`: the number in the plan of each replica, by the replica's own. `profiles` compares
    rounds with the profiles themselves, corrections left out."""

    def __init__(self, running: PlanProposal, policy: PlacementSection) -> None:
        self.profiles = ProfileWatch(running, policy.drift_tolerance, policy.drift_after_s)
        self._tolerance = policy.drift_tolerance
        self._workload = running.wanted.workload
        self._costs = _list_costs(running)
        self.drifts = [Drift() for _ in self._costs]
        self.places: dict[int, int] = {}
        self._tokens_per_s: list[float] = []
        self._request_loads: list[RequestLoad] = []
        self.set_places(range(len(self._costs)))

    def set_places(self, engines: Sequence[int]) -> None:
        """The plan's replicas run in these places, in its order. They share the requests that others had."""
        self.places = {engine: number for number, engine in enumerate(engines)}
        self._tokens_per_s = [0.0 for _ in engines]
        self._share_requests(self._request_loads)

    def take_requests(self, before: PredictionWatch) -> None:
        self._share_requests(before._request_loads)

    def _share_requests(self, loads: Sequence[RequestLoad]) -> None:
        """The plan's replicas have the requests that others had together, each the same part."""
        known = [load for load in loads if load.is_known]
        each = sum(load.sequences for load in known) / max(1, len(self.places))
        load = RequestLoad(each, max((load.rounds_ms for load in known), default=0.0))
        self._request_loads = [load] * len(self.places)

    def set_running(self, running: PlanProposal) -> None:
        self._workload, self._costs = running.wanted.workload, _list_costs(running)
        self.reset_drifts()

    def correct_costs(self, keys: Collection[Key], ratio: float) -> None:
        """The plan is kept, though rounds of these options take `ratio` times what is predicted: predict that."""
        self._costs = [[_scale(part, ratio, keys) for part in parts] for parts in self._costs]
        self.reset_drifts()

    def reset_drifts(self) -> None:
        self.drifts = [Drift() for _ in self._costs]

    @property
    def tokens_per_s(self) -> float:
        return sum(self._tokens_per_s)

    def count_requests(self) -> int:
        """Return how many requests there are at once while there are any, by the rounds; 0 while that is not known."""
        return round(sum(load.sequences for load in self._request_loads if load.is_known))

    def observe_round(self, done: RoundReport) -> DecodeRound | None:
        """Count a round; returns it where it only decodes. Of rounds that read prompts nobody knows their share."""
        number, sequences = self.places.get(done.engine), len(done.deltas)
        if not sequences or sequences != done.sequences or number is None:
            return None
        min_rows = max(part.option.min_rows for part in self._costs[number])
        if done.rows > sequences * (self._workload.depth_bound + 1 + min_rows):
            return None
        held = [delta.stats.prompt_tokens + delta.stats.generated for delta in done.deltas if delta.stats is not None]
        context = sum(held) / len(held) if held else context_tokens(self._workload)
        alone_ms = done.round_ms / done.in_flight
        if alone_ms > 0.0:
            newest = sum(len(delta.tokens) for delta in done.deltas) / alone_ms * MS_PER_S
            self._tokens_per_s[number] = update_mean(self._tokens_per_s[number] or newest, newest, _NEWEST)
        self._request_loads[number] = observe_load(self._request_loads[number], sequences, done.round_ms)
        return DecodeRound(number, (done.rows, sequences, context), done.round_ms - done.draft_ms)

    def compare_round(self, done: DecodeRound) -> Key | None:
        """Compare a round with its prediction, as it would have been without other programs on its device. Returns the
        profile that is to be marked, where one does not hold."""
        parts, before = self._costs[done.replica], self.drifts[done.replica]
        predicted_ms = sum(part.ms(*done.shape) for part in parts)
        self.drifts[done.replica] = drift.observe_drift(before, predicted_ms, done.measured_ms, self._tolerance)
        # Of a target in shards nobody knows whose profile does not hold.
        key = key_of(parts[0].option)
        marks = len(parts) == 1 and self.profiles.observe_round(key, done.shape, done.measured_ms)
        return key if marks else None


def _list_costs(proposal: PlanProposal) -> list[list[ModelPart]]:
    """Return what the parts of each replica's target run: one, or its layer shards."""
    known = {key_of(option): option for option in proposal.cluster.options if option.role is Role.TARGET}
    layers = proposal.wanted.workload.target.layers
    return [
        [ModelPart(known[key_of(shard)], (shard.end_layer - shard.first_layer) / layers) for shard in replica.shards]
        for replica in proposal.plan.replicas
    ]


def _scale(part: ModelPart, factor: float, keys: Collection[Key]) -> ModelPart:
    """Return a part that takes so many times as long, where its option is one of these."""
    return replace(part, option=scale_option(part.option, factor)) if key_of(part.option) in keys else part
