"""What the routes answer, as the served OpenAPI document describes it."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict


class Answered(BaseModel):
    """A part of an answer: no field is missing, and there is no other."""

    model_config = ConfigDict(extra="forbid")


class DecodeHealth(Answered):
    """`idle`: no request is live. `stalled`: requests are, and no round was finished for `api.stalled_after_s`."""

    status: Literal["ok", "idle", "stalled"]
    phase: str
    last_token_age_s: float | None
    streams: int


class Health(Answered):
    """`GET /health`."""

    status: Literal["ok"]
    phase: Literal["starting", "ready", "restarting", "draining"]
    detail: str
    decode: DecodeHealth


class Readiness(Answered):
    """`GET /ready`."""

    status: Literal["ready"]
    model: str


class Version(Answered):
    """`GET /version`."""

    version: str
