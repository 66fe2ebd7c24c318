"""Where requests of late went, and why: a bounded book for whoever asks afterwards. No effects."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from orchestrator.daemon.control.steering_port import RouteView
from orchestrator.daemon.control.streams.request_history import belongs_to
from policies.serving.routing import Route

_MOST_REQUESTS: Final = 2048
_MOST_RATED: Final = 16_384
_MOST_ATTEMPTS: Final = 8
_MOST_SHOWN: Final = 64


@dataclass(slots=True)
class _Noted:
    attempt: int
    route: Route
    at_s: float


class RouteBook:
    """The routes of the last requests, of each its last attempts. What it holds is bounded by its candidates, too."""

    def __init__(self) -> None:
        self._noted: OrderedDict[str, list[_Noted]] = OrderedDict()
        self._rated = 0

    def note(self, key: str, attempt: int, route: Route, now_s: float) -> None:
        """A request was sent by this route, or waits: the last reason to wait is kept until it is sent."""
        noted = _Noted(attempt, route.shorten(_MOST_SHOWN), now_s)
        self._rated += len(noted.route)
        before = self._noted.pop(key, None)
        if before is None:
            self._noted[key] = [noted]
        else:
            kept = [noted for noted in before if noted.route.replica is not None][1 - _MOST_ATTEMPTS :]
            self._rated -= _count_rated(before) - _count_rated(kept)
            self._noted[key] = [*kept, noted]
        while len(self._noted) > _MOST_REQUESTS or (self._rated > _MOST_RATED and len(self._noted) > 1):
            self._rated -= _count_rated(self._noted.popitem(last=False)[1])

    def find_routes(self, request_id: str, now_s: float) -> list[RouteView]:
        """Return the routes of a request, of each of its choices, the last first. The answer to a request with several
        choices has the id of the first."""
        keys = [key for key in self._noted if belongs_to(key, request_id)]
        routes = [(noted, key) for key in keys for noted in self._noted[key]]
        return [
            _view(key, noted, now_s)
            for noted, key in sorted(routes, key=lambda pair: (-pair[0].at_s, pair[1], -pair[0].attempt))
        ]


def _view(key: str, noted: _Noted, now_s: float) -> RouteView:
    route = noted.route
    return RouteView(
        *(key, noted.attempt, now_s - noted.at_s, route.replica or "", route.draft, route.reason),
        request=route.request,
        rated=route.rated,
    )


def _count_rated(noted: list[_Noted]) -> int:
    return sum(len(attempt.route) for attempt in noted)


class RouteText:
    """A route in one line, with why the others were not taken: made when it is written."""

    __slots__ = ("_route",)

    def __init__(self, route: Route) -> None:
        self._route = route

    def __str__(self) -> str:
        return format_route(self._route)


def format_route(route: Route) -> str:
    """Return a route in one line, with why the others were not taken."""
    others = "; ".join(f"{rated.name}: {rated.why_not}" for rated in route.rated if rated.why_not)
    return f"{route.reason}; not {others}" if others else route.reason
