"""Gives streams to replicas: what is due goes to the one that the routing policy takes. No effects."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from device_profiles.units import MS_PER_S
from orchestrator.control.actions import Action, EndStream, LogLine, Send
from orchestrator.control.affinity import block_keys
from orchestrator.control.overrides import bounds_of, resolve_overrides
from orchestrator.control.replicas import Rank, Replica, Replicas
from orchestrator.control.state import FAILED
from orchestrator.control.streams import Stream, Streams
from orchestrator.errors import RequestError
from orchestrator.workers.messages import Cancel
from policies.serving.fair_order import hold_back
from policies.serving.replica_load import predict_prefill_ms, predict_tpot_ms
from policies.serving.routing import ReplicaState, Route, RoutedRequest, route

LOSSES_ARE_KNOWN_S = 2.0
"""So long after a loss, any other replica that died with it has been reported."""


class Router:
    """Routes `streams` over `replicas`. Those that are retiring keep the streams that only they can go on with to the
    bit, and take no others. `least_depth`: see ControlLimits."""

    def __init__(self, replicas: Replicas, streams: Streams, least_depth: int = 0) -> None:
        self._replicas = replicas
        self._streams = streams
        self._least_depth = least_depth
        self._lost_s = -math.inf

    def feed(self, now_s: float) -> list[Action]:
        """Send every stream that is due, and those that wait behind others while another replica has a place."""
        if not len(self._streams):
            return []
        sent = self._send_due(now_s)
        taken = self._take_back_waiting(now_s)
        return [*sent, *taken, *(self._send_due(now_s) if taken else [])]

    def end(self, stream: Stream, error: RequestError | None = None) -> list[Action]:
        """End a live stream: its replica is to forget it, and its reader gets the error, where there is one."""
        self._streams.drop(stream)
        told: list[Action] = [EndStream(stream.key, error)] if error is not None else []
        return [*self._cancel(stream), *told]

    def retire(self, replica: Replica) -> tuple[int, list[Action]]:
        """Take the streams back from a replica that retires, but for those that only it can go on with;
        returns how many. They are due again."""
        moves = any(other.kind == replica.kind for other in self._replicas.serving)
        taken = [stream for stream in self._streams.at(replica.name) if moves or not stream.kind]
        return len(taken), [action for stream in taken for action in self._recall(stream)]

    def recall_streams(self, replica: Replica, now_s: float) -> Stream | None:
        """Take all streams back from a replica whose worker is gone; returns the one to blame for that."""
        self._lost_s = now_s
        ready = replica.state.ready
        places = ready.slots if ready is not None else 0
        return self._streams.recall_replica(replica.name, places, only_one=len(self._replicas.serving) == 1)

    def is_drained(self, replica: Replica) -> bool:
        """True when no stream needs a retiring replica any more."""
        others = any(other.kind == replica.kind for other in self._replicas.serving)
        return not self._streams.counts[replica.name] and not any(
            stream.kind == replica.kind and not stream.at and not others for stream in self._streams.live()
        )

    def _send_due(self, now_s: float) -> list[Action]:
        actions: list[Action] = []
        for stream in self._streams.due():
            if not stream.sends and self._streams.takes_turns and self._holds_back():
                continue
            prefix = self._prefix(stream)
            routed = self._choose_route(stream, prefix, now_s)
            if routed.replica is None and (stream.crashes.suspect or stream.kind):
                continue
            if routed.replica is None:
                break
            found = next(one for one in self._replicas.with_streams if one.name == routed.replica)
            if stream.kind and found.kind != stream.kind:
                text = "request %s goes on with another kind of replica: its tokens may differ"
                actions.append(LogLine("warning", text, (stream.key,)))
            found.prefixes.note(prefix)
            if not self._streams.counts[found.name]:
                found.busy_s = now_s
            if not stream.sends and self._streams.takes_turns:
                stream.held_ms = (now_s - stream.opened_s) * MS_PER_S
            sent = self._streams.send(stream, found.name, found.kind)
            bounds = bounds_of(found.state.ready, self._least_depth, stream.submit.lane)
            sent, stream.speculation = resolve_overrides(sent, stream.overrides, found.engine, bounds)
            actions.append(Send(found.worker, sent))
            if len(self._replicas.serving) > 1:
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
            for stream in [
                stream for stream in waiting if not stream.crashes.progressed and not stream.crashes.suspect
            ]:
                routed = self._choose_route(stream, self._prefix(stream), now_s)
                if free and routed.replica not in (None, replica.name):
                    actions += self._recall(stream)
                    free -= 1
        return actions

    def _recall(self, stream: Stream) -> list[Action]:
        cancelled = self._cancel(stream)
        self._streams.recall(stream)
        return cancelled

    def _cancel(self, stream: Stream) -> list[Action]:
        """Tell the replica that has a stream to forget it."""
        having = [one for one in self._replicas.with_streams if one.name == stream.at]
        return [Send(one.worker, Cancel(stream.sent_id)) for one in having]

    def _choose_route(self, stream: Stream, prefix: Sequence[int], now_s: float) -> Route:
        every = self._replicas.with_streams
        can_go_on = [one for one in every if stream.kind and one.state.phase != FAILED and one.kind == stream.kind]
        stay = any(one.rank is Rank.SERVING for one in can_go_on)
        retiring = self._replicas.list_ranked(Rank.RETIRING)
        outs = {one.name: "is being replaced" for one in retiring if stay or one not in can_go_on}
        if can_go_on:
            outs |= {one.name: "its tokens would differ" for one in self._replicas.serving if one not in can_go_on}
        is_known = now_s - self._lost_s >= LOSSES_ARE_KNOWN_S
        return choose_route(
            stream, prefix, every, self._streams, lambda one: is_known or one.heard_s >= self._lost_s, outs
        )

    def _prefix(self, stream: Stream) -> list[int]:
        """Return the keys of the prompt's blocks; none where there is nothing to choose."""
        return block_keys(stream.submit.prompt) if len(self._replicas.serving) > 1 else []


def choose_route(
    stream: Stream,
    prefix: Sequence[int],
    replicas: Sequence[Replica],
    streams: Streams,
    is_alive: Callable[[Replica], bool],
    outs: Mapping[str, str],
) -> Route:
    """Return where a stream goes, by the keys of its prompt's blocks (control.affinity).

    A suspect is tried by one replica at a time, which then takes nothing new; the replica must be known to have
    outlived the last one that was lost (`is_alive`). `outs` says of some replicas why they do not take it.
    """
    tried = streams.in_quarantine()
    states = []
    for replica in replicas:
        out = outs.get(replica.name, "") if replica.serving else replica.state.phase
        if not out and stream.crashes.suspect and not is_alive(replica):
            out = "may have been lost with the last one"
        if not out and tried is not None and tried.at == replica.name:
            out = "tries a suspect"
        cached = 0 if stream.crashes.suspect else replica.prefixes.count_cached_tokens(prefix)
        states.append(_state(replica, out, streams.counts[replica.name], cached, replicas))
    tokens = len(stream.submit.prompt) + len(stream.committed)
    left = stream.submit.max_tokens - len(stream.committed)
    return route(states, RoutedRequest(tokens, min(left, streams.latency.output_tokens)))


def format_route(route: Route) -> str:
    """Return a route in one line, with why the others were not taken."""
    others = "; ".join(f"{one.name}: {one.why_not}" for one in route.rated if one.why_not)
    return f"{route.reason}; not {others}" if others else route.reason


def _state(replica: Replica, out: str, live: int, cached_tokens: int, replicas: Sequence[Replica]) -> ReplicaState:
    ready, gauges = replica.state.ready, replica.state.gauges
    block_tokens, blocks = (ready.block_tokens, ready.kv_blocks) if ready is not None else (0, 0)
    places = replica.places
    running = min(live, places)
    paces = [one.pace for one in replicas]
    return ReplicaState(
        name=replica.name,
        running=running,
        waiting=live - running,
        places=places,
        kv_tokens=block_tokens * blocks,
        kv_free_tokens=block_tokens * (gauges.free_blocks if gauges is not None else blocks),
        cached_prompt_tokens=cached_tokens,
        tpot_ms=predict_tpot_ms(replica.pace, paces, min(running + 1, places)),
        prefill_ms_per_token=predict_prefill_ms(paces),
        serving=not out,
        why_not=out,
    )
