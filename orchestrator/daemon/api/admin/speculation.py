"""The admin route that takes overrides of speculation, and the status of those that stand."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import FastAPI, Request
from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from orchestrator.daemon.api import errors
from orchestrator.daemon.api.admin.targets import AdminTargets
from orchestrator.daemon.api.conversation import Body
from orchestrator.daemon.api.translate import read_override
from orchestrator.daemon.api.wire import MAX_USER_TAG, SpeculativeConfig
from orchestrator.daemon.control.port import StateView
from orchestrator.daemon.control.rollout.canary import CanaryTrial
from orchestrator.daemon.control.streams.overrides import RecordedOverride, format_override
from policies.serving.overrides import Scope


class OverrideConfig(SpeculativeConfig):
    """The override of a session or an engine: the rule of acceptance is the request's or the operator's."""

    method: Literal["auto", "off"] = "auto"
    acceptance: None = None


class OverrideBody(Body):
    """`POST /admin/speculation`: an override for all requests with a user tag, or those of an engine. Where neither is
    named it is for all engines. `speculative_config` null takes it back; where neither is named, all of them. `model`:
    whose requests; left out: those of every model, and an engine has to be one's."""

    model: str | None = None
    user: str = Field(default="", max_length=MAX_USER_TAG)
    engine: int | None = Field(default=None, ge=0)
    speculative_config: OverrideConfig | None
    asked_by: str = Field(min_length=1, max_length=MAX_USER_TAG)

    @model_validator(mode="after")
    def _one_scope(self) -> OverrideBody:
        if self.user and self.engine is not None:
            text = "an override is for a 'user' or for an '{field}', not for both"
            raise PydanticCustomError("invalid_combination", text, {"field": "engine"})
        return self


def install_speculation_route(app: FastAPI, targets: AdminTargets) -> None:
    @app.post("/admin/speculation")
    async def set_override(request: Request) -> dict[str, Any]:
        body: OverrideBody = errors.parse_body(OverrideBody, await request.body())
        config, override = body.speculative_config, None
        if config is not None:  # it leaves nothing open: without a depth the policy chooses
            scope = Scope.SESSION if body.user else Scope.ENGINE
            override = read_override(config, scope)._replace(enabled=config.method != "off")
        if body.engine is not None:
            targets.choose_one(body.model, f"engine {body.engine}")
        chosen = targets.choose(body.model)
        for target in chosen:
            target.control.steering.override(override, body.asked_by, user=body.user, engine=body.engine)
        first, *further = (
            {**targets.label(target), **describe_overrides(target.control.view(), target.trial)} for target in chosen
        )
        return {**first, "models": further} if further else first


def describe_overrides(view: StateView, trial: CanaryTrial | None) -> dict[str, Any]:
    """Return the operator's bounds, those of the canary's requests where one is tried, and the overrides that stand."""
    canary = view.canary_bounds if trial is not None else None
    return {
        "bounds": view.bounds._asdict() if view.bounds is not None else None,
        "canary_bounds": canary._asdict() if canary is not None else None,
        "engines": [
            {"engine": number, **_describe_override(recorded)}
            for number, recorded in sorted(view.overrides.engines.items())
        ],
        "sessions": [
            {"user": user, **_describe_override(recorded)} for user, recorded in sorted(view.overrides.sessions.items())
        ],
    }


def _describe_override(recorded: RecordedOverride) -> dict[str, Any]:
    return {"override": format_override(recorded.override), "asked_by": recorded.asked_by, "since_s": recorded.since_s}
