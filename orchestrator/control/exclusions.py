"""Which replicas a stream may not go to, and why: as its tokens, the health of parts, suspects and operators have it.

It is told of a stream's candidates, not of all replicas: of each kind some are among them (policies.serving.narrowing),
so what holds of any candidate holds of any replica. No effects.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final

from orchestrator.control.fleet import Fleet
from orchestrator.control.health import HealthBoard, Judgement
from orchestrator.control.replicas import Rank, Replica
from orchestrator.control.state import FAILED
from orchestrator.control.streams import Stream, Streams
from policies.serving.failover.health import Health
from policies.serving.failover.standby import OtherBits

TRIAL_PATIENCE_S = 20.0
"""So long a suspect waits for a worker that has run nothing; then a replica gives up its streams for it."""
_NONE: Final[Mapping[str, str]] = {}
_WELL: Final = Judgement(Health.HEALTHY)


class Exclusions:
    """See the module. `other_bits`: what standbys may do whose tokens can differ. `reserved`: the replica that is
    emptied for a suspect."""

    def __init__(self, fleet: Fleet, streams: Streams, health: HealthBoard) -> None:
        self.other_bits: OtherBits = "new_requests"
        self.reserved = ""
        self._fleet = fleet
        self._streams = streams
        self._health = health

    @property
    def is_quiet(self) -> bool:
        """True while all parts are healthy."""
        return self._health.quiet

    def list_trying(self) -> list[str]:
        """Return the replicas that try a suspect, or are to."""
        if not self._streams.has_suspects:
            return []
        trial = self._streams.on_trial()
        return [name for name in (trial.at if trial is not None else "", self.reserved) if name]

    def may_find(self, stream: Stream, kept_at: str) -> bool:
        """Return whether there may be anything to find: mostly there is not."""
        asked = stream.kind or stream.failed_at or stream.bound_to or kept_at
        return bool(asked or not self._health.quiet or not self._fleet.is_plain or self._streams.has_suspects)

    def find(
        self, stream: Stream, every: Sequence[Replica], kept_at: str, now_s: float
    ) -> tuple[Mapping[str, str], Mapping[str, str]]:
        """Return of some candidates why they do not take a stream, and of others why they may be lost. `kept_at`: the
        replica that has its pages."""
        unwell = self._fleet.find_unwell(now_s) if not self._health.quiet else ()
        judged = {one.name: self.judge(one, unwell, now_s) for one in every}
        outs = self._list_unlike(stream, every, judged, now_s)
        outs |= {name: one.why for name, one in judged.items() if one.held}
        well = [one for one in every if one.serving and one.name not in outs and not judged[one.name].refuses]
        sound = [one for one in well if judged[one.name].state is not Health.HALF_OPEN]
        for one in every if well else []:  # what may be broken is better than nothing
            judgement = judged[one.name]
            if judgement.refuses:
                outs[one.name] = judgement.why
            elif judgement.state is Health.HALF_OPEN and sound and self._streams.counts[one.name]:
                outs[one.name] = f"is tried with one stream: {judgement.why}"
        wanted = (
            (stream.bound_to, f"an operator sends it to {stream.bound_to}"),
            (kept_at, f"its KV cache has gone to {kept_at}"),
        )
        for name, passed_over in wanted:
            if name and any(one.name == name for one in well):
                outs |= {one.name: outs.get(one.name, passed_over) for one in every if one.name != name}
        return outs, {name: one.why for name, one in judged.items() if one.state is Health.SUSPECT}

    def judge(self, replica: Replica, unwell: Collection[Replica], now_s: float) -> Judgement:
        """Return how healthy a replica's parts are, of which some are in `unwell`."""
        if replica not in unwell:
            return _WELL
        return self._health.judge(replica.parts, now_s, replica.name)

    def refuses(self, replica: Replica, now_s: float) -> bool:
        """True where nothing new is to go to a replica."""
        return not self._health.quiet and self.judge(replica, self._fleet.find_unwell(now_s), now_s).refuses

    def _list_unlike(
        self, stream: Stream, every: Sequence[Replica], judged: Mapping[str, Judgement], now_s: float
    ) -> dict[str, str]:
        """Say which candidates are out for what they are and for what the stream is, whatever their health."""
        can_go_on = [one for one in every if stream.kind and one.state.phase != FAILED and one.kind == stream.kind]
        if self.other_bits == "streams" and not any(one.serving for one in can_go_on):
            can_go_on = []
        going_on = set(can_go_on)
        stay = any(one.rank is Rank.SERVING for one in can_go_on)
        retiring = [one for one in every if one.rank is Rank.RETIRING]
        outs = {one.name: "is being replaced" for one in retiring if stay or one not in going_on}
        if can_go_on:
            others = [one for one in every if one.rank is Rank.SERVING and one not in going_on]
            outs |= {one.name: "its tokens would differ" for one in others}
        elsewhere = any(one.serving and one.name not in stream.failed_at and one.name not in outs for one in every)
        if elsewhere:
            outs |= dict.fromkeys(stream.failed_at, "computed no finite number for it")
        return outs | self._list_standing_by(stream, every, can_go_on, judged) | self._bar(stream, every, now_s)

    def _list_standing_by(
        self,
        stream: Stream,
        every: Sequence[Replica],
        can_go_on: Sequence[Replica],
        judged: Mapping[str, Judgement],
    ) -> dict[str, str]:
        """Say of active standbys that they take nothing while the target serves, but for what only they go on with."""
        standbys = [one for one in every if one.standby and one.rank is Rank.SERVING]
        if not standbys or (can_go_on and all(one.standby for one in can_go_on)):
            return {}
        primary = [one for one in every if one.rank is Rank.SERVING and not one.standby]
        able = [one for one in primary if one.serving and one.name not in stream.failed_at]
        serves = any(self._takes_more(one, judged[one.name]) for one in able)
        idle = [one for one in standbys if one.name != stream.bound_to]
        return {one.name: "stands by: the target serves" for one in idle} if serves else {}

    def _takes_more(self, replica: Replica, judgement: Judgement) -> bool:
        """True where a replica may have another stream: of a half-open one's trial there is one."""
        if judgement.state is Health.HALF_OPEN:
            return not self._streams.counts[replica.name]
        return not judgement.refuses

    def _bar(self, stream: Stream, replicas: Sequence[Replica], now_s: float) -> dict[str, str]:
        """Say of some replicas why they do not take a stream while there are suspects. A suspect goes where nothing but
        suspects is, to a worker that has run nothing while such a one is there or due. Nothing else goes there."""
        if not self._streams.has_suspects:
            return {}
        if not self._streams.is_suspect(stream):
            trial = self._streams.on_trial()
            busy = {trial.at: "tries a suspect"} if trial is not None else {}
            if self.reserved:
                busy[self.reserved] = "is to try a suspect"
            due = any(self._streams.is_suspect(one) for one in self._streams.due())
            return {one.name: "is to try a suspect" for one in replicas if due and not one.runs} | busy
        counts, tries = self._streams.counts, self._streams.count_suspects()
        bars = {one.name: "has other requests" for one in replicas if counts[one.name] > tries[one.name]}
        fresh = any(one.life.coming or (one.life.running and not one.runs) for one in replicas)
        if fresh and now_s - stream.due_s < TRIAL_PATIENCE_S:
            late = "has run other requests; another worker will have run none"
            bars |= {one.name: late for one in replicas if one.runs and not tries[one.name]}
        return bars
