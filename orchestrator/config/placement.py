"""The section `placement`: what a plan is for, and what it may do. Stands in cluster.yaml and in cluster sketches."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from orchestrator.config.section import Section


class ScoreWeights(Section):
    """What each term weighs where plans are predicted to be equally fast; only their ratios count."""

    compute_headroom: float = Field(default=1.0, ge=0, le=100)
    """How much of a device's rate is left when it verifies."""
    bandwidth_headroom: float = Field(default=1.0, ge=0, le=100)
    """How much of its memory's rate is left."""
    memory_fit: float = Field(default=1.0, ge=0, le=100)
    """How much of its memory stays free."""
    link_cost: float = Field(default=1.0, ge=0, le=100)
    """How little of a round links take, and of a first token the way to the API."""
    efficiency: float = Field(default=0.5, ge=0, le=100)
    """How little energy a token takes."""
    health: float = Field(default=1.0, ge=0, le=100)
    """How far its devices were free of failures of late."""
    idle_share: float = Field(default=1.0, ge=0, le=100)
    """How little of its devices' time other programs take."""
    queue_depth: float = Field(default=1.0, ge=0, le=100)
    """How few requests wait for workers on its devices."""
    indifference: float = Field(default=0.0, ge=0, lt=1)
    """The share of the predicted tokens per second (of tokens for the cost, the energy or the time, with another
    objective) that may be given up for a better score."""


class PlacementSection(Section):
    """What a plan is for, and what it may do: `outrider plan`, and models whose `adapter` or `device` is `auto`."""

    objective: Literal["throughput", "latency", "cost", "energy"] = "throughput"
    """What the best plan has: the most tokens a second, the shortest time of a stream's token, the lowest cost of a
    token, or the least energy. The last two need the price or the power of every device that may be used."""
    currency: str = Field(default="USD", min_length=1, max_length=16)
    """The word for the units of prices; it is only printed."""
    concurrency: int = Field(default=1, ge=1, le=4096)
    """The load to plan for: requests at once."""
    prompt_tokens: int = Field(default=256, ge=1, le=1_000_000)
    """The load to plan for: tokens of a prompt."""
    output_tokens: int = Field(default=128, ge=1, le=1_000_000)
    """The load to plan for: tokens of an answer."""
    draft_acceptance: float = Field(default=0.6, gt=0, lt=1)
    """The chance that a draft model's token is accepted, as long as it was not measured."""
    pin_target: tuple[str, ...] = Field(default=(), strict=False)
    """Devices or hosts that alone may host the target; empty: any."""
    pin_draft: tuple[str, ...] = Field(default=(), strict=False)
    """Devices or hosts that alone may host draft models; empty: any."""
    exclude: tuple[str, ...] = Field(default=(), strict=False)
    """Devices or hosts that host nothing."""
    anti_affinity: Literal["none", "device", "host", "zone"] = "none"
    """What a draft model must not share with the target."""
    replicas_apart: Literal["device", "host", "zone"] = "device"
    """What two replicas of the target must not share."""
    zones: tuple[str, ...] = Field(default=(), strict=False)
    """Zones that alone are used; empty: all."""
    sharding: Literal["when_needed", "allowed", "never"] = "when_needed"
    """Whether the target's layers may be spread over devices: `when_needed` where no device can hold them all. `never`:
    nor may each be split over ranks."""
    standby: bool = True
    """Name a place for the target to go to when it is lost."""
    keep_free: float = Field(default=0.05, ge=0, le=0.9)
    """The share of each device's memory that stays free."""
    profile: Literal["if_missing", "never"] = "if_missing"
    """Where something is `auto`: whether the daemon measures what has no stored profile: before it serves, as long as
    `profile_budget_s` lasts, and then when nobody asks."""
    improve: bool = True
    """Whether runtimes that promise more than the one that serves, and convert the model first, are prepared and
    measured while nobody asks. They take disk space, and minutes of the machine."""
    profile_budget_s: float = Field(default=300.0, ge=0, le=86400)
    """For how long the daemon measures before it serves, at most. It ends sooner where a request waits and one target
    is measured. It measures nothing then where a runtime loads the model's file as it is. What is left is measured when
    nobody asks; until then the plan rests on what is known."""
    drift_tolerance: float = Field(default=0.2, gt=0, le=10)
    """By how much of the predicted tokens per second rounds may differ for long before the daemon plans again."""
    replan_pause_s: float = Field(default=30.0, ge=0, le=3600)
    """How long the daemon keeps a plan that it made anew before it may make another one. Each time it is twice as long,
    up to an hour, so that two plans do not alternate."""
    drift_after_s: float = Field(default=60.0, ge=0, le=86400)
    """For how long rounds must differ so, in seconds of decoding, before the target's profile is marked as drifted. The
    profile is then measured again when nobody asks, at the daemon's next start, and by `outrider profile`."""
    load_smoothing: float = Field(default=0.3, gt=0, le=1)
    """The weight of the newest sample in the moving mean of a device's load; it is sampled each second."""
    load_lasts_s: float = Field(default=10.0, ge=1, le=3600)
    """For how long other programs must take more of a device than planned, or less, before the daemon plans again."""
    score_weights: ScoreWeights = ScoreWeights()
    """What each term weighs where plans are predicted to be equally fast."""
