"""Gives streams to replicas: what is due goes to the one that the routing policy takes."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence

from orchestrator.clock import Clock
from orchestrator.control.affinity import block_keys
from orchestrator.control.overrides import bounds_of, resolve_overrides
from orchestrator.control.replica import Replica
from orchestrator.control.state import FAILED, effective_places, kind_of
from orchestrator.control.streams import Stream, Streams
from orchestrator.workers.messages import Cancel
from policies.serving.replica_load import predict_prefill_ms, predict_tpot_ms
from policies.serving.routing import ReplicaState, Route, RoutedRequest, route

LOSSES_ARE_KNOWN_S = 2.0
"""So long after a loss, any other replica that died with it has been reported."""

_log = logging.getLogger(__name__)


class Router:
    """Routes `streams` over `replicas`; its owner may change both lists between calls. Those that are `retiring` keep
    the streams that only they can go on with to the bit, and take no others. `least_depth`: see ControlLimits."""

    def __init__(
        self,
        replicas: list[Replica],
        retiring: list[Replica],
        streams: Streams,
        clock: Clock,
        least_depth: int = 0,
    ) -> None:
        self._replicas = replicas
        self._retiring = retiring
        self._streams = streams
        self._clock = clock
        self._least_depth = least_depth
        self._lost_s = -math.inf

    def feed(self) -> None:
        """Send every stream that is due, and those that wait behind others while another replica has a place."""
        self._send_due()
        if self._take_back_waiting():
            self._send_due()

    def cancel(self, stream: Stream) -> None:
        """Tell the replica that has a stream to forget it."""
        for replica in (*self._replicas, *self._retiring):
            if replica.name == stream.at:
                replica.send(Cancel(stream.sent_id))

    def retire(self, replica: Replica) -> int:
        """Take the streams back from a replica that is being replaced, but for those that only it can go on with;
        returns how many. They are due again."""
        self._retiring.append(replica)
        kind = kind_of(replica.state.ready)
        moves = any(kind_of(other.state.ready) == kind for other in self._replicas)
        taken = [stream for stream in self._streams.at(replica.name) if moves or not stream.kind]
        for stream in taken:
            replica.send(Cancel(stream.sent_id))
            self._streams.recall(stream)
        return len(taken)

    def recall_streams(self, replica: Replica) -> Stream | None:
        """Take all streams back from a replica whose worker is gone; returns the one to blame for that."""
        self._lost_s = self._clock.monotonic_s()
        ready = replica.state.ready
        places = ready.slots if ready is not None else 0
        return self._streams.recall_replica(replica.name, places, only_one=len(self._replicas) == 1)

    def _send_due(self) -> None:
        for stream in self._streams.due():
            prefix = self._prefix(stream)
            routed = self._choose_route(stream, prefix)
            if routed.replica is None and (stream.crashes.suspect or stream.kind):
                continue
            if routed.replica is None:
                break
            found = next(one for one in (*self._replicas, *self._retiring) if one.name == routed.replica)
            found.prefixes.note(prefix)
            if not self._streams.counts[found.name]:
                found.busy_s = self._clock.monotonic_s()
            sent = self._streams.send(stream, found.name, kind_of(found.state.ready))
            bounds = bounds_of(found.state.ready, self._least_depth, stream.submit.lane)
            sent, stream.speculation = resolve_overrides(sent, stream.wishes, found.engine, bounds)
            found.send(sent)
            if len(self._replicas) > 1:
                _log.debug("request %s goes to %s: %s", stream.key, found.name, format_route(routed))

    def _take_back_waiting(self) -> int:
        """Take back streams that wait for a place where another replica would be done sooner now; returns how many."""
        serving = [replica for replica in self._replicas if replica.serving]
        free = sum(max(0, self._free_places(replica)) for replica in serving)
        taken = 0
        for replica in serving if free else []:
            waiting = self._streams.at(replica.name)[_places(replica) :]
            for stream in [
                stream for stream in waiting if not stream.crashes.progressed and not stream.crashes.suspect
            ]:
                routed = self._choose_route(stream, self._prefix(stream))
                if taken < free and routed.replica not in (None, replica.name):
                    replica.send(Cancel(stream.sent_id))
                    self._streams.recall(stream)
                    taken += 1
        return taken

    def is_drained(self, replica: Replica) -> bool:
        """True when no stream needs a retiring replica any more."""
        kind = kind_of(replica.state.ready)
        heirs = any(kind_of(other.state.ready) == kind for other in self._replicas)
        return not self._streams.counts[replica.name] and not any(
            stream.kind == kind and not stream.at and not heirs for stream in self._streams.live()
        )

    def _choose_route(self, stream: Stream, prefix: Sequence[int]) -> Route:
        every = (*self._replicas, *self._retiring)
        can_go_on = [one for one in every if one.state.phase != FAILED and kind_of(one.state.ready) == stream.kind]
        heirs = [one for one in can_go_on if one in self._replicas]
        outs = {one.name: "is being replaced" for one in self._retiring if heirs or one not in can_go_on}
        if can_go_on:
            outs |= {one.name: "its tokens would differ" for one in self._replicas if one not in can_go_on}
        elif stream.kind:
            _log.warning("request %s goes on with another kind of replica: its tokens may differ", stream.key)
        return choose_route(stream, prefix, every, self._streams, self._is_alive, outs)

    def _free_places(self, replica: Replica) -> int:
        return _places(replica) - self._streams.counts[replica.name]

    def _prefix(self, stream: Stream) -> list[int]:
        """Return the keys of the prompt's blocks; none where there is nothing to choose."""
        return block_keys(stream.submit.prompt) if len(self._replicas) > 1 else []

    def _is_alive(self, replica: Replica) -> bool:
        """True where it is known that the replica did not die together with the last one that was lost."""
        return replica.heard_s >= self._lost_s or self._clock.monotonic_s() - self._lost_s >= LOSSES_ARE_KNOWN_S


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
    places = _places(replica)
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


def _places(replica: Replica) -> int:
    ready = replica.state.ready
    return effective_places(ready, replica.state.gauges) if ready is not None else 1
