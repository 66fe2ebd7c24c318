"""What an operator may ask of one target while it serves: names are looked up, and what cannot be is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from orchestrator.clock import Clock
from orchestrator.daemon.control.events import (
    DraftersChosen,
    FailoverAsked,
    FailoverUndone,
    RequestCancelled,
    RequestQuarantined,
    SteeringEvent,
)
from orchestrator.daemon.control.health.blame import BY_OPERATOR
from orchestrator.daemon.control.health.health import Part
from orchestrator.daemon.control.state import FAILED, unlike
from orchestrator.daemon.control.steering_port import DraftersView, PartView, QuarantinedView, RequestView
from orchestrator.daemon.control.step import State
from orchestrator.daemon.control.streams.request_history import belongs_to
from orchestrator.errors import RequestError


class OperatorDesk:
    """Implements control.steering_port.Steering over a State, which only `post` changes."""

    def __init__(self, state: State, post: Callable[[SteeringEvent], None], clock: Clock) -> None:
        self._state = state
        self._post = post
        self._clock = clock

    def list_requests(self) -> list[RequestView]:
        """See steering_port.Steering."""
        now_s = self._clock.monotonic_s()
        return [one.view(now_s) for one in self._state.streams.histories.list_live()]

    def describe_requests(self, request_id: str) -> list[RequestView]:
        """See steering_port.Steering."""
        now_s = self._clock.monotonic_s()
        return [one.view(now_s) for one in self._state.streams.histories.find(request_id)]

    def cancel(self, request_id: str) -> list[str]:
        """See steering_port.Steering."""
        found = [stream.key for stream in self._state.streams.live() if belongs_to(stream.key, request_id)]
        if not found:
            text = f"no request {request_id} is running; `outrider requests` shows those that are"
            raise RequestError(text, status=404, code="request_not_found")
        self._post(RequestCancelled(found))
        return found

    def list_parts(self) -> list[PartView]:
        """See steering_port.Steering."""
        state, now_s = self._state, self._clock.monotonic_s()
        views = []
        for part in sorted(state.list_parts()):
            names = {one.name for one in state.replicas.with_streams if part in (*one.parts, Part("worker", one.name))}
            there = tuple(stream.key for stream in state.streams.live() if stream.at in names)
            judged = state.health.judge([part], now_s)
            views.append(PartView(part.kind, part.name, judged.state.value if judged.held else "", there))
        return views

    def fail_over(self, worker: str, to: str) -> None:
        """See steering_port.Steering."""
        state = self._state
        source = next((one for one in state.replicas.with_streams if one.name == worker), None)
        if source is None:
            raise self._build_unknown(worker)
        if to == worker:
            raise RequestError(f"{worker} cannot be failed over to itself", code="same_worker", param="to")
        target = state.standbys.find(to) or next((one for one in state.replicas.serving if one.name == to), None)
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
        self._post(FailoverAsked(worker, to))

    def give_back(self, worker: str) -> None:
        """See steering_port.Steering."""
        if worker not in self._state.steering.list_failovers():
            known = ", ".join(self._state.steering.list_failovers()) or "none"
            text = f"worker {worker} was not failed over; those that were: {known}"
            raise RequestError(text, status=404, code="not_failed_over")
        self._post(FailoverUndone(worker))

    def list_drafters(self) -> list[DraftersView]:
        """See steering_port.Steering."""
        state = self._state
        found = []
        for one in [*state.replicas.serving, *state.standbys.list_idle()]:
            drafters = tuple(one.state.gauges.drafters) if one.state.gauges is not None else ()
            found.append(DraftersView(one.name, one.engine, drafters, state.steering.chosen.get(one.engine)))
        return found

    def choose_drafters(self, names: Sequence[str] | None, engine: int | None = None) -> None:
        """See steering_port.Steering."""
        serving = self._state.replicas.serving
        concerned = [one for one in serving if engine in (None, one.engine)]
        if not concerned:
            there = ", ".join(str(one.engine) for one in serving) or "none"
            raise RequestError(f"there is no engine {engine}; there is {there}", status=404, code="engine_not_found")
        described = [replica.state.ready for replica in concerned if replica.state.ready is not None]
        known = dict.fromkeys(name for ready in described for name in ready.drafting.drafters)
        unknown = [name for name in names or () if name not in known]
        if unknown:
            text = f"no drafter is called '{unknown[0]}'; there is {', '.join(known) or 'none'}"
            raise RequestError(text, status=404, code="drafter_not_found", param="names")
        chosen = None if names is None else tuple(names)
        self._post(DraftersChosen([one.engine for one in concerned], chosen))

    def quarantine(self, request: str, duration_s: float) -> QuarantinedView:
        """See steering_port.Steering."""
        state, now_s, wall_s = self._state, self._clock.monotonic_s(), self._clock.wall_s()
        found = state.streams.histories.find_like(request)
        live = state.streams.find(found.key if found is not None else request)
        live = live or next((one for one in state.streams.live() if one.digest == request), None)
        if live is not None:
            named = (live.digest, live.key, len(live.submit.prompt))
        elif found is not None and found.digest:
            named = (found.digest, found.key, found.prompt_tokens)
        else:
            text = f"nothing is known of a request {request}: name the id or the digest of one that came of late"
            raise RequestError(text, status=404, code="request_not_found")
        self._post(RequestQuarantined(*named, now_s + duration_s))
        return QuarantinedView(*named, 0, BY_OPERATOR, since_s=wall_s, until_s=wall_s + duration_s)

    def _build_unknown(self, worker: str) -> RequestError:
        there = [one.name for one in self._state.replicas.with_streams]
        names = ", ".join(dict.fromkeys([*there, *self._state.standbys.list_names()]))
        return RequestError(f"there is no worker {worker}; there is {names}", status=404, code="worker_not_found")
