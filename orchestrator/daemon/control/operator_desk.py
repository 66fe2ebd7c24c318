"""What an operator may ask of one target while it serves: names are looked up, and what cannot be is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from orchestrator.clock import Clock
from orchestrator.daemon.control import events
from orchestrator.daemon.control.health.blame import BY_OPERATOR
from orchestrator.daemon.control.health.health import Part
from orchestrator.daemon.control.port import DraftersView, PartView, PoolView, QuarantinedView, RouteView
from orchestrator.daemon.control.state import FAILED, unlike
from orchestrator.daemon.control.step import State
from orchestrator.daemon.control.streams.overrides import NO_OVERRIDES, OverrideScope, change_overrides, format_override
from orchestrator.daemon.control.streams.request_history import RequestView, belongs_to
from orchestrator.errors import RequestError
from orchestrator.telemetry import get_logger
from policies.serving.failover.health import Health, Held, PartKind
from policies.serving.failover.pool import Member, list_groups, list_losses
from policies.serving.overrides import Override

_log = get_logger(__name__)


class OperatorDesk:
    """What an operator may do to requests, workers and drafters of a State, which only `post` changes. Each raises
    RequestError: 404 where there is no such thing (it says what there is), 409 where it cannot be done now.
    `overrides` of speculation stand now."""

    def __init__(self, state: State, post: Callable[[events.ControlEvent], None], clock: Clock) -> None:
        self.overrides = NO_OVERRIDES
        self._state = state
        self._post = post
        self._clock = clock

    def list_requests(self) -> list[RequestView]:
        now_s = self._clock.monotonic_s()
        return [history.view(now_s) for history in self._state.streams.histories.list_live()]

    def describe_requests(self, request_id: str) -> list[RequestView]:
        now_s = self._clock.monotonic_s()
        return [history.view(now_s) for history in self._state.streams.histories.find_choices(request_id)]

    def cancel(self, request_id: str) -> list[str]:
        keys = [stream.key for stream in self._state.streams.live() if belongs_to(stream.key, request_id)]
        if not keys:
            text = f"no request {request_id} is running; `outrider requests` shows those that are"
            raise RequestError(text, status=404, code="request_not_found")
        self._post(events.RequestCancelled(keys))
        return keys

    def describe_pool(self, predicted: Mapping[int, float]) -> PoolView:
        """Return the groups that serve, who goes on for whom, and what losses cost. `predicted`: tokens a second of
        each replica, by its number; where one is missing it is what they make by their rounds."""
        state, rules = self._state, self._state.standbys.rules
        serving = [replica for replica in state.replicas.serving if replica.serving]
        planned = all(predicted.get(replica.engine) for replica in serving)
        members = [
            Member(
                replica.name,
                replica.group,
                tuple(map(str, replica.parts)),
                predicted[replica.engine] if planned else state.fleet.predict_tokens_per_s(replica),
                replica.standby,
            )
            for replica in (*serving, *(idle for idle in state.standbys.list_idle() if idle.serving))
        ]
        parts = (tuple(list_groups(members, rules)), tuple(list_losses(members, rules)))
        return PoolView(rules.other_bits, rules.after_s, "predicted" if planned else "measured", *parts)

    def list_parts(self) -> list[PartView]:
        state, now_s = self._state, self._clock.monotonic_s()
        views = []
        for part in sorted(state.list_parts()):
            here = [
                replica
                for replica in state.replicas.with_streams
                if part in (*replica.parts, Part("worker", replica.name))
            ]
            names = {replica.name for replica in here}
            requests = tuple(stream.key for stream in state.streams.live() if stream.at in names)
            judged = state.health.judge([part], now_s)
            views.append(PartView(part.kind, part.name, judged.state.value if judged.held else "", requests))
        return views

    def fail_over(self, worker: str, to: str) -> None:
        state = self._state
        source = next((replica for replica in state.replicas.with_streams if replica.name == worker), None)
        if source is None:
            raise self._build_unknown(worker)
        if to == worker:
            raise RequestError(f"{worker} cannot be failed over to itself", code="same_worker", param="to")
        target = state.standbys.find_replica(to) or next(
            (replica for replica in state.replicas.serving if replica.name == to), None
        )
        if target is None and to not in state.standbys.list_names():
            raise self._build_unknown(to)
        why = state.standbys.find_refusal(to)
        if target is not None and not why:
            ready, known = target.state.ready, source.state.ready
            gone = target.state.phase == FAILED or (not target.serving and to not in state.standbys.list_names())
            why = f"it does not serve ({target.state.phase})" if gone else ""
            if not why and ready is not None and known is not None and (differs := unlike(ready, known)):
                why = f"its tokens could differ, with {differs}"
            held = state.health.judge(target.parts, self._clock.monotonic_s(), target.name)
            if not why and held.refuses and to not in state.steering.list_failovers():
                why = held.why
        if why:
            raise RequestError(f"{to} cannot take the requests of {worker}: {why}", status=409, code="cannot_take")
        self._post(events.FailoverAsked(worker, to))

    def give_back(self, worker: str) -> None:
        if worker not in self._state.steering.list_failovers():
            known = ", ".join(self._state.steering.list_failovers()) or "none"
            text = f"worker {worker} was not failed over; those that were: {known}"
            raise RequestError(text, status=404, code="not_failed_over")
        self._post(events.FailoverUndone(worker))

    def list_drafters(self) -> list[DraftersView]:
        state = self._state
        views = []
        for replica in [*state.replicas.serving, *state.standbys.list_idle()]:
            drafters = tuple(replica.state.gauges.drafters) if replica.state.gauges is not None else ()
            views.append(
                DraftersView(replica.name, replica.engine, drafters, state.steering.chosen.get(replica.engine))
            )
        return views

    def choose_drafters(self, names: Sequence[str] | None, engine: int | None = None) -> None:
        """Let only these drafters propose (none: nothing is proposed; None: as configured), for running requests, too.
        `engine`: of this replica; None: of all."""
        serving = self._state.replicas.serving
        concerned = [replica for replica in serving if engine in (None, replica.engine)]
        if not concerned:
            engines = ", ".join(str(replica.engine) for replica in serving) or "none"
            raise RequestError(f"there is no engine {engine}; there is {engines}", status=404, code="engine_not_found")
        described = [replica.state.ready for replica in concerned if replica.state.ready is not None]
        known = dict.fromkeys(name for ready in described for name in ready.drafting.drafters)
        unknown = [name for name in names or () if name not in known]
        if unknown:
            text = f"no drafter is called '{unknown[0]}'; there is {', '.join(known) or 'none'}"
            raise RequestError(text, status=404, code="drafter_not_found", param="names")
        for replica in concerned:  # each has drafters of its own, it may be
            own = known if replica.state.ready is None else replica.state.ready.drafting.drafters
            chosen = None if names is None else tuple(name for name in names if name in own)
            self._post(events.DraftersChosen([replica.engine], chosen))

    def quarantine(self, request: str, duration_s: float) -> QuarantinedView:
        state, now_s, wall_s = self._state, self._clock.monotonic_s(), self._clock.wall_s()
        history = state.streams.histories.find_like(request)
        live = state.streams.find_live(history.key if history is not None else request)
        live = live or next((stream for stream in state.streams.live() if stream.digest == request), None)
        if live is not None:
            named = (live.digest, live.key, len(live.submit.prompt))
        elif history is not None and history.digest:
            named = (history.digest, history.key, history.prompt_tokens)
        else:
            text = f"nothing is known of a request {request}: name the id or the digest of one that came of late"
            raise RequestError(text, status=404, code="request_not_found")
        self._post(events.RequestQuarantined(*named, now_s + duration_s))
        return QuarantinedView(*named, 0, BY_OPERATOR, since_s=wall_s, until_s=wall_s + duration_s)

    def list_quarantined(self) -> list[QuarantinedView]:
        now_s, wall_s = self._clock.monotonic_s(), self._clock.wall_s()
        return [
            replace(request, since_s=wall_s - (now_s - request.since_s), until_s=wall_s + (request.until_s - now_s))
            for request in self._state.blame.list_quarantined(now_s)
        ]

    def release_quarantined(self, digests: Sequence[str]) -> list[str]:
        known = {request.digest for request in self._state.blame.list_quarantined(self._clock.monotonic_s())}
        self._post(events.QuarantineReleased(digests))
        return [digest for digest in digests if digest in known]

    def override(self, wanted: Override | None, asked_by: str, *, user: str = "", engine: int | None = None) -> None:
        """Set an override of speculation for a session (`user`), for an engine, or for all engines where neither is
        named. None takes it back; where neither is named, everybody's. It holds for requests that start from now on."""
        engines = [replica.engine for replica in self._state.replicas.serving]
        scope = OverrideScope(user, engine)
        changed = change_overrides(self.overrides, scope, wanted, asked_by, engines, self._clock.wall_s())
        self.overrides, concerned = changed
        for whom in concerned:
            _log.info("speculation override", **whom, override=format_override(wanted), asked_by=asked_by)

    def hold(self, kind: PartKind, name: str, held: Held) -> None:
        part = Part(kind, name)
        known = self._state.list_parts()
        if part not in known:
            names = ", ".join(sorted(str(other) for other in known))
            raise RequestError(f"there is no {part}; there is: {names}", status=404, code="part_not_found")
        self._post(events.PartHeld(part, Health(held) if held else None))

    def explain(self, request_id: str) -> list[RouteView]:
        """Return where a request went of late, its choices one after the other, each attempt; the last first."""
        routes = self._state.router.book.find_routes(request_id, self._clock.monotonic_s())
        if not routes:
            text = f"nothing is known of a request {request_id}: it was refused, or others have come since"
            raise RequestError(text, status=404, code="request_not_found")
        return routes

    def _build_unknown(self, worker: str) -> RequestError:
        replicas = [replica.name for replica in self._state.replicas.with_streams]
        names = ", ".join(dict.fromkeys([*replicas, *self._state.standbys.list_names()]))
        return RequestError(f"there is no worker {worker}; there is {names}", status=404, code="worker_not_found")
