"""Ends all streams with an error. No effects."""

from __future__ import annotations

from orchestrator.daemon.control.actions import (
    Action,
)
from orchestrator.daemon.control.control_state import State
from orchestrator.errors import RequestError


def end_streams(state: State, message: str, now_s: float) -> list[Action]:
    """Tell every reader that its stream is over."""
    error = RequestError(message, status=503, kind="server_error", code="interrupted", retry_after_s=10)
    return [action for stream in state.streams.live() for action in state.router.end(stream, now_s, error)]
