"""What the canary loads beside the plan: its memory is left for it, and nothing else of it is planned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from device_profiles.units import human_bytes
from orchestrator.config.drafts import ModelDraft
from orchestrator.config.load import store_directory
from orchestrator.config.model import ClusterConfig
from orchestrator.planning.models import PlannedModel, model_at_hand
from orchestrator.planning.stored import MeasuredHardware


@dataclass(frozen=True, slots=True)
class ReservedDraft:
    """A draft model that only the canary has, and where each replica loads it."""

    model: PlannedModel
    adapter: str
    device: str
    kv_cache_bytes: int

    def memory_bytes(self, kind: str) -> int:
        """Return what it holds on a device of that kind, as estimated from its file and its KV cache."""
        elements, bits = self.model.shape.elements, self.model.bits(self.model.formats(kind)[0])
        return round(elements * bits / 8) + self.kv_cache_bytes

    def describe_reserve(self, replicas: int) -> str:
        """Return in a line what is left for it."""
        each = ", for each replica" if replicas > 1 else ""
        size = human_bytes(self.memory_bytes("cpu"))
        return f"the canary's {self.model.name}: {size} on {self.adapter} {self.device} are left for it{each}"


def beside_the_plan(config: ClusterConfig, base: Path) -> tuple[ReservedDraft, ...]:
    """Return the draft models that only the canary has. Raises ModelRefused or DownloadFailed."""
    ours, theirs = config.speculation, config.canary_speculation
    if not config.canary.share or theirs.method == "off" or not theirs.num_speculative_tokens:
        return ()
    off = ours.method == "off" or not ours.num_speculative_tokens
    drafts = config.canary_drafts or (config.drafts if off else ())
    store = store_directory(config)
    return tuple(
        ReservedDraft(
            model_at_hand(draft.source, "", base, draft.weights, store, adapter=draft.adapter),
            draft.adapter,
            draft.device,
            int(draft.kv_cache),
        )
        for draft in drafts
        if isinstance(draft, ModelDraft)
    )


def sum_reserved_bytes(hardware: MeasuredHardware, beside: Sequence[ReservedDraft], replicas: int) -> int:
    """Return the bytes of a device that are not the plan's."""
    mine = [draft for draft in beside if hardware.device_for(draft.adapter) == draft.device]
    return replicas * sum(draft.memory_bytes(hardware.kind) for draft in mine)
