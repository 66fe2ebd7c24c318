"""What is kept of a canary's trial, so that a daemon that starts again with the same configuration goes on with it."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import msgspec

from orchestrator.daemon.control.port import TRIAL, TrialDecision
from policies.serving.canary import Figures

_log = logging.getLogger(__name__)


class TrialState(msgspec.Struct, frozen=True):
    """`number` counts trials of one configuration. `arms`: figures by the arm's name, until it was decided."""

    number: int = 0
    phase: str = TRIAL
    arms: dict[str, Figures] = {}
    decision: TrialDecision | None = None


class TrialFile:
    """One file, written whole or not at all. What cannot be read or written is logged: a trial is no reason to fail."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> TrialState | None:
        """Return what was kept; None where nothing was, or it cannot be used."""
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=TrialState)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError) as error:
            _log.warning("the canary's trial begins anew: %s cannot be used: %s", self._path, error)
            return None

    def write(self, state: TrialState) -> None:
        """Keep a state."""
        draft = self._path.with_suffix(".tmp")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            draft.write_bytes(msgspec.json.encode(state))
            os.replace(draft, self._path)
        except OSError as error:
            _log.warning("the canary's trial is not kept: %s: %s", self._path, error.strerror or error)
