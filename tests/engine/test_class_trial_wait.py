"""How long the trial of a numerical class may take: as long as it does something, and not for ever."""

from __future__ import annotations

import subprocess
import sys

import pytest

from orchestrator.loading import class_trial

_TRICKLES = """
import tempfile, time
with tempfile.TemporaryFile() as file:
    for _ in range(16):
        file.write(b"x" * 4096), file.flush()
        time.sleep(0.5)
print("done")
"""
_SLEEPS = "import time\nwhile True: time.sleep(60)"
_COMPUTES = "while True: sum(range(1000))"


def wait(program: str) -> tuple[bytes, bytes, str]:
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as trial:
        try:
            return class_trial._wait(trial, b"")
        finally:
            trial.kill()


def test_a_trial_that_does_something_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(class_trial, "_LONGEST_IDLE_S", 4.0)
    assert wait(_TRICKLES) == (b"done\n", b"", "")


def test_a_trial_that_does_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(class_trial, "_LONGEST_IDLE_S", 2.0)
    assert "did nothing" in wait(_SLEEPS)[2]


def test_a_trial_that_computes_without_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(class_trial, "_LONGEST_S", 0.2)
    assert "of processor time" in wait(_COMPUTES)[2]
