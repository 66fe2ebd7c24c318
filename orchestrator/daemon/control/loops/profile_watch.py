"""Whether the profiles behind a plan hold: what rounds take beside what each profile predicts."""

from __future__ import annotations

from orchestrator.planning.correction import Key, key_of
from orchestrator.planning.proposal import PlanProposal
from policies.planning.plan import Option, Role
from policies.planning.shard_cost import ModelPart
from policies.serving import drift
from policies.serving.drift import Drift


class ProfileWatch:
    """What rounds take beside what the profiles themselves predict, corrections left out: by target's option."""

    def __init__(self, first: PlanProposal, tolerance: float, marked_after_s: float) -> None:
        """`tolerance`: how far rounds may be from what is predicted, as a share of it. `marked_after_s`: for how long,
        in time of rounds, before a profile does not hold."""
        self.marked: dict[Key, str] = {}
        self._tolerance = tolerance
        self._marked_after_s = marked_after_s
        self._measured: dict[Key, Option] = {}
        self._drifts: dict[Key, Drift] = {}
        self.add(first)

    def add(self, first: PlanProposal) -> None:
        self._measured.update(
            {key_of(option): option for option in first.cluster.options if option.role is Role.TARGET}
        )
        self._drifts = {key: self._drifts.get(key, Drift()) for key in self._measured}

    def renew(self, first: PlanProposal) -> None:
        now = {key_of(option): option for option in first.cluster.options if option.role is Role.TARGET}
        for key, option in now.items():
            if option != self._measured.get(key):
                self._drifts.pop(key, None)
                self.marked.pop(key, None)
        self.add(first)

    def ratio(self, key: Key) -> float:
        return self._drifts[key].ratio

    def observe_round(self, key: Key, shape: tuple[int, int, float], measured_ms: float) -> bool:
        """Take in a round of so many rows and sequences over such a context; True when the profile is to be marked."""
        if self._measured[key].source in ("estimate", "split"):
            return False  # there is no profile that could be wrong
        predicted_ms = ModelPart(self._measured[key]).ms(*shape)
        self._drifts[key] = drift.observe_drift(self._drifts[key], predicted_ms, measured_ms, self._tolerance)
        if key in self.marked or not drift.lasts(self._drifts[key], self._marked_after_s):
            return False
        self.marked[key] = ""
        return True
