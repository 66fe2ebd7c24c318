"""A recording as a file: JSON, with a version. A later run replays it alone, on any machine, and finds the same."""

from __future__ import annotations

import gzip
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec

from device_profiles.cost import StepCost
from orchestrator.errors import OutriderError
from outrider_lab.replay.recorded import Costs, RecordedRequest

VERSION = 1


class RecordingError(OutriderError):
    """A recording cannot be read or written; the message says why."""


class Recording(msgspec.Struct, frozen=True):
    """`kinds[kind]`: the same requests along that kind's drafts. `costs`: what rounds take; `known`: what a worker
    knows of that as it starts. `most`: the most drafts of a sequence. `limit`: see session.Plan. `environment`: where
    it was recorded."""

    kinds: dict[str, list[RecordedRequest]]
    costs: Costs
    known: StepCost
    most: int
    limit: int
    concurrencies: list[int]
    environment: dict[str, Any] = {}
    version: int = VERSION

    def categories(self) -> list[str]:
        first = next(iter(self.kinds.values()))
        return list(dict.fromkeys(request.category for request in first))


def save_recording(recording: Recording, path: Path) -> None:
    """Write a recording. Raises RecordingError."""
    try:
        path.write_bytes(msgspec.json.encode(recording))
    except OSError as error:
        raise RecordingError(f"--record {path}: cannot be written: {error.strerror}") from error


def load_recording(path: Path) -> Recording:
    """Read a recording. Raises RecordingError for a file that is none, or one of another version."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise RecordingError(f"--replay {path}: cannot be read: {error.strerror}") from error
    try:
        version = msgspec.json.decode(content, type=dict[str, Any]).get("version")
        if version != VERSION:
            raise RecordingError(f"--replay {path}: version {version}, and this is for {VERSION}: record it again")
        found = msgspec.json.decode(content, type=Recording)
    except msgspec.MsgspecError as error:
        raise RecordingError(f"--replay {path}: no recording of `outrider bench policy`: {error}") from error
    if not found.kinds or not all(found.kinds.values()):
        raise RecordingError(f"--replay {path}: there is no request in it")
    return found


def read_shipped_requests() -> list[RecordedRequest]:
    """Return what ships: drafts from the text along the default model's outputs, to prompts of 13 categories."""
    packed = resources.files("outrider_lab.simulation").joinpath("shipped/suffix.json.gz").read_bytes()
    return msgspec.json.decode(gzip.decompress(packed), type=list[RecordedRequest])
