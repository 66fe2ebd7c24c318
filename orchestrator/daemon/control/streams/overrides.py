"""Overrides of speculation for sessions and engines, and how they change a request when it is sent. No effects.

A session is all requests with one user tag, an engine a replica. Overrides are kept for as long as the daemon lives,
whatever becomes of its workers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import msgspec

from orchestrator.errors import RequestError
from orchestrator.protocol.commands import Submit
from orchestrator.protocol.ready import Ready
from policies.serving.canary import CanaryVariant
from policies.serving.overrides import EffectiveBound, OperatorBounds, Override, Scope, effective

MAX_SESSIONS = 1024  # bounds memory. Not tuned.

_K = TypeVar("_K")


@dataclass(frozen=True, slots=True)
class RecordedOverride:
    """An override, who asked for it, and when (seconds since 1970)."""

    override: Override
    asked_by: str
    since_s: float


class ActiveOverrides(NamedTuple):
    """All overrides that stand at one time, of sessions by user tag and of engines by number. Never changed."""

    sessions: Mapping[str, RecordedOverride] = MappingProxyType({})
    engines: Mapping[int, RecordedOverride] = MappingProxyType({})

    def of(self, submit: Submit, engine: int) -> list[Override]:
        enabled = True if submit.policy_depth else None
        own = Override(Scope.REQUEST, enabled, submit.depth, submit.most_depth)
        recorded = (self.sessions.get(submit.user) if submit.user else None, self.engines.get(engine))
        return [own, *(override.override for override in recorded if override is not None)]


NO_OVERRIDES = ActiveOverrides()


class OverrideScope(NamedTuple):
    """Whom an override is for: a session, an engine, or all engines where neither is named."""

    user: str = ""
    engine: int | None = None


def resolve_overrides(
    submit: Submit, standing: ActiveOverrides, engine: int, bounds: OperatorBounds
) -> tuple[Submit, EffectiveBound]:
    """Return a request as an engine is to decode it, by all overrides that concern it, and its effective bound. Where
    nothing overrides, it stays as it is."""
    asks = submit.depth is not None or submit.most_depth is not None or submit.policy_depth
    if not asks and not standing.engines and not (submit.user and standing.sessions):
        return submit, _find_default(bounds)
    bound = effective(standing.of(submit, engine), bounds)
    if bound.by is Scope.DEFAULT:
        return submit, bound
    depth, most = (bound.most, None) if bound.fixed else (None, bound.most)
    return msgspec.structs.replace(submit, depth=depth, most_depth=most), bound


@lru_cache(maxsize=64)
def _find_default(bounds: OperatorBounds) -> EffectiveBound:
    """Return the bound of requests that nothing overrides."""
    return effective([Override(Scope.REQUEST)], bounds)


def bounds_of(ready: Ready | None, least: int, variant: str = "", *, predicted: bool = False) -> OperatorBounds:
    """Return the operator's bounds, as they are effective in a worker for requests of a variant (see Submit): without a
    drafter nobody gets drafts. `least`: see OperatorBounds; `predicted`: the requests bring predictions."""
    if ready is None:
        return OperatorBounds(least=least)
    drafting = ready.drafting
    canary = variant == CanaryVariant.CANARY.value
    most = drafting.canary_depth if canary else drafting.max_depth if drafting.drafters else 0
    fixed = drafting.canary_fixed if canary else drafting.fixed_depth
    if predicted and most > 0 and not fixed:
        most = max(most, drafting.predicted_depth)
    return OperatorBounds(most > 0, most, min(least, most), fixed)


def change_overrides(
    standing: ActiveOverrides,
    scope: OverrideScope,
    override: Override | None,
    asked_by: str,
    engines: Collection[int],
    wall_s: float,
) -> tuple[ActiveOverrides, list[dict[str, Any]]]:
    """Return the overrides that stand once this one was taken in (None: taken back), and whom that concerns, for the
    log. `engines` are all there are, `wall_s` is the time. Raises RequestError. See AdminControl.override."""
    user, engine = scope
    recorded = RecordedOverride(override, asked_by, wall_s) if override is not None else None
    if engine is not None and engine not in engines:
        raise RequestError(f"there is no engine {engine}; there are 0 to {max(engines)}", param="engine")
    if user:
        if recorded is not None and user not in standing.sessions and len(standing.sessions) >= MAX_SESSIONS:
            raise RequestError(
                f"{MAX_SESSIONS} sessions have overrides already; take some back with `outrider speculation reset`",
                code="too_many_sessions",
                param="user",
            )
        return standing._replace(sessions=_replace_override(standing.sessions, [user], recorded)), [{"session": user}]
    if engine is None and recorded is None:
        return NO_OVERRIDES, [{"everybody": True}]
    changed = [engine] if engine is not None else list(engines)
    replaced = standing._replace(engines=_replace_override(standing.engines, changed, recorded))
    return replaced, [{"engine": number} for number in changed]


def _replace_override(
    known: Mapping[_K, RecordedOverride], keys: Collection[_K], recorded: RecordedOverride | None
) -> Mapping[_K, RecordedOverride]:
    others = {key: override for key, override in known.items() if key not in keys}
    return MappingProxyType(others | (dict.fromkeys(keys, recorded) if recorded is not None else {}))


def format_override(override: Override | None) -> str:
    """Return an override in words; None is one that was taken back."""
    if override is None:
        return "taken back"
    if override.enabled is False or 0 in (override.depth, override.most):
        return "off"
    if override.depth is not None:
        return f"depth {override.depth}"
    return f"at most {override.most}" if override.most is not None else "auto"
