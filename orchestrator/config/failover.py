"""The section `failover`: what takes the target's place when no replica of it can serve."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from orchestrator.config.adapter_names import DeviceName, RuntimeName
from orchestrator.config.section import Section, Size
from orchestrator.config.target import (
    ActivationPrecision,
    Cores,
    KvCachePrecision,
    WeightsPrecision,
)


class StandbyTarget(Section):
    """The same model in another way or place. What is not set is as in `model`, `devices` and `limits`."""

    adapter: RuntimeName | None = None
    """The runtime that runs it."""
    device: DeviceName | None = None
    """The device, as the runtime names it."""
    weights: WeightsPrecision | None = None
    """The number format of the weights."""
    activations: ActivationPrecision | None = None
    """The number format of activations."""
    kv_cache_precision: KvCachePrecision | None = None
    """The number format of the KV cache."""
    host: str = ""
    """On Ray: the address of the node that it runs on; `here`: the daemon's. Empty: any."""
    cores: Cores = Field(default=[])
    """The CPU cores that it runs on, by their numbers on its host. Empty: `devices.cores`."""
    threads: int = Field(default=0, ge=0, le=1024)
    """Threads of its runtime; 0 is one for each of its `cores`, and `devices.threads` where it has none."""
    kv_cache: Size | None = None
    """Memory of its KV cache: less is a shorter context and fewer requests at a time."""
    max_running: int | None = Field(default=None, ge=1, le=1024)
    """Sequences that it decodes at the same time."""
    max_batch_rows: int | None = Field(default=None, ge=16, le=8192)
    """Rows of one forward."""
    readiness: Literal["hot", "warm", "cold"] = "warm"
    """`hot`: loaded beside the target. `warm`: its model is prepared in the store beforehand, and loaded when it is
    needed. `cold`: nothing is done beforehand."""


class FailoverSection(Section):
    """What happens when no replica of the target can serve."""

    standby: tuple[StandbyTarget, ...] = Field(default=(), max_length=8, strict=False)
    """Tried in this order. Empty: the plan's standby, where `placement.standby` and a plan name one."""
    after_s: float = Field(default=2.0, ge=0, le=3600)
    """How long the target may be lost before a standby that is not `hot` is started. One that is `hot` takes over at
    once, and nothing is waited for where the target's device refuses work."""
    back_after_s: float = Field(default=10.0, ge=0, le=3600)
    """How long the target must have served again before the standby gives its requests back. New requests go to the
    target at once."""
    other_bits: Literal["never", "new_requests", "streams"] = "new_requests"
    """What a standby may do whose tokens can differ from the target's, since it computes in another numerical class.
    `never`: nothing. `new_requests`: answers that have no token yet. `streams`: also those that have, and
    these may then end in another way. Answers say so: `system_fingerprint`, and the header
    `X-Outrider-Standby`."""
