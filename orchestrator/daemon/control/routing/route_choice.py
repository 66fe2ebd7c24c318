"""Where a stream may not go, and why; what each replica costs it; which one is taken. No effects."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final

from device_profiles.units import MS_PER_S
from orchestrator.daemon.control.health.health import HealthBoard, Judgement
from orchestrator.daemon.control.replicas.fleet import Fleet
from orchestrator.daemon.control.replicas.replicas import Rank, Replica
from orchestrator.daemon.control.routing.abilities import list_unable, needs_ability
from orchestrator.daemon.control.routing.surroundings import Surroundings
from orchestrator.daemon.control.state import FAILED
from orchestrator.daemon.control.streams.streams import Stream, Streams
from orchestrator.protocol.rounds import ServerLoad
from policies.serving.device_load import ALONE
from policies.serving.failover.health import Health
from policies.serving.failover.standby import NO_RULES, FailoverRules
from policies.serving.replica_load import SharedPaces, reckon_tpot_ms
from policies.serving.routing import ReplicaState, Route, RoutedRequest, route

TRIAL_PATIENCE_S = 20.0
"""So long a suspect waits for a worker that has run nothing; then a replica gives up its streams for it."""
_WELL: Final = Judgement(Health.HEALTHY)
_NO_RISKS: Mapping[str, str] = {}


class Exclusions:
    """Which replicas a stream may not go to, and why: as its tokens, the health of parts, suspects and operators have
    it.

    It is told of a stream's candidates, not of all replicas: of each kind some are among them
    (policies.serving.narrowing), so what holds of any candidate holds of any replica. `rules`: when
    streams go on with other bits. `reserved`: the replica that is emptied for a suspect."""

    def __init__(self, fleet: Fleet, streams: Streams, health: HealthBoard) -> None:
        self.rules: FailoverRules = NO_RULES
        self.reserved = ""
        self._fleet = fleet
        self._streams = streams
        self._health = health

    @property
    def is_quiet(self) -> bool:
        return self._health.quiet

    def list_trying(self) -> list[str]:
        if not self._streams.has_suspects:
            return []
        trial = self._streams.on_trial()
        return [name for name in (trial.at if trial is not None else "", self.reserved) if name]

    def may_find(self, stream: Stream, kept_at: str) -> bool:
        """Return whether there may be anything to find: mostly there is not."""
        particular = stream.group or stream.submit.group or stream.failed_at or stream.bound_to or kept_at
        some_unable, has_tokens = self._fleet.has_unable, bool(stream.committed)
        limited = needs_ability(stream.submit, has_tokens=has_tokens, some_unable=some_unable)
        return bool(
            limited or particular or not self._health.quiet or not self._fleet.is_plain or self._streams.has_suspects
        )

    def find_exclusions(
        self, stream: Stream, every: Sequence[Replica], kept_at: str, now_s: float
    ) -> tuple[Mapping[str, str], Mapping[str, str]]:
        """Return which candidates do not take a stream, and which may be lost. `kept_at`: who has its pages."""
        judged = self._judge_all(every, now_s)
        outs = self._rule_out(stream, every, judged, now_s)
        well = _list_well(every, judged, outs)
        wanted = (
            (stream.bound_to, f"an operator sends it to {stream.bound_to}"),
            (kept_at, f"its KV cache has gone to {kept_at}"),
        )
        for name, passed_over in wanted:
            if name and any(replica.name == name for replica in well):
                outs |= {replica.name: outs.get(replica.name, passed_over) for replica in every if replica.name != name}
        return outs, {name: judgement.why for name, judgement in judged.items() if judgement.state is Health.SUSPECT}

    def list_able(self, stream: Stream, every: Sequence[Replica], now_s: float) -> list[Replica]:
        """Return the replicas that would take a stream if nothing else ran there."""
        judged = self._judge_all(every, now_s)
        outs = self._rule_out(stream, every, judged, now_s, emptied=True)
        return [replica for replica in every if replica.serving and replica.name not in outs]

    def _judge_all(self, every: Sequence[Replica], now_s: float) -> dict[str, Judgement]:
        unwell = self._fleet.find_unwell(now_s) if not self._health.quiet else ()
        return {replica.name: self.judge(replica, unwell, now_s) for replica in every}

    def _rule_out(
        self,
        stream: Stream,
        every: Sequence[Replica],
        judged: Mapping[str, Judgement],
        now_s: float,
        *,
        emptied: bool = False,
    ) -> dict[str, str]:
        """Say of candidates why they do not take a stream. `emptied`: whatever they run counts for nothing."""
        outs = self._list_unlike(stream, every, judged, now_s)
        bars = {} if emptied else self._bar(stream, every, outs, judged, now_s)
        outs |= self._list_standing_by(stream, every, outs.keys() | bars.keys(), judged) | bars
        outs |= {name: judgement.why for name, judgement in judged.items() if judgement.held}
        well = _list_well(every, judged, outs)
        sound = [replica for replica in well if judged[replica.name].state is not Health.HALF_OPEN]
        for replica in every if well else []:  # what may be broken is better than nothing
            judgement = judged[replica.name]
            if judgement.refuses:
                outs[replica.name] = judgement.why
            elif judgement.state is Health.HALF_OPEN and sound and self._streams.counts[replica.name]:
                outs[replica.name] = f"is tried with one stream: {judgement.why}"
        return outs

    def judge(self, replica: Replica, unwell: Collection[Replica], now_s: float) -> Judgement:
        """Return how healthy a replica's parts are, of which some are in `unwell`."""
        if replica not in unwell:
            return _WELL
        return self._health.judge(replica.parts, now_s, replica.name)

    def refuses(self, replica: Replica, now_s: float) -> bool:
        return not self._health.quiet and self.judge(replica, self._fleet.find_unwell(now_s), now_s).refuses

    def _list_unlike(
        self, stream: Stream, every: Sequence[Replica], judged: Mapping[str, Judgement], now_s: float
    ) -> dict[str, str]:
        """Say which candidates are out for what they are and for what the stream is, whatever else they run."""
        wanted = stream.submit.group  # these bits, and no others
        group = stream.group or wanted
        some_unable, has_tokens = self._fleet.has_unable, bool(stream.committed)
        unable = list_unable(stream.submit, every, has_tokens=has_tokens, some_unable=some_unable)
        able = [replica for replica in every if replica.name not in unable]
        can_go_on = [replica for replica in able if group and replica.group in (group, "") and has_hope(replica)]
        may_change = self.rules.other_bits == "streams" and not wanted
        if may_change and not self._is_group_expected(stream, can_go_on, judged, now_s):
            can_go_on = []
        going_on = set(can_go_on)
        stay = any(replica.rank is Rank.SERVING for replica in can_go_on)
        retiring = [replica for replica in every if replica.rank is Rank.RETIRING]
        outs = {replica.name: "is being replaced" for replica in retiring if stay or replica not in going_on}
        if can_go_on or wanted:
            others = [replica for replica in every if replica.rank is Rank.SERVING and replica not in going_on]
            outs |= {replica.name: "its tokens would differ" for replica in others}
        outs |= unable
        others = [replica for replica in every if replica.name not in stream.failed_at and replica.name not in outs]
        if any(replica.serving and not judged[replica.name].held for replica in others):
            outs |= dict.fromkeys(stream.failed_at, "gave it up")
        return outs

    def _is_group_expected(
        self, stream: Stream, members: Sequence[Replica], judged: Mapping[str, Judgement], now_s: float
    ) -> bool:
        """Return whether a replica of a stream's group serves, or may before `failover.after_s` is over for it."""
        until_s = stream.due_s + self.rules.after_s
        return any(
            replica.serving
            or (now_s < until_s and replica.state.back_s <= until_s and not judged[replica.name].refuses)
            for replica in members
        )

    def _list_standing_by(
        self, stream: Stream, every: Sequence[Replica], outs: Collection[str], judged: Mapping[str, Judgement]
    ) -> dict[str, str]:
        """Say of active standbys that they take nothing while the target takes the stream. `outs` do not."""
        serving = [replica for replica in every if replica.rank is Rank.SERVING]
        idle = [replica.name for replica in serving if replica.standby and replica.name != stream.bound_to]
        if not idle:
            return {}
        able = [replica for replica in serving if not replica.standby and replica.serving and replica.name not in outs]
        takes = any(self._takes_more(replica, judged[replica.name]) for replica in able)
        return dict.fromkeys(idle, "stands by: the target serves") if takes else {}

    def _takes_more(self, replica: Replica, judgement: Judgement) -> bool:
        """True where a replica may have another stream: of a half-open one's trial there is one."""
        if judgement.state is Health.HALF_OPEN:
            return not self._streams.counts[replica.name]
        return not judgement.refuses

    def _bar(
        self,
        stream: Stream,
        every: Sequence[Replica],
        outs: Collection[str],
        judged: Mapping[str, Judgement],
        now_s: float,
    ) -> dict[str, str]:
        """Say of some candidates why they do not take a stream while there are suspects. A suspect goes where nothing
        but suspects is, to a worker that has run nothing while it can have such a one soon. Nothing else goes there.
        `outs` do not take the stream anyway."""
        if not self._streams.has_suspects:
            return {}
        if not self._streams.is_suspect(stream):
            trial = self._streams.on_trial()
            busy = {trial.at: "tries a suspect"} if trial is not None else {}
            if self.reserved:
                busy[self.reserved] = "is to try a suspect"
            suspect = next((stream for stream in self._streams.due() if self._streams.is_suspect(stream)), None)
            if suspect is not None:
                barred = self._rule_out(suspect, every, judged, now_s)
                fresh = [replica.name for replica in every if not replica.runs and replica.name not in barred]
                busy = dict.fromkeys(fresh, "is to try a suspect") | busy
            return busy
        counts, tries = self._streams.counts, self._streams.count_suspects()
        bars = {replica.name: "has other requests" for replica in every if counts[replica.name] > tries[replica.name]}
        coming = [replica for replica in every if replica.name not in outs and not judged[replica.name].refuses]
        fresh_soon = any(replica.life.coming or (replica.life.running and not replica.runs) for replica in coming)
        if fresh_soon and now_s - stream.due_s < TRIAL_PATIENCE_S:
            late = "has run other requests; another worker will have run none"
            bars |= {replica.name: late for replica in every if replica.runs and not tries[replica.name]}
        return bars


def _list_well(every: Sequence[Replica], judged: Mapping[str, Judgement], outs: Collection[str]) -> list[Replica]:
    serving = [replica for replica in every if replica.serving and replica.name not in outs]
    return [replica for replica in serving if not judged[replica.name].refuses]


def has_hope(replica: Replica) -> bool:
    return replica.state.phase != FAILED and not (replica.state.ready is None and replica.state.spent)


def count_shared(live: int, places: int, server: ServerLoad) -> tuple[int, int, int, int]:
    """Return, of a replica whose server has requests of others, too: those that run, those that wait, how many run at a
    time, and how many of all are others'. `live` streams are ours, in so many `places`. A server that does not tell its
    slots takes more at once as long as nobody waits there."""
    others = server.others_running + server.others_waiting
    most = server.slots or places + server.others_running
    present = live + server.others_running
    waiting = max(server.others_waiting, live - places, present - most, 0)
    running = most if waiting or live >= places else min(present, most)
    return running, waiting, most, others


def choose_route(
    stream: Stream,
    prefix: Sequence[int],
    replicas: Sequence[Replica],
    streams: Streams,
    outs: Mapping[str, str],
    risks: Mapping[str, str] = _NO_RISKS,
    around: Surroundings | None = None,
    now_s: float = 0.0,
    paces: SharedPaces | None = None,
) -> Route:
    """Return where a stream goes, by the keys of its prompt's blocks (control.routing.affinity). `outs` says of some
    replicas why they do not take it, `risks` why they may be lost. `around`: what the replicas' devices do. `paces`:
    what all replicas show together, where these are not all."""
    around = around or Surroundings()
    if paces is None:
        paces = SharedPaces()
        for number, replica in enumerate(replicas):
            paces.set_paces(number, replica.paces, replica.standing.alike)
    cold = not prefix or streams.is_suspect(stream)
    busy = sum(1 for replica in replicas if replica.standing.live)
    states = []
    for replica in replicas:
        standing, state = replica.standing, replica.state
        out = (outs.get(replica.name, "") if outs else "") if standing.decodes else state.phase
        live, places, draft = standing.live, standing.places, standing.draft
        running = live if live < places else places
        waiting, others = live - running, 0
        if standing.server is not None:
            running, waiting, places, others = count_shared(live, places, standing.server)
        sequences = running + 1 if running < places else places
        pace = replica.paces
        if pace.plain is standing.own_pace and sequences == standing.own_sequences:
            own_ms = standing.own_ms
        else:
            own_ms = standing.find_own_ms(pace.plain, sequences)
        stretch, free_share = ALONE, 1.0
        group = paces.find_group(standing.alike)
        tpot_ms = reckon_tpot_ms(own_ms, paces.share_tpot_ms(group, standing.expected_pace, sequences), sequences)
        saved_ms = paces.predict_saved_ms(group, pace, draft, tpot_ms, sequences) if draft else 0.0
        company = pace.company if busy > (live > 0) else 1.0
        if around.loads.knows:
            stretch, free_share = around.loads.find_share(replica.device, replica.spec.cores)
            saved_ms = saved_ms / around.stretch_drafts(replica.name) if saved_ms else 0.0
        states.append(
            ReplicaState(
                replica.name,
                running,
                waiting,
                places,
                standing.kv_tokens,
                standing.kv_free_tokens,
                0 if cold else replica.prefixes.count_cached_tokens(prefix),
                tpot_ms * company,
                paces.predict_prefill_ms(group, standing.expected_pace),
                risks.get(replica.name, "") if risks else "",
                not out,
                out,
                draft,
                saved_ms * company,
                stretch,
                free_share,
                others,
                company,
            )
        )
    return route(states, _request(stream, streams, around, now_s), around.weights)


def _request(stream: Stream, streams: Streams, around: Surroundings, now_s: float) -> RoutedRequest:
    """Return what is left of a request: its length, whether it may be drafted for, and what time it has."""
    submit, done = stream.submit, len(stream.committed)
    first_ms = ends_ms = None
    if around.ttft_ms > 0.0 and stream.first_s is None:
        first_ms = around.ttft_ms - (now_s - stream.opened_s) * MS_PER_S
    if submit.timeout_s > 0.0 or around.request_timeout_s > 0.0:
        bounds_s = [bound for bound in (submit.timeout_s, around.request_timeout_s) if bound > 0.0]
        ends_ms = min(bounds_s) * MS_PER_S - (now_s - stream.opened_s) * MS_PER_S
    left = min(submit.max_tokens - done, streams.latency.output_tokens)
    return RoutedRequest(len(submit.prompt) + done, left, submit.depth != 0, first_ms, ends_ms)
