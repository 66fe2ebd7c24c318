"""What differs between two configurations, how each difference takes effect, and what holds once it has. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from pydantic import BaseModel, ByteSize, SecretStr

from orchestrator.config.effects import ORDER, Effect, find_effect, find_line
from orchestrator.config.model import ClusterConfig
from orchestrator.config.schema import size_text
from orchestrator.config.section import Section
from orchestrator.config.source_text import Place, format_place
from orchestrator.redaction import redact_secrets

_LONGEST_SHOWN: Final = 200  # characters of a value in a message. Not tuned.


@dataclass(frozen=True, slots=True)
class Change:
    """One value that differs. `before` and `after` are as people write them, without secrets. `why`: what makes its
    effect another than the table's ("": nothing does)."""

    place: Place
    before: str
    after: str
    effect: Effect
    why: str = ""

    @property
    def name(self) -> str:
        """The key as people write it."""
        return format_place(self.place)


Judge = Callable[[Place], str]
"""Says why a change at a place waits for a restart, whatever its key's effect; "" where it does not."""


def list_changes(old: ClusterConfig, new: ClusterConfig, judge: Judge | None = None) -> list[Change]:
    """Return what differs, in the order of the language."""
    changes = []
    for change in _compare((), old, new):
        why = judge(change.place) if judge is not None and change.effect is not Effect.RESTART else ""
        changes.append(replace(change, effect=Effect.RESTART, why=why) if why else change)
    return changes


def apply_changes(old: ClusterConfig, new: ClusterConfig, changes: Sequence[Change]) -> ClusterConfig:
    """Return the configuration that holds once these changes of `new` have taken effect: what waits for a restart is as
    in `old`."""
    kept = {change.place for change in changes if change.effect is Effect.RESTART}
    merged = _merge((), old, new, kept)
    assert isinstance(merged, ClusterConfig)  # noqa: S101 -- a section becomes a section of its own kind
    return merged


def format_setting(value: Any) -> str:
    """Return a value as a file has it, in one line and without secrets."""
    plain = to_plain(value)
    text = redact_secrets(plain if isinstance(plain, str) else json.dumps(plain, ensure_ascii=False))
    text = text if text.isprintable() else repr(text)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[: _LONGEST_SHOWN - 3]}..."


def to_plain(value: Any) -> Any:
    """Return a value as plain data; sizes as they are written. Of a section, what is not as by default."""
    if isinstance(value, SecretStr):
        return str(value)  # stars, and "" where there is none
    if isinstance(value, BaseModel):
        shown = {name: getattr(value, name) for name in type(value).model_fields}
        defaults = type(value).model_fields
        return {name: to_plain(part) for name, part in shown.items() if part != defaults[name].default}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    if isinstance(value, ByteSize):
        return size_text(value)
    return value


def _compare(place: Place, old: Any, new: Any) -> Iterator[Change]:
    """Yield the changes at a place and below it: of sections by their keys, else of the value as a whole."""
    if old == new:
        return
    if _goes_on_below(place, old, new):
        for key, before, after in _list_below(old, new):
            yield from _compare((*place, key), before, after)
        return
    texts = (
        format_setting(old) if old is not None else "(left out)",
        format_setting(new) if new is not None else "(left out)",
    )
    yield Change(place, *texts, max(_list_effects(place, old, new), key=ORDER.index))


def _goes_on_below(place: Place, old: Any, new: Any) -> bool:
    """Return whether what stands below a place can be compared by itself."""
    if isinstance(old, Section):
        return type(old) is type(new)
    return place == ("models",) and [target.name for target in old] == [target.name for target in new]


def _list_below(old: Any, new: Any) -> Iterator[tuple[str | int, Any, Any]]:
    if isinstance(old, Section):
        for name in type(old).model_fields:
            yield name, getattr(old, name), getattr(new, name)
    else:
        for index, pair in enumerate(zip(old, new, strict=True)):
            yield index, *pair


def _list_effects(place: Place, old: Any, new: Any) -> Iterator[Effect]:
    """Yield the effects of what a value holds: one, but for a whole section that is there on one side only."""
    section = next((side for side in (old, new) if isinstance(side, Section)), None)
    if find_line(place) is not None or section is None:
        yield find_effect(place)
        return
    for name in type(section).model_fields:
        yield find_effect((*place, name))


def _merge(place: Place, old: Any, new: Any, kept: set[Place]) -> Any:
    if place in kept:
        return old
    if old == new or not _goes_on_below(place, old, new):
        return new
    below = {key: _merge((*place, key), before, after, kept) for key, before, after in _list_below(old, new)}
    if not isinstance(new, Section):
        return tuple(below.values())
    given = {str(key) for key in below if key in (old if (*place, key) in kept else new).model_fields_set}
    return type(new).model_construct(given, **{str(key): value for key, value in below.items()})
