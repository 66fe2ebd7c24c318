"""Precedence of overrides of speculation: request, then session, then engine, within the operator's bounds.

A session is all requests with one user tag. An override may switch speculation off, fix the depth, or bound it.
A field that is left open is taken from the next wider scope. No override passes the operator's bounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple


class Scope(StrEnum):
    """Who said it, in order of precedence."""

    OPERATOR = "operator"
    REQUEST = "request"
    SESSION = "session"
    ENGINE = "engine"
    DEFAULT = "default"


class Override(NamedTuple):
    """What one scope asks for; None: it leaves that open. `depth`: a fixed depth, 0 is off. `most`: a bound."""

    scope: Scope
    enabled: bool | None = None
    depth: int | None = None
    most: int | None = None


class OperatorBounds(NamedTuple):
    """The operator's. `enabled` False: nobody gets drafts. `most` (>= 0) drafts a sequence; `least`: the lowest bound
    that an override can set where it does not switch speculation off. `fixed`: a request without an override gets
    `most` in every round."""

    enabled: bool = True
    most: int = 12
    least: int = 0
    fixed: bool = False


class EffectiveBound(NamedTuple):
    """What holds. `most`: the most drafts, 0 where speculation is off. `fixed`: no policy chooses within that. `by`:
    whose override it was, `cut`: the operator's bounds changed it."""

    most: int
    fixed: bool
    by: Scope
    cut: bool


def effective(overrides: Sequence[Override], bounds: OperatorBounds) -> EffectiveBound:
    """Return what holds for a request, of all overrides that concern it (in any order)."""
    if not bounds.enabled:
        cut = any(override.enabled or override.depth or override.most for override in overrides)
        return EffectiveBound(0, True, Scope.OPERATOR, cut)
    order = list(Scope)
    for override in sorted(overrides, key=lambda override: order.index(override.scope)):
        wanted = override.depth if override.depth is not None else override.most
        if override.enabled is False or wanted == 0:
            return EffectiveBound(0, True, override.scope, cut=False)
        if wanted is not None:
            most = min(max(wanted, bounds.least), bounds.most)
            return EffectiveBound(most, override.depth is not None, override.scope, most != wanted)
        if override.enabled:
            return EffectiveBound(bounds.most, False, override.scope, cut=False)
    return EffectiveBound(bounds.most, bounds.fixed, Scope.DEFAULT, cut=False)
