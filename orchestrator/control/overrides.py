"""What was wished of speculation for sessions and engines, and what that makes of a request when it is sent.

A session is all requests with one user tag, an engine a replica. Wishes are kept for as long as the daemon lives,
whatever becomes of its workers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, TypeVar

import msgspec

from orchestrator.clock import Clock
from orchestrator.errors import RequestError
from orchestrator.telemetry import get_logger
from orchestrator.workers.messages import Ready, Submit
from policies.serving.canary import CanaryVariant
from policies.serving.overrides import EffectiveBound, OperatorBounds, Override, Scope, effective

MAX_SESSIONS = 1024

_K = TypeVar("_K")

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class RecordedOverride:
    """A wish, who asked for it, and when (seconds since 1970)."""

    wish: Override
    asked_by: str
    since_s: float


class ActiveOverrides(NamedTuple):
    """All wishes that stand at one time, of sessions by user tag and of engines by number. Never changed: a request
    keeps those of its start."""

    sessions: Mapping[str, RecordedOverride] = MappingProxyType({})
    engines: Mapping[int, RecordedOverride] = MappingProxyType({})

    def of(self, submit: Submit, engine: int) -> list[Override]:
        """Return the wishes that concern a request on an engine."""
        enabled = True if submit.policy_depth else None
        own = Override(Scope.REQUEST, enabled, submit.depth, submit.most_depth)
        wider = (self.sessions.get(submit.user) if submit.user else None, self.engines.get(engine))
        return [own, *(wished.wish for wished in wider if wished is not None)]


NO_WISHES = ActiveOverrides()


def resolve_overrides(
    submit: Submit, standing: ActiveOverrides, engine: int, bounds: OperatorBounds
) -> tuple[Submit, EffectiveBound]:
    """Return a request as an engine is to decode it, by all wishes that concern it, and what that comes to. One that
    nobody wishes anything of stays as it is."""
    found = effective(standing.of(submit, engine), bounds)
    if found.by is Scope.DEFAULT:
        return submit, found
    depth, most = (found.most, None) if found.fixed else (None, found.most)
    return msgspec.structs.replace(submit, depth=depth, most_depth=most), found


def bounds_of(ready: Ready | None, least: int, lane: str = "") -> OperatorBounds:
    """Return the operator's bounds, as they are effective in a worker for requests of a lane (see Submit): without a
    drafter nobody gets drafts. `least`: see OperatorBounds."""
    if ready is None:
        return OperatorBounds(least=least)
    canary = lane == CanaryVariant.CANARY.value
    most = ready.canary_depth if canary else ready.max_depth if ready.drafters else 0
    fixed = ready.canary_fixed if canary else ready.fixed_depth
    return OperatorBounds(most > 0, most, min(least, most), fixed)


class Overrides:
    """Takes wishes in and back. Owned by one event loop."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.standing = NO_WISHES

    def take(
        self, wish: Override | None, asked_by: str, *, user: str, engine: int | None, engines: Collection[int]
    ) -> None:
        """See control.port.Control.wish; `engines` are all there are."""
        if engine is not None and engine not in engines:
            raise RequestError(f"there is no engine {engine}; there are 0 to {max(engines)}", param="engine")
        if user:
            self._session(user, wish, asked_by)
        elif engine is not None:
            self._engine(engine, wish, asked_by)
        elif wish is not None:
            for one in engines:
                self._engine(one, wish, asked_by)
        else:
            self.standing = NO_WISHES
            _log.info("speculation wished", everybody=True, wish=format_override(None), asked_by=asked_by)

    def _session(self, user: str, wish: Override | None, asked_by: str) -> None:
        known = self.standing.sessions
        if wish is not None and user not in known and len(known) >= MAX_SESSIONS:
            raise RequestError(
                f"{MAX_SESSIONS} sessions have wishes already; take some back with `outrider speculation reset`",
                code="too_many_sessions",
                param="user",
            )
        self.standing = self.standing._replace(sessions=self._replace_override(known, user, wish, asked_by))
        _log.info("speculation wished", session=user, wish=format_override(wish), asked_by=asked_by)

    def _engine(self, engine: int, wish: Override | None, asked_by: str) -> None:
        self.standing = self.standing._replace(
            engines=self._replace_override(self.standing.engines, engine, wish, asked_by)
        )
        _log.info("speculation wished", engine=engine, wish=format_override(wish), asked_by=asked_by)

    def _replace_override(
        self, known: Mapping[_K, RecordedOverride], key: _K, wish: Override | None, asked_by: str
    ) -> Mapping[_K, RecordedOverride]:
        others = {other: wished for other, wished in known.items() if other != key}
        if wish is not None:
            others[key] = RecordedOverride(wish, asked_by, self._clock.wall_s())
        return MappingProxyType(others)


def format_override(wish: Override | None) -> str:
    """Return a wish in words; None is one that was taken back."""
    if wish is None:
        return "not wished any more"
    if wish.enabled is False or 0 in (wish.depth, wish.most):
        return "off"
    if wish.depth is not None:
        return f"depth {wish.depth}"
    return f"at most {wish.most}" if wish.most is not None else "auto"
