"""Where streams go, without processes: replicas here only note what they are sent."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from orchestrator.clock import SystemClock
from orchestrator.control import router
from orchestrator.control.replica import Replica
from orchestrator.control.router import Router
from orchestrator.control.streams import Stream, Streams
from orchestrator.workers.messages import Cancel, Delta, Submit
from policies.serving.routing import RoutedRequest


def note_replica(name: str, ready: Any = None) -> Any:
    commands: list[Any] = []
    return SimpleNamespace(name=name, state=SimpleNamespace(ready=ready), send=commands.append, commands=commands)


def list_cancelled(replica: Any) -> list[str]:
    return [command.request_id for command in replica.commands if isinstance(command, Cancel)]


@pytest.fixture
def streams() -> Streams:
    return Streams()


def send_to(streams: Streams, replica: Any, key: str) -> Stream:
    stream = streams.open(Submit(key, [1], 10))
    streams.send(stream, replica.name)
    return stream


def test_cancelling_tells_the_replica_that_has_the_stream_and_no_other(streams: Streams) -> None:
    one, other = note_replica("one"), note_replica("other")
    stream = send_to(streams, other, "a")
    Router(cast(list[Replica], [one]), cast(list[Replica], [other]), streams, SystemClock()).cancel(stream)
    assert (list_cancelled(one), list_cancelled(other)) == ([], ["a"])


def test_a_replica_that_is_replaced_gives_its_streams_back(streams: Streams) -> None:
    old, new = note_replica("old"), note_replica("new")
    first, second = (send_to(streams, old, key) for key in ("a", "b"))
    retiring: list[Replica] = []
    assert Router(cast(list[Replica], [new]), retiring, streams, SystemClock()).retire(cast(Replica, old)) == 2
    assert list_cancelled(old) == ["a", "b"]
    assert streams.due() == [first, second]
    assert retiring == [old]


def test_streams_that_only_a_replaced_replica_can_go_on_with_stay(streams: Streams) -> None:
    old = note_replica("old")
    begun = send_to(streams, old, "begun")
    begun.sent_kind = ("bf16",)
    fresh = send_to(streams, old, "fresh")
    streams.deliver(Delta("begun", [1]), 0.0)
    assert Router([], [], streams, SystemClock()).retire(cast(Replica, old)) == 1
    assert (list_cancelled(old), streams.due(), begun.at) == (["fresh"], [fresh], "old")


def test_a_stream_is_routed_by_what_is_left_of_it(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[RoutedRequest] = []
    monkeypatch.setattr(router, "route", lambda states, request: asked.append(request))
    stream = streams.open(Submit("a", [1, 2, 3], 10, committed=[4, 5, 6, 7]))
    router.choose_route(stream, [], [], streams, lambda replica: True, {})
    assert asked == [RoutedRequest(7, 6)]
