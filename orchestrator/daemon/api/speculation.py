"""Overrides of speculation, and the bound that holds by them, in the words of `speculative_config`."""

from __future__ import annotations

from typing import Any

from orchestrator.daemon.api.wire import SpeculativeConfig
from policies.serving.overrides import EffectiveBound, Override, Scope

HEADER = "X-Outrider-Speculation"


def read_override(config: SpeculativeConfig | None, scope: Scope) -> Override:
    """Return the override that a `speculative_config` asks for. Without a method, fields that it lacks stay open."""
    if config is None:
        return Override(scope)
    if config.method == "off":
        return Override(scope, enabled=False, depth=0)
    depth, most = config.num_speculative_tokens, config.max_speculative_tokens
    return Override(scope, True if "method" in config.model_fields_set else None, depth, most)


def describe_effective_speculation(bound: EffectiveBound | None) -> dict[str, Any] | None:
    """Return what holds as a `speculative_config`, whose word it was, and whether the operator's bounds cut it."""
    if bound is None:
        return None
    return {
        "method": "auto" if bound.most else "off",
        "num_speculative_tokens": bound.most if bound.fixed else None,
        "max_speculative_tokens": None if bound.fixed else bound.most,
        "by": bound.by.value,
        "cut": bound.cut,
    }


def headers_of(bound: EffectiveBound | None) -> dict[str, str]:
    """Return the same as a header."""
    if bound is None:
        return {}
    name = "num_speculative_tokens" if bound.fixed else "max_speculative_tokens"
    cut = "; cut" if bound.cut else ""
    return {HEADER: f"{f'{name}={bound.most}' if bound.most else 'off'}; by={bound.by.value}{cut}"}
