"""What the tests of control share."""

from __future__ import annotations

import pytest

from orchestrator.launch import local
from tests.support.daemon import outrider_process
from tests.support.warm import start_worker


@pytest.fixture(scope="session")
def _warmth() -> None:
    """What workers import is there before a test measures time."""
    assert outrider_process("--version").returncode == 0


@pytest.fixture(autouse=True)
def _warm_workers(_warmth: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers are real processes, without what their imports take; in tests/workers they start as a daemon's do."""
    monkeypatch.setattr(local, "_popen", start_worker)
