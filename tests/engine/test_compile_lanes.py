"""Grammars that take long hold up neither small ones nor cancels, and end at their deadline."""

from __future__ import annotations

import queue
import threading
from typing import Any

import pytest

from orchestrator.protocol.commands import Grammar, Submit
from orchestrator.protocol.rounds import Refused
from orchestrator.side_lane import MOST_LEFT, SideLane
from orchestrator.worker.engine.worker_engine import LARGE_BYTES, CompileLanes

WITHIN_S = 60.0


class Scripted:
    """Compiles at once, but for large grammars: these take until `go`. A text that begins with "broken" is a bug."""

    def __init__(self, timeout_s: float = WITHIN_S) -> None:
        self.told: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.begun, self.go = threading.Event(), threading.Event()
        self.lanes = CompileLanes(
            self._compile, lambda request, _: self.told.put(request.request_id), self.told.put, timeout_s
        )

    def _compile(self, request: Submit) -> None:
        assert request.grammar is not None
        if request.grammar.text.startswith("broken"):
            raise RuntimeError("a bug")
        if len(request.grammar.text) > LARGE_BYTES:
            self.begun.set()
            self.go.wait(WITHIN_S)

    def add(self, key: str, text: str) -> None:
        self.lanes.add(Submit(key, [1], 1, grammar=Grammar("regex", text)), 0.0)


LARGE = "a" * (LARGE_BYTES + 1)


def test_a_small_grammar_passes_a_large_one():
    script = Scripted()
    script.add("large", LARGE)
    assert script.begun.wait(WITHIN_S)
    script.add("small", "a")
    assert script.told.get(timeout=WITHIN_S) == "small"
    script.go.set()
    assert script.told.get(timeout=WITHIN_S) == "large"


def test_what_is_cancelled_while_it_compiles_never_reaches_the_loop():
    script = Scripted()
    script.add("large", LARGE)
    assert script.begun.wait(WITHIN_S)
    script.add("second", LARGE)
    for key in ("large", "second", "unknown"):
        script.lanes.cancel(key)
    script.go.set()
    script.add("third", LARGE)
    assert script.told.get(timeout=WITHIN_S) == "third"
    assert script.told.empty()


def test_a_grammar_that_takes_too_long_is_refused_and_the_next_one_has_another_thread():
    script = Scripted(timeout_s=0.2)
    script.add("slow", LARGE)
    refused = script.told.get(timeout=WITHIN_S)
    assert (refused.request_id, refused.kind) == ("slow", "invalid")
    assert "simpler" in refused.message
    script.begun.clear()
    script.add("next", LARGE)
    assert script.begun.wait(WITHIN_S)  # though the first one is still at it
    script.go.set()


@pytest.mark.filterwarnings("default")
def test_a_bug_in_a_compile_costs_one_request():
    script = Scripted()
    script.add("broken", "broken")
    script.add("small", "a")
    refused = script.told.get(timeout=WITHIN_S)
    assert isinstance(refused, Refused)
    assert (refused.request_id, refused.kind) == ("broken", "failed")
    assert script.told.get(timeout=WITHIN_S) == "small"


def test_threads_that_are_left_behind_are_bounded_and_end():
    lane, go = SideLane("test", gives_way=True), threading.Event()
    begun: queue.SimpleQueue[int] = queue.SimpleQueue()

    def hang(number: int) -> None:
        begun.put(number)
        go.wait(WITHIN_S)

    for number in range(MOST_LEFT + 1):
        task = lane.submit(hang, number)
        assert begun.get(timeout=WITHIN_S) == number
        lane.leave_behind(task)
    waiting = lane.submit(hang, 99)
    assert begun.empty()
    go.set()
    waiting.result(timeout=WITHIN_S)
    assert lane.submit(lambda: 7).result(timeout=WITHIN_S) == 7
