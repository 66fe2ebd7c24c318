"""What control knows of the replicas, as the routing policy sees it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from orchestrator.control.replica import Replica
from orchestrator.control.streams import Stream, Streams
from policies.replica_pace import predicted_prefill_ms, predicted_tpot_ms
from policies.routing import ReplicaState, Route, RoutedRequest, RoutingWeights, route

_WEIGHTS = RoutingWeights()


def chosen(
    stream: Stream,
    prefix: Sequence[int],
    replicas: Sequence[Replica],
    streams: Streams,
    is_alive: Callable[[Replica], bool],
) -> Route:
    """Return where a stream goes, by the keys of its prompt's blocks (control.affinity).

    A suspect is tried by one replica at a time, which then takes nothing new; the replica must be known to have
    outlived the last one that was lost (`is_alive`).
    """
    tried = streams.on_trial()
    states = []
    for replica in replicas:
        out = "" if replica.serving else replica.state.phase
        if not out and stream.suspect and not is_alive(replica):
            out = "may have been lost with the last one"
        if not out and tried is not None and tried.at == replica.name:
            out = "tries a suspect"
        cached = 0 if stream.suspect else replica.prefixes.cached_tokens(prefix)
        states.append(_state(replica, out, streams.counts[replica.name], cached, replicas))
    tokens = len(stream.submit.prompt) + len(stream.committed)
    left = stream.submit.max_tokens - len(stream.committed)
    return route(states, RoutedRequest(tokens, min(left, streams.usual_tokens)), _WEIGHTS)


def told(route: Route) -> str:
    """Return a route in one line, with why the others were not taken."""
    others = "; ".join(f"{one.name}: {one.why_not}" for one in route.rated if one.why_not)
    return f"{route.reason}; not {others}" if others else route.reason


def _state(replica: Replica, out: str, live: int, cached_tokens: int, replicas: Sequence[Replica]) -> ReplicaState:
    ready, gauges = replica.state.ready, replica.state.gauges
    places, block_tokens, blocks = (
        (ready.slots, ready.block_tokens, ready.kv_blocks) if ready is not None else (1, 0, 0)
    )
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
        tpot_ms=predicted_tpot_ms(replica.pace, paces, min(running + 1, places)),
        prefill_ms_per_token=predicted_prefill_ms(paces),
        serving=not out,
        why_not=out,
    )
