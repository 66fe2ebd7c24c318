"""Gives streams to replicas: what is due goes to the one that the routing policy takes. No effects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from device_profiles.units import MS_PER_S
from orchestrator.control.actions import Action, EndStream, LogLine, Send
from orchestrator.control.affinity import block_keys
from orchestrator.control.blame import Witness
from orchestrator.control.health import HealthBoard
from orchestrator.control.kv_moves import KvMoves
from orchestrator.control.overrides import bounds_of, resolve_overrides
from orchestrator.control.replicas import Rank, Replica, Replicas
from orchestrator.control.routes import RouteBook
from orchestrator.control.state import FAILED
from orchestrator.control.streams import Stream, Streams
from orchestrator.control.surroundings import Surroundings
from orchestrator.errors import RequestError
from orchestrator.workers.messages import Cancel
from policies.serving.failover.health import Health
from policies.serving.failover.standby import OtherBits
from policies.serving.fair_order import hold_back
from policies.serving.replica_load import predict_prefill_ms, predict_saved_ms, predict_tpot_ms
from policies.serving.routing import ReplicaState, Route, RoutedRequest, route

_NO_RISKS: Mapping[str, str] = {}
TRIAL_PATIENCE_S = 20.0
"""So long a suspect waits for a worker that has run nothing; then a replica gives up its streams for it."""


class Router:
    """Routes `streams` over `replicas`. Those that are retiring keep the streams that only they can go on with to the
    bit, and take no others. `least_depth`: see ControlLimits; `other_bits`: what standbys may do whose tokens can
    differ."""

    def __init__(
        self,
        replicas: Replicas,
        streams: Streams,
        health: HealthBoard,
        least_depth: int = 0,
        surroundings: Surroundings | None = None,
    ) -> None:
        self._replicas = replicas
        self._health = health
        self._streams = streams
        self._around = surroundings or Surroundings()
        self.book = RouteBook()
        self._least_depth = least_depth
        self.moves = KvMoves(streams, self._choose_next)
        self.other_bits: OtherBits = "new_requests"
        self._reserved = ""  # the replica that is emptied for a suspect

    def set_rules(self, least_depth: int, other_bits: OtherBits) -> None:
        """Bound depths of requests that are sent from now on by this, and let standbys do so much."""
        self._least_depth, self.other_bits = least_depth, other_bits

    def feed(self, now_s: float) -> list[Action]:
        """Send every stream that is due, and those that wait behind others while another replica has a place."""
        moved = self.moves.advance(now_s)
        if not len(self._streams):
            return moved
        sent = [*moved, *self._reserve(now_s), *self._send_due(now_s)]
        taken = self._take_back_waiting(now_s)
        return [*sent, *taken, *(self._send_due(now_s) if taken else [])]

    def end(self, stream: Stream, now_s: float, error: RequestError | None = None) -> list[Action]:
        """End a live stream: its replica is to forget it, and its reader gets the error, where there is one."""
        outcome = "the client has gone" if error is None else error.code or "error"
        self._streams.drop(stream, outcome, now_s)
        told: list[Action] = [EndStream(stream.key, error)] if error is not None else []
        return [*self._cancel(stream), *told]

    def fail_over(self, stream: Stream, now_s: float) -> None:
        """Let another replica go on with a stream, where there is one: this one has given it up."""
        stream.failed_at.append(stream.at)
        why = "its worker computed no finite number for it"
        self._streams.recall(stream, now_s, why, kind="not_finite")

    def retire(self, replica: Replica, now_s: float) -> tuple[int, list[Action]]:
        """Take the streams back from a replica that retires, but for those that only it can go on with;
        returns how many. They are due again."""
        moves = any(
            other.kind == replica.kind and not self._refuses(other, now_s)
            for other in self._replicas.serving
            if other is not replica
        )
        taken = [stream for stream in self._streams.at(replica.name) if moves or not stream.kind]
        return len(taken), self._take(replica, taken, now_s)

    def recall_streams(self, replica: Replica, now_s: float) -> list[Witness]:
        """Take all streams back from a replica whose worker is gone; returns those that ran there."""
        ready = replica.state.ready
        places = ready.slots if ready is not None else 0
        return self._streams.recall_replica(
            replica.name,
            places,
            pure=replica.runs == 1,
            progressed=replica.progressed,
            now_s=now_s,
            why=replica.state.detail,
        )

    def bind(self, source: Replica, target: Replica) -> int:
        """Let another replica go on with all that a replica has, whatever it costs; returns how many. They go as the
        first lets go of them."""
        found = self._streams.at(source.name)
        for stream in found:
            stream.bound_to, stream.left = target.name, source.name
        return len(found)

    def send_back(self, worker: str, now_s: float) -> tuple[int, list[Action]]:
        """Let a replica have the streams again that it gave away by `bind`; returns how many."""
        actions: list[Action] = []
        count = 0
        for replica in self._replicas.with_streams:
            streams = [one for one in self._streams.at(replica.name) if one.left == worker and replica.name != worker]
            for stream in streams:
                stream.bound_to, stream.left = worker, ""
            actions += self._take(replica, streams, now_s)
            count += len(streams)
        return count, actions

    def unbind(self, worker: str) -> None:
        """Let streams that were sent away from a replica go wherever is best."""
        for stream in self._streams.live():
            if stream.left == worker:
                stream.bound_to = stream.left = ""

    def is_drained(self, replica: Replica) -> bool:
        """True when no stream needs a retiring replica any more."""
        others = any(other.kind == replica.kind for other in self._replicas.serving)
        return not self._streams.counts[replica.name] and not any(
            stream.kind == replica.kind and not stream.at and not others for stream in self._streams.live()
        )

    def _send_due(self, now_s: float) -> list[Action]:
        actions: list[Action] = []
        several = len(self._replicas.serving) > 1
        for stream in self._streams.due():
            if several and self._streams.is_begun_elsewhere(stream):
                continue  # one request never ends two replicas at once; and its prompt will be in a cache
            if not stream.sends and self._streams.takes_turns and self._holds_back():
                continue
            prefix = self._prefix(stream)
            routed = self._choose_route(stream, prefix, now_s)
            if routed.replica is None:
                self.book.note(stream.key, stream.sends + 1, routed, now_s)
                if self._streams.is_suspect(stream) or stream.kind:
                    continue
                break
            found = next(one for one in self._replicas.with_streams if one.name == routed.replica)
            if stream.kind and found.kind != stream.kind:
                text = "request %s goes on with another kind of replica: its tokens may differ"
                actions.append(LogLine("warning", text, (stream.key,)))
            found.prefixes.note(prefix)
            if not self._streams.counts[found.name]:
                found.busy_s = now_s
            if not stream.sends and self._streams.takes_turns:
                stream.held_ms = (now_s - stream.due_s) * MS_PER_S
            found.runs += 1
            sent = self._streams.send(stream, found.name, found.kind, now_s)
            submit = stream.submit
            bounds = bounds_of(found.state.ready, self._least_depth, submit.lane, predicted=bool(submit.prediction))
            sent, stream.speculation = resolve_overrides(sent, stream.overrides, found.engine, bounds)
            sent, told = self.moves.give(stream, sent, found, now_s)
            actions += [Send(found.worker, sent), *told]
            found.last_route = routed.reason
            self.book.note(stream.key, stream.sends, routed, now_s)
            if several:
                actions.append(
                    LogLine("debug", "request %s goes to %s: %s", (stream.key, found.name, format_route(routed)))
                )
        return actions

    def _holds_back(self) -> bool:
        """True while every place is taken: then streams that have owners wait here, for their turn."""
        serving = [replica for replica in self._replicas.serving if replica.serving]
        sent = sum(self._streams.counts[replica.name] for replica in serving)
        return hold_back(sent, sum(replica.places for replica in serving))

    def _take_back_waiting(self, now_s: float) -> list[Action]:
        """Take back streams that wait for a place where another replica would be done sooner now."""
        serving = [replica for replica in self._replicas.serving if replica.serving]
        free = sum(max(0, replica.places - self._streams.counts[replica.name]) for replica in serving)
        actions: list[Action] = []
        for replica in serving if free else []:
            waiting = self._streams.at(replica.name)[replica.places :]
            for stream in [stream for stream in waiting if not stream.gained and not self._streams.is_suspect(stream)]:
                routed = self._choose_route(stream, self._prefix(stream), now_s)
                moves = routed.replica not in (None, replica.name)
                if free and moves and routed.saves(replica.name) > self._around.hysteresis:
                    actions += self._recall(stream, now_s)
                    free -= 1
        return actions

    def _reserve(self, now_s: float) -> list[Action]:
        """Empty the replica with the fewest streams for a suspect that has waited long enough."""
        due = [stream for stream in self._streams.due() if self._streams.is_suspect(stream)]
        if not due:
            self._reserved = ""
            return []
        serving = [one for one in self._replicas.serving if one.serving]
        if any(one.name == self._reserved for one in serving) or now_s - due[0].due_s < TRIAL_PATIENCE_S or not serving:
            return []
        taken = min(serving, key=lambda one: self._streams.counts[one.name])
        self._reserved = taken.name
        text = "worker %s is emptied: request %s, which may have ended its worker, is to run there alone"
        line = LogLine("warning", text, (taken.name, due[0].key))
        return [line, *self._take(taken, self._streams.at(taken.name), now_s)]

    def _take(self, replica: Replica, streams: Sequence[Stream], now_s: float) -> list[Action]:
        """Take streams from a replica whose worker still answers: with their KV cache where that is of use."""
        actions: list[Action] = []
        placed = self._streams.at(replica.name)[: replica.places]
        for stream in streams:
            stays, told = self.moves.want(stream, replica, now_s) if stream.gained or stream in placed else (False, [])
            actions += [*told, *([] if stays else self._recall(stream, now_s))]
        return actions

    def _choose_next(self, stream: Stream, now_s: float) -> tuple[Replica | None, int]:
        """Return where a stream would go now, and how many of its tokens are remembered there."""
        prefix = self._prefix(stream)
        routed = self._choose_route(stream, prefix, now_s)
        found = next((one for one in self._replicas.with_streams if one.name == routed.replica), None)
        return found, found.prefixes.count_cached_tokens(prefix) if found is not None else 0

    def _recall(self, stream: Stream, now_s: float) -> list[Action]:
        cancelled = self._cancel(stream)
        self._streams.recall(stream, now_s)
        return cancelled

    def _cancel(self, stream: Stream) -> list[Action]:
        """Tell the replica that has a stream to forget it."""
        having = [one for one in self._replicas.with_streams if one.name == stream.at]
        return [Send(one.worker, Cancel(stream.sent_id)) for one in having]

    def _choose_route(self, stream: Stream, prefix: Sequence[int], now_s: float) -> Route:
        every = self._replicas.with_streams
        can_go_on = [one for one in every if stream.kind and one.state.phase != FAILED and one.kind == stream.kind]
        if self.other_bits == "streams" and not any(one.serving for one in can_go_on):
            can_go_on = []
        stay = any(one.rank is Rank.SERVING for one in can_go_on)
        retiring = self._replicas.list_ranked(Rank.RETIRING)
        outs = {one.name: "is being replaced" for one in retiring if stay or one not in can_go_on}
        if can_go_on:
            outs |= {one.name: "its tokens would differ" for one in self._replicas.serving if one not in can_go_on}
        elsewhere = [one for one in every if one.serving and one.name not in stream.failed_at and one.name not in outs]
        if elsewhere:
            outs |= dict.fromkeys(stream.failed_at, "computed no finite number for it")
        outs |= self._list_standing_by(stream, can_go_on, now_s) | self._bar(stream, every, now_s)
        judged = {one.name: self._health.judge(one.parts, now_s, one.name) for one in every}
        outs |= {name: one.why for name, one in judged.items() if one.held}
        well = [one for one in every if one.serving and one.name not in outs and not judged[one.name].refuses]
        sound = [one for one in well if judged[one.name].state is not Health.HALF_OPEN]
        for one in every if well else []:  # what may be broken is better than nothing
            judgement = judged[one.name]
            if judgement.refuses:
                outs[one.name] = judgement.why
            elif judgement.state is Health.HALF_OPEN and sound and self._streams.counts[one.name]:
                outs[one.name] = f"is tried with one stream: {judgement.why}"
        if any(one.name == stream.bound_to for one in well):
            passed_over = f"an operator sends it to {stream.bound_to}"
            outs |= {one.name: outs.get(one.name, passed_over) for one in every if one.name != stream.bound_to}
        kept_at = self.moves.find_pages(stream)
        if any(one.name == kept_at for one in well):
            passed_over = f"its KV cache has gone to {kept_at}"
            outs |= {one.name: outs.get(one.name, passed_over) for one in every if one.name != kept_at}
        risks = {name: one.why for name, one in judged.items() if one.state is Health.SUSPECT}
        return choose_route(stream, prefix, every, self._streams, outs, risks, self._around, now_s)

    def _takes_more(self, replica: Replica, now_s: float) -> bool:
        """True where a replica may have another stream: of a half-open one's trial there is one."""
        judgement = self._health.judge(replica.parts, now_s, replica.name)
        if judgement.state is Health.HALF_OPEN:
            return not self._streams.counts[replica.name]
        return not judgement.refuses

    def _refuses(self, replica: Replica, now_s: float) -> bool:
        return self._health.judge(replica.parts, now_s, replica.name).refuses

    def _list_standing_by(self, stream: Stream, can_go_on: Sequence[Replica], now_s: float) -> dict[str, str]:
        """Say of active standbys that they take nothing while the target serves, but for what only they go on with."""
        standbys = [one for one in self._replicas.serving if one.standby]
        if not standbys or (can_go_on and all(one.standby for one in can_go_on)):
            return {}
        able = [one for one in self._replicas.primary if one.serving and one.name not in stream.failed_at]
        serves = any(self._takes_more(one, now_s) for one in able)
        idle = [one for one in standbys if one.name != stream.bound_to]
        return {one.name: "stands by: the target serves" for one in idle} if serves else {}

    def _bar(self, stream: Stream, replicas: Sequence[Replica], now_s: float) -> dict[str, str]:
        """Say of some replicas why they do not take a stream while there are suspects. A suspect goes where nothing but
        suspects is, to a worker that has run nothing while such a one is there or due. Nothing else goes there."""
        if not self._streams.has_suspects:
            return {}
        counts, tries = self._streams.counts, self._streams.count_suspects()
        if not self._streams.is_suspect(stream):
            trial = self._streams.on_trial()
            busy = {trial.at: "tries a suspect"} if trial is not None else {}
            if self._reserved:
                busy[self._reserved] = "is to try a suspect"
            due = any(self._streams.is_suspect(one) for one in self._streams.due())
            return {one.name: "is to try a suspect" for one in replicas if due and not one.runs} | busy
        bars = {one.name: "has other requests" for one in replicas if counts[one.name] > tries[one.name]}
        fresh = any(one.life.coming or (one.life.running and not one.runs) for one in replicas)
        if fresh and now_s - stream.due_s < TRIAL_PATIENCE_S:
            late = "has run other requests; another worker will have run none"
            bars |= {one.name: late for one in replicas if one.runs and not tries[one.name]}
        return bars

    def _prefix(self, stream: Stream) -> list[int]:
        """Return the keys of the prompt's blocks; none where there is nothing to choose."""
        return block_keys(stream.submit.prompt) if len(self._replicas.serving) > 1 else []


def choose_route(
    stream: Stream,
    prefix: Sequence[int],
    replicas: Sequence[Replica],
    streams: Streams,
    outs: Mapping[str, str],
    risks: Mapping[str, str] = _NO_RISKS,
    around: Surroundings | None = None,
    now_s: float = 0.0,
) -> Route:
    """Return where a stream goes, by the keys of its prompt's blocks (control.affinity). `outs` says of some replicas
    why they do not take it, `risks` why they may be lost. `around`: what the replicas' devices do."""
    around = around or Surroundings()
    states = []
    for replica in replicas:
        out = outs.get(replica.name, "") if replica.serving else replica.state.phase
        cached = 0 if streams.is_suspect(stream) else replica.prefixes.count_cached_tokens(prefix)
        risk = risks.get(replica.name, "")
        states.append(_state(replica, out, streams.counts[replica.name], cached, replicas, risk, around))
    return route(states, _request(stream, streams, around, now_s), around.weights)


def format_route(route: Route) -> str:
    """Return a route in one line, with why the others were not taken."""
    others = "; ".join(f"{one.name}: {one.why_not}" for one in route.rated if one.why_not)
    return f"{route.reason}; not {others}" if others else route.reason


def _request(stream: Stream, streams: Streams, around: Surroundings, now_s: float) -> RoutedRequest:
    """Return what is left of a request: its length, whether it may be drafted for, and what time it has."""
    tokens = len(stream.submit.prompt) + len(stream.committed)
    left = stream.submit.max_tokens - len(stream.committed)
    waited_ms = (now_s - stream.opened_s) * MS_PER_S
    bounds_s = [bound for bound in (stream.submit.timeout_s, around.request_timeout_s) if bound > 0.0]
    first_ms = around.ttft_ms if stream.first_s is None and around.ttft_ms > 0.0 else None
    return RoutedRequest(
        tokens,
        min(left, streams.latency.output_tokens),
        drafts=stream.submit.depth != 0,
        first_in_ms=first_ms - waited_ms if first_ms is not None else None,
        ends_in_ms=min(bounds_s) * MS_PER_S - waited_ms if bounds_s else None,
    )


def _state(
    replica: Replica,
    out: str,
    live: int,
    cached_tokens: int,
    replicas: Sequence[Replica],
    risk: str,
    around: Surroundings,
) -> ReplicaState:
    ready, gauges = replica.state.ready, replica.state.gauges
    block_tokens, blocks = (ready.block_tokens, ready.kv_blocks) if ready is not None else (0, 0)
    places = replica.places
    running = min(live, places)
    every = [one.paces for one in replicas]
    paces, sequences, draft = [one.plain for one in every], min(running + 1, places), replica.draft
    load = around.loads.find(replica.spec)
    return ReplicaState(
        name=replica.name,
        running=running,
        waiting=live - running,
        places=places,
        kv_tokens=block_tokens * blocks,
        kv_free_tokens=block_tokens * (gauges.free_blocks if gauges is not None else blocks),
        cached_prompt_tokens=cached_tokens,
        tpot_ms=predict_tpot_ms(replica.paces.plain, paces, sequences),
        prefill_ms_per_token=predict_prefill_ms(paces),
        risk=risk,
        serving=not out,
        why_not=out,
        draft=draft,
        draft_saves_ms=predict_saved_ms(replica.paces, every, draft, sequences) / around.stretch_drafts(replica.name),
        stretch=around.loads.predict_stretch(replica.spec),
        free_share=load.memory_free_bytes / load.memory_total_bytes if load and load.memory_total_bytes else 1.0,
    )
