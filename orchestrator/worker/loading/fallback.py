"""Single calls that may fail for the device's sake: they are made again, in another way."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from adapters.contract import AdapterError

_log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Attempt(Generic[T]):
    """One way to make a call: on which device, or how small."""

    title: str
    call: Callable[[], T]


@dataclass(frozen=True, slots=True)
class FallbackResult(Generic[T]):
    """The result, by which attempt, and why the ones before it failed."""

    value: T
    title: str
    failed: tuple[str, ...]


def execute_with_fallback(
    attempts: Sequence[Attempt[T]], retry_on: tuple[type[AdapterError], ...]
) -> FallbackResult[T]:
    """Make a call in the first way that works; each failure is logged.

    Other ways are tried only where the first fails in the manner of `retry_on`. Where all fail, its failure is raised:
    that is about what was asked for.
    """
    first, *others = attempts
    try:
        return FallbackResult(first.call(), first.title, ())
    except retry_on as error:
        wanted = error
    failed = [f"{first.title}: {wanted}"]
    for attempt in others:
        _log.warning("%s; now %s", failed[-1], attempt.title)
        try:
            return FallbackResult(attempt.call(), attempt.title, tuple(failed))
        except AdapterError as error:
            failed.append(f"{attempt.title}: {error}")
    _log.error("%s; no other way is left", failed[-1])
    raise wanted
