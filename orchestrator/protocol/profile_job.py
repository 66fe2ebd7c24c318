"""What a measuring worker is to do. Whoever orders it loads nothing of what measures."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from orchestrator.protocol.contract import WorkerSpec
from orchestrator.protocol.load_options import EngineOptions, ModelOptions

PROFILE_ENTRY = "orchestrator.worker.measuring.measuring_worker:build_measuring_engine"
STEPS_S = 7.0
"""How long forwards of a model are measured, about."""


class ProfileJob(msgspec.Struct, frozen=True):
    """One model on one device: measure it in this role. `known_device`: the device's own rates are measured already.
    `texts`: what the target says to `measuring.texts`, as plain data, where that is known; else it is measured.
    `drafter`: the name of a draft. `steps_s`: how long forwards are measured, about. `keep`: what is found is stored
    on this host, too. `early`: a target's forwards are passed on before its rounds are measured. `device_only`: the
    device's rates and nothing else, which loads no model."""

    engine: EngineOptions
    model: ModelOptions
    role: Literal["target", "draft"]
    known_device: bool = False
    texts: dict[str, Any] | None = None
    drafter: str = ""
    steps_s: float = STEPS_S
    keep: bool = False
    early: bool = False
    device_only: bool = False


def job_spec(job: ProfileJob, node: str = "") -> WorkerSpec:
    """Return how a measuring worker is started."""
    name = f"measure {job.model.adapter} {job.model.device} {job.drafter or job.role} {job.model.threads}"
    return WorkerSpec(name=name, entry=PROFILE_ENTRY, options=msgspec.to_builtins(job), node=node, cpus=0.0)
