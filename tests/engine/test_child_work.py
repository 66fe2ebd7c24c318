"""How long a load waits for work in a process of its own: as long as it does something, and not for ever."""

from __future__ import annotations

import sys

import pytest

from orchestrator.worker.loading import child_work
from orchestrator.worker.loading.child_work import AnsweringChild, ChildEnd, run_child

_TRICKLES = """
import sys, tempfile, time
with tempfile.TemporaryFile() as file:
    for _ in range(16):
        file.write(b"x" * 4096), file.flush()
        time.sleep(0.5)
sys.stdout.write(sys.stdin.read())
"""
_SLEEPS = "import time\nwhile True: time.sleep(60)"
_COMPUTES = "while True: sum(range(1000))"


def run(program: str) -> ChildEnd:
    return run_child([sys.executable, "-c", program], b"a job", lambda cpu_s: None)


def test_what_does_something_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_work, "_LONGEST_IDLE_S", 4.0)
    assert run(_TRICKLES) == ChildEnd(b"a job", "", 0)


def test_what_does_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_work, "_LONGEST_IDLE_S", 2.0)
    assert "did nothing" in run(_SLEEPS).failure


def test_what_computes_without_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_work, "_LONGEST_S", 0.2)
    assert "of processor time" in run(_COMPUTES).failure


@pytest.mark.parametrize(
    ("program", "why", "status"),
    [
        ("import sys; sys.exit('no such class')", "no such class", 1),
        ("import os; os.kill(os.getpid(), 11)", "its process ended by SIGSEGV", -11),
    ],
)
def test_why_it_ended_is_told(program: str, why: str, status: int) -> None:
    assert run(program) == ChildEnd(b"", why, status)


_ANSWERS = """
import sys
print("a library says something", flush=True)
for line in sys.stdin:
    if line == "end\\n":
        sys.exit("it was told to")
    print("no answer\\n\\x1e" + line.upper(), end="", flush=True)
"""


def test_a_process_answers_one_question_after_the_other_until_it_ends() -> None:
    child = AnsweringChild([sys.executable, "-c", _ANSWERS], lambda cpu_s: None)
    assert [child.ask_question(question) for question in (b"one", b"two")] == [
        ChildEnd(b"ONE\n", "", 0),
        ChildEnd(b"TWO\n", "", 0),
    ]
    assert child.ask_question(b"end") == ChildEnd(b"", "it was told to", 1)
    child.close()
    child.close()


def test_a_process_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_work, "_LONGEST_IDLE_S", 2.0)
    child = AnsweringChild([sys.executable, "-c", _SLEEPS], lambda cpu_s: None)
    assert "did nothing" in child.ask_question(b"anything").failure
    child.close()
