"""What a measuring worker is to do, and what it finds. Whoever orders it loads nothing of what measures."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from device_profiles.acceptance import PairAcceptance, TargetTexts
from device_profiles.link import LinkProfile
from device_profiles.measured import MeasuredDevice, MeasuredModel
from orchestrator.protocol.contract import WorkerSpec
from orchestrator.protocol.links.address import LinkEndpoint
from orchestrator.protocol.load_options import EngineOptions, ModelOptions

PROFILE_ENTRY = "orchestrator.worker.measuring.measuring_worker:build_measuring_engine"
STEPS_S = 7.0
"""How long forwards of a model are measured, about. ADR 0094: a profile of 8 s was off by 15 % at single numbers of
rows on a shared machine."""

Finding = MeasuredDevice | MeasuredModel | PairAcceptance | TargetTexts | LinkProfile
KINDS: dict[str, type] = {
    "device": MeasuredDevice,
    "model": MeasuredModel,
    "pair": PairAcceptance,
    "texts": TargetTexts,
    "link": LinkProfile,
}
"""What a Measured event holds, by its kind."""

CHAT_WORKLOAD = "chat"
"""What acceptance is measured on where nobody names other texts (worker.measuring.texts)."""


class ProbeOptions(msgspec.Struct, frozen=True):
    """An endpoint, and the names of both ends."""

    endpoint: LinkEndpoint
    left: str
    right: str


class ProfileJob(msgspec.Struct, frozen=True):
    """One model on one device: measure it in this role."""

    engine: EngineOptions
    model: ModelOptions
    role: Literal["target", "draft"]
    known_device: bool = False
    """The device's own rates are measured already."""
    texts: dict[str, Any] | None = None
    """What the target says to `measuring.texts`, as plain data; None: that is to be measured."""
    drafter: str = ""
    """The name of a draft."""
    steps_s: float = STEPS_S
    keep: bool = False
    """What is found is stored on this host, too."""
    early: bool = False
    """A target's forwards are passed on before its rounds are measured."""
    device_only: bool = False
    """The device's rates and nothing else, which loads no model."""
    may_cut: bool = False
    """Its layers may be spread over devices: where there is no room for all of them, a few are measured."""
    room_bytes: int = 0
    """What may be filled of its device; 0: what is free when it is measured."""


def job_spec(job: ProfileJob, node: str = "") -> WorkerSpec:
    name = f"measure {job.model.adapter} {job.model.device} {job.drafter or job.role} {job.model.threads}"
    return WorkerSpec(name=name, entry=PROFILE_ENTRY, options=msgspec.to_builtins(job), node=node, cpus=0.0)
