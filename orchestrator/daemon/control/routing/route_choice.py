"""Prices the replicas for a stream, and chooses by policies.serving.routing. No effects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from device_profiles.units import MS_PER_S
from orchestrator.daemon.control.replicas.replicas import Replica
from orchestrator.daemon.control.routing.surroundings import Surroundings
from orchestrator.daemon.control.streams.streams import Stream, Streams
from policies.serving.device_load import ALONE
from policies.serving.replica_load import reckon_tpot_ms
from policies.serving.routing import ReplicaState, Route, RoutedRequest, route
from policies.serving.shared_pace import SharedPaces

_NO_RISKS: Mapping[str, str] = {}


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
    states = []
    for replica in replicas:
        standing, state = replica.standing, replica.state
        out = (outs.get(replica.name, "") if outs else "") if standing.decodes else state.phase
        live, places, draft = standing.live, standing.places, standing.draft
        running = live if live < places else places
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
        if around.loads.knows:
            stretch, free_share = around.loads.find_share(replica.device, replica.spec.cores)
            saved_ms = saved_ms / around.stretch_drafts(replica.name) if saved_ms else 0.0
        states.append(
            ReplicaState(
                replica.name,
                running,
                live - running,
                places,
                standing.kv_tokens,
                standing.kv_free_tokens,
                0 if cold else replica.prefixes.count_cached_tokens(prefix),
                tpot_ms,
                paces.predict_prefill_ms(group, standing.expected_pace),
                risks.get(replica.name, "") if risks else "",
                not out,
                out,
                draft,
                saved_ms,
                stretch,
                free_share,
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
