"""Whether a model fits into its device's memory, and how it is told where it does not."""

from __future__ import annotations

from adapters.contract import AdapterError, ModelRefused, OutOfMemory
from adapters.device_memory import DeviceMemory, HostMemory
from device_profiles.memory import MemoryPlan
from device_profiles.units import human_bytes
from policies.models.kv_shares import SHARES

_ELSE = "free memory, take a smaller model or smaller weights, or choose another device"
_KEY = "limits.kv_cache (or the model's own kv_cache)"


def refuse_for_room(title: str, memory: DeviceMemory, *, other_bytes: int, kv_cache_bytes: int) -> AdapterError:
    """Return the refusal of a model that needs `other_bytes` beside its KV cache. It is ModelRefused where the device
    never has that much for the least part of the cache, and OutOfMemory where it has not now."""
    never = other_bytes + kv_cache_bytes // SHARES[-1] > memory.total_bytes
    limit = (
        f"{human_bytes(memory.total_bytes)} is all that may be used"
        if never
        else (f"{human_bytes(memory.free_bytes)} of {human_bytes(memory.total_bytes)} is free")
    )
    most = (memory.total_bytes if never else memory.free_bytes) - other_bytes
    way = f"Lower {_KEY} to {human_bytes(most)} or less, or {_ELSE}" if most > 0 else _ELSE.capitalize()
    text = (
        f"{title}: {human_bytes(other_bytes)} and a KV cache of {human_bytes(kv_cache_bytes)} are needed, and {limit}. "
        f"{way}"
    )
    return ModelRefused(text) if never else OutOfMemory(text)


def check_room(title: str, plan: MemoryPlan, memory: HostMemory) -> None:
    """Refuse a model on the processor that may come to hold more than is free. Raises OutOfMemory."""
    other = plan.weights + plan.workspace + plan.correction
    if other + plan.kv_cache > memory.free_bytes:
        device_memory = DeviceMemory(memory.total_bytes, memory.free_bytes)
        raise OutOfMemory(str(refuse_for_room(title, device_memory, other_bytes=other, kv_cache_bytes=plan.kv_cache)))
