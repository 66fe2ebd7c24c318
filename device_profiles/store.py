"""Keeps what was measured, as readable JSON files: one for each device, model on a device, pair and link.

They lie in `devices/`, `models/`, `classes/`, `memory/`, `pairs/`, `texts/` and `links/`, written atomically. A file of
another schema, a damaged one, and one that does not fit its type count as not there: what they said is measured again.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from device_profiles.acceptance import PairAcceptance, TargetTexts
from device_profiles.link import LinkProfile
from device_profiles.measured import MeasuredDevice, MeasuredModel
from device_profiles.memory import MeasuredMemory
from device_profiles.numerical_class import MeasuredClasses
from device_profiles.whole_file import replace_file

SCHEMA = 4
"""Grows with every change of what files hold; an older file is measured again."""

Stored = MeasuredDevice | MeasuredModel | MeasuredClasses | MeasuredMemory | PairAcceptance | TargetTexts | LinkProfile
_NUMBERS = re.compile(r"\[[-+\d.eE,\s]+\]")
_T = TypeVar("_T")
_T_Stored = TypeVar(
    "_T_Stored",
    MeasuredDevice,
    MeasuredModel,
    MeasuredClasses,
    MeasuredMemory,
    PairAcceptance,
    TargetTexts,
    LinkProfile,
)
_ROOMS: dict[type, tuple[str, tuple[str, ...]]] = {
    MeasuredDevice: ("devices", ("adapter", "device", "threads", "fingerprint")),
    MeasuredModel: (
        "models",
        ("adapter", "device", "role", "model", "model_digest", "formats", "exactness", "threads", "fingerprint"),
    ),
    MeasuredClasses: (
        "classes",
        ("adapter", "device", "model", "model_digest", "weights", "asked", "threads", "fingerprint"),
    ),
    MeasuredMemory: (
        "memory",
        ("adapter", "device", "model", "model_digest", "weights", "wanted", "slots", "fingerprint"),
    ),
    PairAcceptance: (
        "pairs",
        ("drafter", "drafter_digest", "target", "target_digest", "workload", "rule", "sequences", "adapter"),
    ),
    TargetTexts: ("texts", ("target", "target_digest", "workload")),
    LinkProfile: ("links", ("left", "right")),
}
"""Where a value is kept, and the fields that it is known by: one that is measured anew replaces the one before."""


class ProfileStore:
    """See the module. `directory` need not exist."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def save(self, value: Stored) -> Path:
        """Write a value, replacing the one that is known by the same fields. Raises OSError."""
        path = self._path(value)
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"schema": SCHEMA, **dataclasses.asdict(value)}, indent=1) + "\n"
        text = _NUMBERS.sub(lambda match: " ".join(match.group().split()), text)  # a list of numbers is a line
        with replace_file(path, 0o600, sync=True) as file:
            file.write(text.encode())
        return path

    def mark_drifted(self, seen: MeasuredModel, how: str) -> bool:
        """Note how rounds differ from a model's profile, so that it is measured again; nothing is done where another
        one is stored by now. Returns whether it was noted. Raises OSError."""
        try:
            now = read(self._path(seen), MeasuredModel)
        except ValueError:
            return False
        if now.measured_at != seen.measured_at:
            return False
        self.save(dataclasses.replace(now, drifted=how))
        return True

    def devices(self) -> list[MeasuredDevice]:
        return self._all(MeasuredDevice)

    def models(self, fingerprint: str | None = None) -> list[MeasuredModel]:
        return [model for model in self._all(MeasuredModel) if fingerprint is None or model.fingerprint == fingerprint]

    def classes(self, fingerprint: str | None = None) -> list[MeasuredClasses]:
        """Return the numerical classes of models that can be read, on one device or on all."""
        return [
            classes
            for classes in self._all(MeasuredClasses)
            if fingerprint is None or classes.fingerprint == fingerprint
        ]

    def memory(self) -> list[MeasuredMemory]:
        """Return what workers held."""
        return self._all(MeasuredMemory)

    def find_memory(self, known_by: MeasuredMemory) -> MeasuredMemory | None:
        """Return what was measured of a load that is known by the same; None where nothing was."""
        try:
            return read(self._path(known_by), MeasuredMemory)
        except ValueError:
            return None

    def pairs(self) -> list[PairAcceptance]:
        return self._all(PairAcceptance)

    def texts(self) -> list[TargetTexts]:
        return self._all(TargetTexts)

    def links(self) -> list[LinkProfile]:
        return self._all(LinkProfile)

    def _all(self, kind: type[_T_Stored]) -> list[_T_Stored]:
        profiles: list[_T_Stored] = []
        for path in self._files(kind):
            try:
                profiles.append(read(path, kind))
            except ValueError:
                continue
        return profiles

    def _files(self, kind: type) -> Iterator[Path]:
        yield from sorted((self.directory / _ROOMS[kind][0]).glob("*.json"))

    def _path(self, value: Stored) -> Path:
        room, fields = _ROOMS[type(value)]
        words = [str(getattr(value, name)) for name in fields]
        key = "--".join(re.sub(r"[^A-Za-z0-9._-]+", "_", word) or "-" for word in words)
        return self.directory / room / f"{key}.json"


def read(path: Path, kind: type[_T]) -> _T:
    """Return the value in a file. Raises ValueError, with what is wrong, for one that cannot be used."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot be read: {error}") from error
    if not isinstance(data, dict) or data.pop("schema", None) != SCHEMA:
        raise ValueError(f"is of another schema than {SCHEMA}")
    try:
        value = msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        raise ValueError(f"does not fit: {error}") from error
    if _says_more(data, msgspec.to_builtins(value)):
        raise ValueError(f"has fields that no {kind.__name__} has")
    return value


def _says_more(data: Any, known: Any) -> bool:
    """Tell whether plain data has fields that what was made of it has not: msgspec passes over them."""
    if isinstance(data, dict):
        return not data.keys() <= known.keys() or any(_says_more(value, known[name]) for name, value in data.items())
    return isinstance(data, list) and any(map(_says_more, data, known))
