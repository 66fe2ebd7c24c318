"""What a route is chosen by."""

from __future__ import annotations

import pytest

from orchestrator.daemon.control.routing import route_choice
from orchestrator.daemon.control.streams.streams import Streams
from orchestrator.protocol.commands import Submit
from policies.serving.routing import RoutedRequest


def test_a_stream_is_routed_by_what_is_left_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[RoutedRequest] = []
    monkeypatch.setattr(route_choice, "route", lambda states, request, weights: asked.append(request))
    streams = Streams()
    stream = streams.open(Submit("a", [1, 2, 3], 10, committed=[4, 5, 6, 7]))
    route_choice.choose_route(stream, [1, 2, 3], [], streams, {})
    assert asked == [RoutedRequest(7, 6)]
